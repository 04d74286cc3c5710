"""The list of adapters and its changes."""

from __future__ import annotations

from typing import Any

import pytest

from llamasrv.api.errors import ApiError
from llamasrv.api.lora import lora_json, parse_lora
from llamasrv.engine.result import GetLoraResult, LoraInfo


def test_the_list_tells_of_each_adapter_and_of_invocations_where_there_are_some() -> None:
    plain = LoraInfo(0, "a.gguf", 0.5, "task", "prefix")
    invoked = LoraInfo(1, "b.gguf", 0.0, alora_invocation_string=b"go ", alora_invocation_tokens=[1, 2])
    assert lora_json(GetLoraResult(id=1, loras=[plain, invoked])) == [
        {"id": 0, "path": "a.gguf", "scale": 0.5, "task_name": "task", "prompt_prefix": "prefix"},
        {
            "id": 1,
            "path": "b.gguf",
            "scale": 0.0,
            "task_name": "",
            "prompt_prefix": "",
            "alora_invocation_string": "go ",
            "alora_invocation_tokens": [1, 2],
        },
    ]
    assert lora_json(GetLoraResult(id=1)) == []


def test_scales_by_index() -> None:
    assert parse_lora([]) == {}
    assert parse_lora([{"id": 0, "scale": 0.5}, {"id": 2}, {"id": 1, "scale": 2}]) == {0: 0.5, 2: 0.0, 1: 2.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "Request body must be an array"),
        (None, "Request body must be an array"),
        ([5], "Error: 'lora' must be an array of objects with 'id' and 'scale' fields"),
        ([{"scale": 1.0}], "Error: 'lora' must be an array of objects with 'id' and 'scale' fields"),
        ([{"id": "0"}], "type must be number, but is string"),
        ([{"id": 0, "scale": "1"}], "type must be number, but is string"),
        ([{"id": 2**40}], "Value must be between -1 <= value <= 2147483647, but got 1099511627776"),
    ],
)
def test_mistakes_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_lora(value)
    assert (caught.value.status, caught.value.message) == (400, message)
