"""An engine over the fake backend with its loop in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fake_backend import FakeBackend

from llamasrv.engine.config import EngineConfig
from llamasrv.engine.result import ErrorResult, Result
from llamasrv.engine.server_context import ServerContext
from llamasrv.engine.task import Task


def never() -> bool:
    return False


@contextmanager
def running(backend: FakeBackend, config: EngineConfig | None = None) -> Iterator[ServerContext]:
    """``config``: one slot per sequence of the backend unless told otherwise."""
    spec = backend.spec
    config = config or EngineConfig(n_parallel=spec.n_seq_max, kv_unified=spec.unified)
    if not config.lora:
        config.lora = [0.0] * len(backend.adapter_infos())
    context = ServerContext.with_backend(backend, config)
    loop = threading.Thread(target=context.start_loop, daemon=True)
    loop.start()
    try:
        yield context
    finally:
        context.terminate()
        loop.join(20)
        assert not loop.is_alive()
        context.close()
        assert not backend.violations


def run(context: ServerContext, *tasks: Task) -> list[Result] | ErrorResult:
    """Results of one request. The tasks' own ids mean nothing, save that children name their parent's."""
    with context.reader() as reader:
        for task in tasks:
            task.id = reader.new_id()
            for child in task.child_tasks:
                child.id, child.id_parent = reader.new_id(), task.id
        reader.post_tasks(list(tasks))
        results = reader.wait_for_all(never)
    assert results is not None
    return results
