"""The engine's own loop with real threads: clients of all kinds at once, and the end in the middle of work."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fake_backend import BOS, N_VOCAB, FakeBackend, FakeSpec

from llamasrv.engine import response
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import ErrorResult, FinalResult, MetricsResult, PartialResult, SlotsResult
from llamasrv.engine.server_context import ServerContext
from llamasrv.engine.task import SamplingParams, Task, TaskParams, TaskType

#: How long a test waits for what must happen, seconds; never reached when all is well.
PATIENCE = 30.0
N_SLOTS = 4


def never() -> bool:
    return False


class Engine:
    """A running loop over the fake backend, each of whose decodes takes a moment."""

    def __init__(self, spec: FakeSpec, decode_s: float = 0.0005) -> None:
        self.backend = FakeBackend(spec)
        self.backend.during_decode = lambda n_done: time.sleep(decode_s)
        config = EngineConfig(n_parallel=N_SLOTS, kv_unified=spec.unified, lora=[0.0, 0.0])
        self.context = ServerContext.with_backend(self.backend, config)
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, name="main-loop")

    def _run(self) -> None:
        try:
            self.context.start_loop()
        except BaseException as error:
            self.errors.append(error)

    def reader(self) -> ResponseReader:
        # clients that look often whether they are still there
        return ResponseReader(self.context.queue, self.context.response, poll_s=0.005)

    def task(self, prompt: list[int], **params: object) -> Task:
        sampling = SamplingParams(temp=0.0, seed=1)
        settings = TaskParams(sampling=sampling, **params)  # type: ignore[arg-type]
        return Task(id=self.context.queue.get_new_id(), type=TaskType.COMPLETION, tokens=prompt, params=settings)

    def idle(self) -> bool:
        queue = self.context.queue
        return not (self.context.pool.n_processing or queue.n_deferred)


@contextmanager
def running(spec: FakeSpec, decode_s: float = 0.0005) -> Iterator[Engine]:
    engine = Engine(spec, decode_s)
    engine.thread.start()
    try:
        yield engine
    finally:
        engine.context.terminate()
        engine.thread.join(PATIENCE)
        assert not engine.thread.is_alive()
        assert engine.errors == []
        assert engine.backend.violations == []
        assert not any(thread.name == "queue-worker" for thread in threading.enumerate())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def random_prompt(chance: random.Random) -> list[int]:
    start = chance.randrange(4)
    return [BOS] + [3 + (start * 5 + number * 7) % (N_VOCAB - 3) for number in range(chance.randrange(50))]


def text_alone(spec: FakeSpec, prompt: list[int], n_predict: int) -> bytes:
    """What a prompt gives by the plainest loop over a fresh backend."""
    backend = FakeBackend(spec)
    sampler = backend.new_sampler(SamplingParams(temp=0.0))
    batch = backend.new_batch(1)
    text = b""
    tokens = list(prompt)
    position = 0
    for _ in range(n_predict):
        for token in tokens:
            batch.clear()
            batch.add(token, position, 0, True)
            assert backend.decode(batch, 0, 1, True, 1) == 0
            position += 1
        [token] = backend.sample_many([sampler], [0])  # type: ignore[list-item,misc,assignment]
        text += backend.piece(token, False)
        if backend.is_eog(token):
            break
        tokens = [token]
    return text


class Visitor:
    """A client thread: many requests one after the other, some of them left early."""

    def __init__(self, engine: Engine, spec: FakeSpec, seed: int) -> None:
        self.engine = engine
        self.spec = spec
        self.chance = random.Random(seed)
        self.problems: list[str] = []
        self.n_full = 0

    def run(self, n_requests: int = 25) -> None:
        try:
            for _ in range(n_requests):
                if self.chance.random() < 0.15:
                    self.ask()
                else:
                    self.request()
        except BaseException as error:
            self.problems.append(repr(error))

    def ask(self) -> None:
        type_ = self.chance.choice([TaskType.METRICS, TaskType.SLOT_GET])
        with self.engine.reader() as reader:
            reader.post_task(Task(id=reader.new_id(), type=type_))
            result = reader.next(never, timeout=PATIENCE)
            assert isinstance(result, MetricsResult | SlotsResult)

    def request(self) -> None:
        prompt = random_prompt(self.chance)
        n_predict = self.chance.choice([1, 3, 20])
        task = self.engine.task(prompt, stream=True, n_predict=n_predict, antiprompt=("STOP",))
        if self.chance.random() < 0.2:
            task.add_child(self.engine.context.queue.get_new_id())
        n_read = self.chance.choice([0, 1, 3]) if self.chance.random() < 0.4 else None
        pieces: dict[int, bytes] = {}
        n_ends = 0
        with self.engine.reader() as reader:
            reader.post_task(task)
            while reader.has_next():
                if n_read is not None and len(pieces) >= n_read:
                    return
                result = reader.next(never, timeout=PATIENCE)
                assert isinstance(result, PartialResult | FinalResult), result
                pieces[result.index] = pieces.get(result.index, b"") + result.content
                n_ends += result.is_stop
        assert n_ends == len(task.ids())
        expected = text_alone(self.spec, prompt, n_predict).partition(b"STOP")[0]
        assert set(pieces.values()) == {expected}, f"{pieces} instead of {expected!r}"
        self.n_full += 1


@pytest.mark.parametrize("unified", [True, False])
def test_many_clients_at_once_get_their_own_texts(unified: bool) -> None:
    spec = FakeSpec(n_ctx=600, unified=unified)
    with running(spec) as engine:
        visitors = [Visitor(engine, spec, seed) for seed in range(10)]
        threads = [threading.Thread(target=visitor.run) for visitor in visitors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert [problem for visitor in visitors for problem in visitor.problems] == []
        assert sum(visitor.n_full for visitor in visitors) > 50
        wait_for(engine.idle)
        for slot in engine.context.pool.slots:
            assert engine.backend.tokens_of(slot.id) == slot.prompt.tokens
        assert engine.backend.n_open_samplers() == 0


def test_the_end_in_the_middle_of_work_lets_nobody_wait() -> None:
    for seed in range(5):
        with running(FakeSpec(n_ctx=600), decode_s=0.002) as engine:
            answers: list[object] = []

            def client(number: int, engine: Engine = engine, answers: list[object] = answers) -> None:
                with engine.reader() as reader:
                    prompt = random_prompt(random.Random(number))
                    reader.post_task(engine.task(prompt, n_predict=200, stream=number % 2 == 0))
                    answers.append(reader.wait_for_all(never))

            threads = [threading.Thread(target=client, args=(number,)) for number in range(10)]
            for thread in threads:
                thread.start()
            time.sleep(random.Random(seed).random() * 0.05)
            engine.context.terminate()
            for thread in threads:
                thread.join(PATIENCE)
            assert not any(thread.is_alive() for thread in threads)
            assert len(answers) == 10
            assert None in answers
            assert all(answer is None or isinstance(answer, list | ErrorResult) for answer in answers)


def test_read_only_tasks_are_answered_during_a_long_decode() -> None:
    with running(FakeSpec(n_ctx=600)) as engine:
        entered, leave = threading.Event(), threading.Event()

        def long_decode(n_done: int) -> None:
            entered.set()
            assert leave.wait(PATIENCE)

        engine.backend.during_decode = long_decode
        with engine.reader() as working, engine.reader() as asking:
            working.post_task(engine.task([BOS, 5, 6], n_predict=1))
            assert entered.wait(PATIENCE)
            tasks = [Task(id=asking.new_id(), type=type_) for type_ in (TaskType.METRICS, TaskType.SLOT_GET)]
            asking.post_tasks(tasks)
            answers = asking.wait_for_all(never)
            assert isinstance(answers, list)
            metrics, slots = answers
            assert isinstance(metrics, MetricsResult)
            assert isinstance(slots, SlotsResult)
            assert metrics.n_processing_slots == 1
            assert sum(slot.is_processing for slot in slots.slots) == 1
            leave.set()
            assert isinstance(working.wait_for_all(never), list)


def test_a_client_that_leaves_ends_the_native_call_that_is_its_own() -> None:
    with running(FakeSpec(n_ctx=600, n_ubatch=4)) as engine:
        entered = threading.Event()
        moments: list[int] = []

        def slow(n_done: int) -> None:
            moments.append(n_done)
            entered.set()
            time.sleep(0.01)

        engine.backend.during_decode = slow
        with engine.reader() as reader:
            reader.post_task(engine.task([BOS] + [5] * 60, n_predict=1))
            assert entered.wait(PATIENCE)
        wait_for(engine.idle)
        # 61 tokens are 16 physical batches
        assert max(moments) < 15


def test_the_fake_sees_what_is_wrong() -> None:
    """The checks of all these tests are worth something."""
    backend = FakeBackend(FakeSpec(n_ctx=64, unified=True))
    batch = backend.new_batch(4)
    batch.extend([3, 4, 5], 0, 0, True)
    assert backend.decode(batch, 0, 3, True, 1) == 0

    def refused(action: Callable[[], object]) -> None:
        n_before = len(backend.violations)
        with pytest.raises(AssertionError):
            action()
        assert len(backend.violations) == n_before + 1

    def decode(*entries: tuple[int, int, int]) -> Callable[[], object]:
        def run() -> object:
            batch.clear()
            for token, pos, seq_id in entries:
                batch.add(token, pos, seq_id, False)
            return backend.decode(batch, 0, len(entries), True, 1)

        return run

    refused(decode((3, 4, 0)))
    refused(decode((3, 2, 0)))
    refused(decode((3, 0, 4)))
    refused(decode((N_VOCAB, 3, 0)))
    refused(lambda: backend.sample_many([backend.new_sampler(SamplingParams())], [3]))
    backend.seq_cp(0, 1, 0, -1)
    refused(lambda: backend.seq_add(1, 1, 3, 5))
    backend.seq_rm(1, 1, -1)
    assert decode((7, 1, 1))() == 0
    refused(lambda: backend.seq_cp(0, 1, 0, -1))
    backend.seq_rm(1, 0, 1)
    refused(lambda: backend.tokens_of(1))


def test_a_stream_that_nobody_reads_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "MAX_UNREAD", 3)
    with running(FakeSpec(n_seq_max=N_SLOTS)) as engine, engine.reader() as reader:
        reader.post_task(engine.task([BOS, 5, 6], n_predict=40, stream=True))
        wait_for(lambda: not engine.context.response.is_waiting(reader.ids[0]))
        wait_for(engine.idle)
        results = []
        while reader.has_next():
            results.append(reader.next(never))
        assert isinstance(results[-1], ErrorResult)
        assert len(results) == 4
