"""State of slots and counters, asked of the engine."""

from __future__ import annotations

from collections.abc import Callable

from flask import Response, request

from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.api.jsonio import parse_object
from llamasrv.api.metrics import CONTENT_TYPE, START_HEADER, metrics_text, start_time
from llamasrv.api.slot_actions import slot_action_json, slot_task
from llamasrv.api.slots import slots_json
from llamasrv.engine.result import ErrorResult, ErrorType, MetricsResult, Result
from llamasrv.engine.task import SlotAction, Task, TaskType
from llamasrv.http import waiting
from llamasrv.http.errors import json_response, stopping
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import slots_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    queue = state.context.queue

    def ask(
        type_: TaskType,
        should_stop: Callable[[], bool],
        action: SlotAction | None = None,
        timeout: float | None = None,
    ) -> Result | None:
        """The answer to a task that goes before all others.

        None when ``should_stop()``, after ``timeout`` seconds or at the server's end.
        """
        with state.reader() as reader:
            task = Task(id=reader.new_id(), type=type_, metrics_reset_bucket=True, slot_action=action)
            reader.post_task(task, front=True)
            result = reader.next(should_stop, timeout)
        if isinstance(result, ErrorResult):
            raise ApiError.from_result(result)
        return result

    def slots() -> Response:
        if not state.config.endpoint_slots:
            message = "This server does not support slots endpoint. Start it with `--slots`"
            raise ApiError(ErrorType.NOT_SUPPORTED, message)
        result = slots_of(state, Client(request.environ).is_gone)
        if request.args.get("fail_on_no_slot") and result.n_idle_slots == 0:
            raise ApiError(ErrorType.UNAVAILABLE, "no slot available")
        return json_response(slots_json(context, result))

    def slot_action(id_slot: str) -> Response:
        body = request.get_data()
        data = parse_object(body) if body else {}
        action = request.args.get("action", "")
        type_, payload = slot_task(action, id_slot, state.config.slot_save_path, data)
        result = ask(type_, Client(request.environ).is_gone, payload)
        if result is None:
            raise stopping()
        return json_response(slot_action_json(result))

    def metrics() -> Response:
        if not state.config.endpoint_metrics:
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            raise ApiError(ErrorType.NOT_SUPPORTED, message)
        result = None
        if not queue.is_sleeping():
            # a task posted just before the engine falls asleep is not answered, and must not wake it
            result = ask(TaskType.METRICS, queue.is_sleeping, timeout=waiting.LOOK_WAIT_S)
        if not isinstance(result, MetricsResult):
            result = state.context.metrics_snapshot(reset_bucket=True)
        headers = {START_HEADER: start_time(result)}
        return Response(metrics_text(result), 200, headers, content_type=CONTENT_TYPE)

    return [
        Route("GET", "/slots", slots, needs_model=True),
        Route("POST", "/slots/<id_slot>", slot_action, needs_model=True),
        Route("GET", "/metrics", metrics, is_short=True),
    ]
