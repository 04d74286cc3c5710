"""Prompts, and text to tokens and back."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import BOS, EOS, FakeVocab
from hypothesis import given
from hypothesis import strategies as st

from llamasrv.api.errors import ApiError
from llamasrv.api.prompt import tokenize_prompts
from llamasrv.api.tokenize import detokenize_json, tokenize_json

VOCAB = FakeVocab()
A, B = ord("a"), ord("b")
WRONG_ELEMENT = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, '
    "or a list of mixed strings & tokens."
)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, A, B]]),
        ("", [[BOS]]),
        ([1, 2], [[1, 2]]),
        ([1, "a", 2], [[1, A, 2]]),
        (["a", 2], [[BOS, A, 2]]),
        (["a", "b"], [[BOS, A], [BOS, B]]),
        ([[1, 2], "a"], [[1, 2], [BOS, A]]),
        ([[1, "a"], [2]], [[1, A], [2]]),
        ({"prompt_string": "a"}, [[BOS, A]]),
        ({"prompt_string": [1, "b"]}, [[1, B]]),
        ([{"prompt_string": "a"}, "b"], [[BOS, A], [BOS, B]]),
        ([[]], [[]]),
        (["<s>"], [[BOS, BOS]]),
        ("a\0", [[BOS, A, 0]]),
        ("é", [[BOS, 0xC3, 0xA9]]),
    ],
)
def test_prompts_become_tokens(prompt: Any, expected: list[list[int]]) -> None:
    assert tokenize_prompts(VOCAB, prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], '"prompt" must not be empty'),
        ({}, WRONG_ELEMENT),
        (5, WRONG_ELEMENT),
        (None, WRONG_ELEMENT),
        (True, WRONG_ELEMENT),
        ([1.5], WRONG_ELEMENT),
        ([1, 1.5], WRONG_ELEMENT),
        ([1, None], WRONG_ELEMENT),
        ([1, [2]], WRONG_ELEMENT),
        (["a", ["b"]], WRONG_ELEMENT),
        (["a", 5.5], WRONG_ELEMENT),
        ([True], WRONG_ELEMENT),
        ([1, "x", [2]], "type must be number, but is array"),
        ([1, "x", True], "type must be number, but is boolean"),
        ({"prompt_string": 5}, "type must be string, but is number"),
        (
            {"prompt_string": "a", "multimodal_data": ["x"]},
            "Multimodal data provided, but model does not support multimodal requests.",
        ),
        ([-1], "Prompt contains invalid tokens"),
        ([VOCAB.n_tokens], "Prompt contains invalid tokens"),
        ([2**40], "Prompt contains invalid tokens"),
        ([-(2**63)], "Prompt contains invalid tokens"),
        (["a", [1, 999_999_999]], "Prompt contains invalid tokens"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        tokenize_prompts(VOCAB, prompt)
    assert (caught.value.status, caught.value.message) == (400, message)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, []),
        ({"content": "ab"}, [A, B]),
        ({"content": "ab", "add_special": True}, [BOS, A, B]),
        ({"content": [1, "a"], "add_special": True}, [1, A]),
        ({"content": ["a", "b"], "add_special": True}, [BOS, A, B]),
        ({"content": "</s>"}, [EOS]),
        ({"content": "</s>", "parse_special": False}, list(b"</s>")),
        ({"content": []}, []),
        ({"content": "a", "with_pieces": None}, [A]),
    ],
)
def test_tokenize(data: dict[str, Any], expected: list[int]) -> None:
    assert tokenize_json(VOCAB, data) == {"tokens": expected}


def test_pieces_are_text_or_bytes() -> None:
    data = {"content": ["a", 0xC3, BOS], "with_pieces": True}
    assert tokenize_json(VOCAB, data)["tokens"] == [
        {"id": A, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": BOS, "piece": "<s>"},
    ]


@pytest.mark.parametrize(
    "data",
    [
        {"content": 5},
        {"content": None},
        {"content": {}},
        {"content": [1.5]},
        {"content": [None]},
        {"content": [-1]},
        {"content": [2**40], "with_pieces": True},
        {"content": "a", "add_special": 1},
        {"content": "a", "parse_special": "no"},
        {"content": "a", "with_pieces": []},
    ],
)
def test_tokenize_refuses_the_rest(data: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        tokenize_json(VOCAB, data)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("data", "expected"),
    [({}, ""), ({"tokens": []}, ""), ({"tokens": [BOS, A, 0xC3, 0xA9]}, "<s>aé"), ({"tokens": [0xC3]}, "\ufffd")],
)
def test_detokenize(data: dict[str, Any], expected: str) -> None:
    assert detokenize_json(VOCAB, data) == {"content": expected}


@pytest.mark.parametrize("tokens", [None, "a", 5, {}, ["a"], [1.5], [True], [-1], [2**40], [VOCAB.n_tokens]])
def test_detokenize_refuses_what_is_no_list_of_known_tokens(tokens: Any) -> None:
    with pytest.raises(ApiError) as caught:
        detokenize_json(VOCAB, {"tokens": tokens})
    assert caught.value.status == 400


PROMPTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(0, 300)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.just("prompt_string"), inner, max_size=1),
    max_leaves=8,
)


def prompts_or_status(prompt: Any) -> list[list[int]] | int:
    try:
        return tokenize_prompts(VOCAB, prompt)
    except ApiError as error:
        return error.status


@given(PROMPTS)
def test_any_prompt_gives_known_tokens_or_a_400(prompt: Any) -> None:
    outcome = prompts_or_status(prompt)
    if isinstance(outcome, int):
        assert outcome == 400
        return
    assert outcome
    assert all(0 <= token < VOCAB.n_tokens for tokens in outcome for token in tokens)
