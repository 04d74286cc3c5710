"""Requests that wait for all their results and answer in one piece."""

from __future__ import annotations

from collections.abc import Callable

from llamasrv.api.errors import ApiError
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import ErrorResult, Result
from llamasrv.engine.task import Task
from llamasrv.http.errors import stopping


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
