"""The same chats to the genuine llama-server and to ours give the same answers, in one piece and streamed.

Not so where a tool call is demanded: the genuine server may let prose pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from test_chat_e2e import CHAT, CLOCKS, PET, TEMPLATE, USER
from test_differential import Pair, assert_same, start_pair

pytestmark = pytest.mark.reference

#: Ids that are drawn anew.
RANDOM = {"id"}


@pytest.fixture(scope="module")
def pair(reference_server: tuple[str, ...], tiny_model_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        flags = ["-m", tiny_model_path, "-c", 2048, "-np", 2, "--chat-template", TEMPLATE, "--jinja"]
        yield start_pair(reference_server, stack, *flags)


def plain(value: Any) -> Any:
    """Without ids that are drawn anew; token ids are numbers."""
    if isinstance(value, dict):
        return {
            key: "?" if key in RANDOM and isinstance(member, str) else plain(member) for key, member in value.items()
        }
    return [plain(member) for member in value] if isinstance(value, list) else value


def events(server: ServerProcess, body: Any) -> list[Any]:
    with server.stream(CHAT, body) as stream:
        assert stream.status == 200, stream.read()
        return [*map(plain, stream), stream.lines[-1]]


LAST = {"role": "assistant", "content": "It is ha"}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"seed": 5, "temperature": 1.2},
    "length of one": {"max_tokens": 1},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    "stop": {"grammar": 'root ::= "abc STOP"', "stop": ["STOP"], "max_tokens": 32},
    "grammar": {"grammar": 'root ::= "yes" | "no" " way"?'},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": PET}}, "max_tokens": 60},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "probabilities": {"logprobs": True, "top_logprobs": 3, "max_tokens": 4},
    "probabilities by default": {"logprobs": True, "max_tokens": 2},
    "times": {"timings_per_token": True},
    "continued": {"messages": [USER, LAST]},
    "continued under a grammar": {"messages": [USER, LAST], "grammar": 'root ::= "lf past ten"'},
    "continued on demand": {
        "messages": [USER, LAST],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "continued and echoed": {"messages": [USER, LAST], "echo": True},
    "tools that need not be used": {"tools": CLOCKS},
    "no tools": {"tools": CLOCKS, "tool_choice": "none"},
    "counts": {"stream_options": {"include_usage": True}},
    "verbose": {"verbose": True, "max_tokens": 3},
    "unparsed": {"reasoning_format": "none"},
    "what the web page sends": {
        "tools": CLOCKS,
        "sse_ping_interval": 1,
        "timings_per_token": True,
        "reasoning_format": "auto",
        "reasoning_control": True,
        "backend_sampling": False,
        "typ_p": 0.5,
        "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
    },
    "thinking": {"chat_template_kwargs": {"enable_thinking": False}},
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(pair: Pair, name: str) -> None:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 12, "top_k": 5, **CHATS[name]}
    theirs, ours = pair.request("POST", CHAT, body)
    assert (ours.status, ours.headers["content-type"]) == (theirs.status, theirs.headers["content-type"]), ours.text
    assert_same(plain(theirs.json()), plain(ours.json()))


@pytest.mark.parametrize("name", CHATS)
def test_streams(pair: Pair, name: str) -> None:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 12, "top_k": 5, **CHATS[name], "stream": True}
    assert_same(*(events(server, body) for server in (pair.reference, pair.ours)))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 5},
        {"messages": [{"content": "x"}]},
        {"messages": [USER], "response_format": {"type": "yaml"}},
        {"messages": [USER], "top_logprobs": 3},
        {"messages": [USER], "tools": CLOCKS, "stream": True, "logprobs": True},
        {"messages": [USER], "tools": CLOCKS, "tool_choice": "perhaps"},
        {"messages": [USER], "n": 9},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": "yes"}},
        {"messages": [USER], "reasoning_format": "loud"},
        {"messages": [USER], "grammar": "root ::= x", "tools": CLOCKS},
    ],
)
def test_refusals_have_the_same_kind(pair: Pair, body: Any) -> None:
    theirs, ours = pair.request("POST", CHAT, body)
    if theirs.status == 500:
        # the genuine server takes some mistakes of the caller for its own
        assert ours.status == 400, ours.text
    else:
        assert (ours.status, ours.json()["error"]["type"]) == (theirs.status, theirs.json()["error"]["type"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/apply-template", {"messages": [USER, LAST]}),
        ("/apply-template", {"messages": [USER], "tools": CLOCKS}),
        ("/chat/completions/input_tokens", {"messages": [USER]}),
        ("/v1/chat/completions/input_tokens", {"messages": [USER], "tools": CLOCKS}),
        ("/v1/chat/completions/control", {"id": "chatcmpl-x", "action": "reasoning_end"}),
        ("/v1/chat/completions/control", {"id": "chatcmpl-x", "action": "stop"}),
        ("/v1/chat/completions/control", {"action": "reasoning_end"}),
    ],
)
def test_what_belongs_to_chats(pair: Pair, path: str, body: Any) -> None:
    pair.same("POST", path, body)


def test_properties_of_the_template(pair: Pair) -> None:
    theirs, ours = pair.request("GET", "/props")
    for name in ("chat_template", "chat_template_caps", "chat_template_tool_use"):
        assert theirs.json().get(name) == ours.json().get(name)
