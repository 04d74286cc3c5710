"""Whatever JSON comes to the Responses and Messages APIs, it is served or refused, and nothing else is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_fakes import FakeTools, FakeVocab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_api_chat_params import SETTINGS

from llamasrv.api.anthropic.request import read_anthropic_request
from llamasrv.api.chat_params import parse_chat
from llamasrv.api.errors import ApiError
from llamasrv.api.grammar import GrammarUse
from llamasrv.api.responses.request import read_responses_request

_NAMES = (
    "type role content text name arguments call_id output summary id input thinking source data url media_type "
    "tool_use_id image_url parameters input_schema description format schema effort function refusal"
)
_WORDS = (
    "message user assistant system developer input_text output_text refusal input_image input_file function_call "
    "function_call_output reasoning item_reference text image document thinking redacted_thinking tool_use tool_result "
    "base64 function any auto none tool required json_schema json_object enabled disabled"
)
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.sampled_from(_WORDS.split())
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES.split()), inner, max_size=6),
    max_leaves=25,
)
_FIELDS = (
    "input messages instructions system tools tool_choice reasoning text thinking max_output_tokens max_tokens stream "
    "stop_sequences output_config output_format previous_response_id chat_template_kwargs parallel_tool_calls"
)
_BODIES = st.dictionaries(st.sampled_from(_FIELDS.split()), _VALUES, max_size=5)
_ITEMS = st.lists(st.dictionaries(st.sampled_from(_NAMES.split()), _VALUES, max_size=6), max_size=4)


def read_responses(body: dict[str, Any]) -> dict[str, Any]:
    return read_responses_request(body).chat


@pytest.mark.parametrize("read", [read_responses, read_anthropic_request])
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=_BODIES, items=_ITEMS)
def test_only_refusals_are_raised(
    read: Callable[[dict[str, Any]], dict[str, Any]], body: dict[str, Any], items: list[Any]
) -> None:
    for given_body in (body, {**body, "input": items, "messages": items}):
        refusal = None
        try:
            chat = read(given_body)
            parse_chat(chat, SETTINGS, FakeVocab(), GrammarUse(FakeTools(), FakeVocab()))
        except ApiError as error:
            refusal = error
        assert refusal is None or (refusal.status == 400 and refusal.message)
