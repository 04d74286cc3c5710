"""Requests that wait for all their results and answer in one piece."""

from __future__ import annotations

from collections.abc import Callable

from llamasrv.api.errors import ApiError
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import ErrorResult, Result, SlotsResult
from llamasrv.engine.task import Task, TaskType
from llamasrv.http.errors import stopping
from llamasrv.http.state import ServerState

#: How long who only looks waits for the main loop before counters and slots are read as they are, seconds.
LOOK_WAIT_S = 0.1


def results_of(reader: ResponseReader, tasks: list[Task], should_stop: Callable[[], bool]) -> list[Result]:
    """Post the tasks of a request and return their results in order.

    Raises ApiError when one of them fails, when ``should_stop()``, and at the server's end. Closes the reader.
    """
    with reader:
        reader.post_tasks(tasks)
        results = reader.wait_for_all(should_stop)
    if results is None:
        raise stopping()
    if isinstance(results, ErrorResult):
        raise ApiError.from_result(results)
    return results


def slots_of(state: ServerState, should_stop: Callable[[], bool]) -> SlotsResult:
    """The slots, between two steps if the main loop answers soon, else as they are."""
    with state.reader() as reader:
        reader.post_task(Task(id=reader.new_id(), type=TaskType.SLOT_GET), front=True)
        result = reader.next(should_stop, LOOK_WAIT_S)
    if state.is_stopping:
        raise stopping()
    return result if isinstance(result, SlotsResult) else state.context.slots_snapshot()
