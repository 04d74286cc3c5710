"""Frameworks over OpenAI's API as clients; each test runs where the framework is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from test_chat_e2e import CLOCKS, ENDS, PET, TEMPLATE, USER


@pytest.fixture(scope="module")
def url(tiny_model_path: Path) -> Iterator[str]:
    if not (find_spec("langchain_openai") or find_spec("litellm")):
        pytest.skip("neither langchain-openai nor litellm is installed")
    flags = ["-m", tiny_model_path, "-c", 2048, "-np", 2, "-t", 1, "--no-warmup", "--chat-template", TEMPLATE]
    with ServerProcess(*flags, "--api-key", "secret") as server:
        yield f"http://127.0.0.1:{server.port}/v1"


def langchain(url: str, **settings: Any) -> Any:
    module = pytest.importorskip("langchain_openai")
    settings = {"temperature": 0, "max_tokens": 400, **settings}
    return module.ChatOpenAI(base_url=url, api_key="secret", model="any", max_retries=0, **settings)


def test_langchain_chats_and_streams(url: str) -> None:
    chat = langchain(url, max_tokens=12)
    whole = chat.invoke("hello")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(chunk.content for chunk in chat.stream("hello")) == whole.content


def test_langchain_calls_tools(url: str) -> None:
    chat = langchain(url, extra_body={"logit_bias": ENDS["logit_bias"]})
    answer = chat.bind_tools(CLOCKS, tool_choice="clock_utc", parallel_tool_calls=False).invoke("what time is it?")
    [call] = answer.tool_calls
    assert call["name"] == "clock_utc"
    assert call["args"]["zone"] in ("UTC", "CET")


def test_langchain_parses_structured_output(url: str) -> None:
    schema = {"title": "pet", "description": "an animal", **PET}
    answer = langchain(url).with_structured_output(schema, method="json_schema").invoke("give me a pet")
    assert answer["pet"] in ("cat", "dog")


def litellm(url: str, **settings: Any) -> Any:
    # else it fetches a price list
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    module = pytest.importorskip("litellm")
    settings = {"messages": [USER], "temperature": 0, "max_tokens": 12, **settings}
    return module.completion(model="openai/any", api_base=url, api_key="secret", num_retries=0, **settings)


def test_litellm_chats_and_streams(url: str) -> None:
    whole = litellm(url)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == 12
    chunks = list(litellm(url, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_litellm_calls_tools(url: str) -> None:
    body = {"tools": CLOCKS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    [call] = litellm(url, **body).choices[0].message.tool_calls
    assert call.function.name in ("clock_utc", "clock_local")
    assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")


def test_litellm_names_errors(url: str) -> None:
    module = pytest.importorskip("litellm")
    with pytest.raises(module.BadRequestError):
        litellm(url, messages=[{"role": "user", "content": "tick tock " * 1200}])
