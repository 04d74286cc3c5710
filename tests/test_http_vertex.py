"""Vertex AI's names for port and routes, and predictions over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from http_harness import Harness, plain_routes, serve, wait_for

from llamasrv.engine import log
from llamasrv.engine.task import Task
from llamasrv.http.config import HttpConfig
from llamasrv.http.requests import RequestRecord
from llamasrv.http.route import Route
from llamasrv.http.routes import vertex
from llamasrv.http.state import ServerState
from llamasrv.http.vertex import Vertex


def test_nothing_without_the_mode() -> None:
    assert Vertex.from_env({}) is None
    assert Vertex.from_env({"AIP_MODE": "TRAINING", "AIP_HTTP_PORT": "x"}) is None


def test_defaults_and_values_of_the_environment() -> None:
    mode = {"AIP_MODE": "PREDICTION"}
    assert Vertex.from_env(mode) == Vertex("/predict", "", 8080)
    assert Vertex.from_env({**mode, "AIP_HTTP_PORT": "", "AIP_PREDICT_ROUTE": ""}) == Vertex()
    env = {**mode, "AIP_HTTP_PORT": "9", "AIP_PREDICT_ROUTE": "guess", "AIP_HEALTH_ROUTE": "/alive"}
    assert Vertex.from_env(env) == Vertex("/guess", "/alive", 9)


@pytest.mark.parametrize("port", ["x", "-1", "65536", "8080x"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(ValueError, match="AIP_HTTP_PORT"):
        Vertex.from_env({"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": port})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "chatCompletions"),
        ("/chat/completions", "chatCompletions"),
        ("/apply-template", "applyTemplate"),
        ("/v1/messages/count_tokens", "messagesCountTokens"),
        ("/slots/<id_slot>", "slots"),
        ("/health", "health"),
    ],
)
def test_names_of_routes(path: str, name: str) -> None:
    assert vertex.format_name(path) == name


def predicting_routes(state: ServerState) -> list[Route]:
    others = plain_routes(state)
    return [*others, *vertex.routes(state, Vertex(health_path="/alive"), others)]


@pytest.fixture
def harness() -> Iterator[Harness]:
    config = HttpConfig(port=0, api_prefix="/api", api_keys=("secret",))
    with serve(config, predicting_routes) as harness:
        yield harness


def predict(harness: Harness, body: Any, key: str = "secret") -> tuple[int, Any]:
    response, data = harness.request("POST", "/api/predict", body, {"Authorization": f"Bearer {key}"})
    return response.status, json.loads(data)


def answer(harness: Harness) -> None:
    """Answer tasks in the order of their ids, once both are there: none waits for the other."""
    tasks: list[Task] = []
    lock = threading.Lock()

    def on_task(task: Task) -> None:
        with lock:
            tasks.append(task)
            if len(tasks) == 2:
                for own in tasks:
                    harness.context.end(own, "text")

    harness.context.on_task = on_task


def test_instances_are_served_side_by_side_and_answered_in_order(harness: Harness) -> None:
    answer(harness)
    instances = [{"@requestFormat": "run"}, {"@requestFormat": "echo", "x": 1}, {"@requestFormat": "/run"}]
    status, body = predict(harness, {"instances": instances})
    assert status == 200
    assert body == {"predictions": [["text"], {"size": len(b'{"x":1}')}, ["text"]]}


def test_streaming_is_switched_off(harness: Harness) -> None:
    harness.context.on_task = lambda task: harness.context.end(task, "text")
    status, body = predict(harness, {"instances": [{"@requestFormat": "run", "stream": True}]})
    assert (status, body) == (200, {"predictions": [["text"]]})


def test_a_prediction_is_one_request_with_one_end(harness: Harness) -> None:
    lines: list[str] = []
    log.set_sink(lambda level, text: lines.append(text), log.INFO)
    try:
        key = {"Authorization": "Bearer secret"}
        answers: list[tuple[int, Any]] = []
        body = {"instances": [{"@requestFormat": "run"}, {"@requestFormat": "run"}]}
        thread = threading.Thread(target=lambda: answers.append(predict(harness, body)))
        thread.start()
        tasks = {harness.context.next_task().id for _ in range(2)}
        [record] = harness.state.requests.all()
        assert set(record.task_ids) == tasks
        record.cancel()
        thread.join(60)
        [(status, got)] = answers
        assert status == 200
        assert [part["error"]["message"] for part in got["predictions"]] == ["The request was cancelled"] * 2
        assert {harness.context.cancelled.get(timeout=60) for _ in tasks} == tasks
        assert wait_for(lambda: not harness.state.requests.all())
        assert harness.request("GET", "/api/nothing", headers=key)[0].status == 404
        assert wait_for(lambda: any("/api/nothing" in line for line in lines))
        assert [line.split()[3] for line in lines if "access: " in line] == ["/api/predict", "/api/nothing"]
    finally:
        log.set_sink(lambda level, text: None, 0)


def test_an_instance_has_a_limit_of_its_own() -> None:
    whole = RequestRecord(id="a", method="POST", path="/predict", caller="")
    part = whole.part()
    part.timeout_s = 5.0
    assert (whole.timeout_s, whole.part().timeout_s) == (0.0, 0.0)


def test_an_instance_that_fails_does_not_harm_the_others(harness: Harness) -> None:
    bad = [{"@requestFormat": "predict"}, {"@requestFormat": "none"}, {"x": 1}, 5, {"@requestFormat": "fail"}]
    status, body = predict(harness, {"instances": [*bad, {"@requestFormat": "models"}]})
    assert status == 200
    *errors, models = body["predictions"]
    assert models == {"data": []}
    assert [error["error"]["code"] for error in errors] == [400, 400, 400, 400, 500]
    assert "no handler registered" in errors[0]["error"]["message"]
    assert errors[4]["error"]["message"] == "it broke"


@pytest.mark.parametrize("body", [b"{", [], {}, {"instances": {}}, {"instances": [{}] * 129}])
def test_bodies_without_instances_are_refused(harness: Harness, body: Any) -> None:
    status, answered = predict(harness, body)
    assert status == 400
    assert answered["error"]["type"] == "invalid_request_error"


def test_no_instances_no_predictions(harness: Harness) -> None:
    assert predict(harness, {"instances": []}) == (200, {"predictions": []})


def test_the_key_is_needed(harness: Harness) -> None:
    assert predict(harness, {"instances": []}, "wrong")[0] == 401


def test_health_has_a_second_path(harness: Harness) -> None:
    response, data = harness.request("GET", "/api/alive", headers={"Authorization": "Bearer secret"})
    assert (response.status, json.loads(data)) == (200, {"status": "ok"})


def test_a_path_that_is_taken_is_refused() -> None:
    routes = [Route("POST", "/run", lambda: None)]  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="conflicts with an existing"):
        vertex.routes(None, Vertex(predict_path="/run"), routes)  # type: ignore[arg-type]
