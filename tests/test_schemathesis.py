"""Requests made from /openapi.json: whatever it allows is served or refused as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi import checks
from server_process import ServerProcess

from llamasrv.api.openapi import openapi_path
from llamasrv.api.openapi_routes import OPERATIONS

#: What an answer has to be: of a documented status, type and form.
CONFORMANCE = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # a small context: no answer is long, however many tokens are asked for
    flags = ["-c", 128, "-np", 2, "-t", 1, "--metrics", "--props", "--jinja", "--embeddings", "--pooling", "mean"]
    flags += ["--slot-save-path", tmp_path_factory.mktemp("slots")]
    with ServerProcess("-m", tiny_models["tiny-bpe"], *flags) as server:
        yield server


@pytest.fixture(scope="module")
def schema(server: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")


@pytest.mark.parametrize(("method", "path"), [(op.method, openapi_path(op.path)) for op in OPERATIONS])
def test_an_operation_does_what_the_document_says(schema: Any, server: ServerProcess, method: str, path: str) -> None:
    operation = schema[path][method]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    seen: list[int] = []

    @settings(
        max_examples=10 if method == "POST" else 4,
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        response = case.call(timeout=60)
        seen.append(response.status_code)
        # 501: not with this model or these flags
        assert response.status_code < 500 or response.status_code == 501, response.text
        case.validate_response(response, checks=CONFORMANCE)

    run()
    assert seen
    assert server.get("/health").status == 200


def test_examples_of_the_document_are_served(server: ServerProcess) -> None:
    for operation in OPERATIONS:
        if operation.example is None or "<" in operation.path or operation.path.endswith("/control"):
            continue
        response = server.request(operation.method, operation.path, operation.example)
        expected = (200, 501) if operation.errors and 501 in operation.errors else (200,)
        if operation.path == "/lora-adapters":
            expected = (200, 400)  # there is no adapter
        assert response.status in expected, (operation.path, response.text)
