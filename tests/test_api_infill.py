"""The prompt of fill-in-the-middle requests."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import BOS, FILE, MID, PRE, REP, SUF, FakeIds, FakeServer, FakeVocab, server_meta, server_params

from llamasrv.api.completion import build_completion_tasks
from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.api.infill import infill_prompt
from llamasrv.engine.task import TaskType

HEAD = [REP, *b"myproject\n"]
FOOT = [FILE, *b"filename\n"]


def context(vocab: dict[str, Any] | None = None, n_ctx: int = 4096, **params: Any) -> ApiContext:
    return ApiContext(FakeServer(server_params(**params), server_meta(slot_n_ctx=n_ctx), FakeVocab(**(vocab or {}))))


def prompt(data: dict[str, Any], of: ApiContext | None = None) -> list[int]:
    return infill_prompt(of or context(), {"input_prefix": "ab", "input_suffix": "yz", **data})


def refused(data: dict[str, Any], of: ApiContext | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        infill_prompt(of or context(), data)
    return caught.value


def test_repository_then_bos_then_prefix_and_prompt_then_suffix() -> None:
    assert prompt({"prompt": "cd"}) == [*HEAD, *FOOT, BOS, PRE, *b"abcd", SUF, *b"yz", MID]


def test_without_a_prompt_the_prefix_is_next_to_the_gap() -> None:
    expected = [*HEAD, *FOOT, BOS, PRE, *b"ab", SUF, *b"yz", MID]
    assert prompt({}) == prompt({"prompt": ""}) == prompt({"prompt": None}) == expected


def test_the_other_order() -> None:
    of = context(spm_infill=True)
    assert prompt({"prompt": "cd"}, of) == [*HEAD, *FOOT, BOS, SUF, *b"yz", PRE, *b"abcd", MID]


def test_extra_chunks_are_files_of_the_repository() -> None:
    extra = [{"filename": "a.h", "text": "int a;"}, {"text": "int b;"}]
    expected = [*HEAD, FILE, *b"a.h\nint a;", FILE, *b"tmp\nint b;", *FOOT, BOS, PRE, *b"ab", SUF, *b"yz", MID]
    assert prompt({"input_extra": extra}) == expected
    assert prompt({"input_extra": []}) == prompt({"input_extra": None}) == prompt({})


def test_models_without_repository_tokens_get_snippets() -> None:
    of = context({"fim_rep": -1, "fim_sep": -1})
    expected = [*b"\n\n--- snippet ---\n\nint a;", BOS, PRE, *b"ab", SUF, *b"yz", MID]
    assert prompt({"input_extra": [{"filename": "a.h", "text": "int a;"}]}, of) == expected
    assert prompt({}, context({"fim_rep": -1, "fim_sep": -1, "add_bos": False})) == [PRE, *b"ab", SUF, *b"yz", MID]


@pytest.mark.parametrize("data", [{}, {"prompt": "x"}, {"input_extra": [{"text": "x"}]}, {"input_prefix": "<s>"}])
@pytest.mark.parametrize("spm_infill", [False, True])
def test_there_is_exactly_one_bos(data: dict[str, Any], spm_infill: bool) -> None:
    assert prompt(data, context(spm_infill=spm_infill)).count(BOS) == 1


def test_prefix_and_suffix_share_a_batch_three_to_one() -> None:
    of = context(n_batch=16)
    text = "".join(chr(ord("a") + i) for i in range(20))
    # 12 of the prefix' end, 4 - 2 of the suffix' beginning
    tail = [BOS, PRE, *text[-12:].encode(), SUF, *b"ab", MID]
    assert prompt({"input_prefix": text, "input_suffix": text}, of)[-len(tail) :] == tail
    # what stands before the cursor takes the suffix' room
    assert prompt({"input_suffix": text, "prompt": "12"}, of)[-8:] == [BOS, PRE, *b"ab12", SUF, MID]
    assert prompt({"input_suffix": text, "prompt": "1"}, of)[-8:] == [BOS, PRE, *b"ab1", SUF, *b"a", MID]


def test_extra_chunks_get_what_the_context_has_left() -> None:
    chunks = [{"filename": "f", "text": "x" * 1000 + "END"}]
    for n_predict, n_extra in ((-1, 512 - 100 + 2), (50, 512 - 100 - 100), (10_000, 0)):
        of = context(n_ctx=512, n_batch=100, n_predict=n_predict)
        tokens = prompt({"input_extra": chunks}, of)
        assert tokens.index(BOS) == n_extra
        if n_extra:
            assert tokens[n_extra - len(FOOT) - 3 : n_extra] == [*b"END", *FOOT]


def test_prefix_and_suffix_may_be_tokens() -> None:
    tokens = prompt({"input_prefix": [1, 2], "input_suffix": ["y", 3]})
    assert tokens[tokens.index(PRE) :] == [PRE, 1, 2, SUF, *b"y", 3, MID]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_suffix": "x"}, '"input_prefix" is required'),
        ({"input_prefix": "x"}, '"input_suffix" is required'),
        ({"input_prefix": "x", "input_suffix": "x", "prompt": 5}, '"prompt" must be a string'),
        ({"input_prefix": 5, "input_suffix": "x"}, "type must be string, but is number"),
        ({"input_prefix": [-1], "input_suffix": "x"}, '"input_prefix" contains invalid tokens'),
        ({"input_prefix": "x", "input_suffix": [99999]}, '"input_suffix" contains invalid tokens'),
        *(
            ({"input_prefix": "x", "input_suffix": "x", "input_extra": extra}, message)
            for extra, message in (
                ({}, '"input_extra" must be an array of {"filename": string, "text": string}'),
                ("x", '"input_extra" must be an array of {"filename": string, "text": string}'),
                ([{}], 'extra_context chunk must contain a "text" field with a string value'),
                (["x"], 'extra_context chunk must contain a "text" field with a string value'),
                ([{"filename": "ok"}], 'extra_context chunk must contain a "text" field with a string value'),
                ([{"text": 4}], 'extra_context chunk must contain a "text" field with a string value'),
                ([{"text": "x", "filename": 123}], 'extra_context chunk\'s "filename" field must be a string'),
            )
        ),
    ],
)
def test_mistakes_are_refused(data: dict[str, Any], message: str) -> None:
    error = refused(data)
    assert (error.status, error.message) == (400, message)


def test_models_that_cannot_fill_say_what_they_lack() -> None:
    error = refused({}, context({"fim_pre": -1, "fim_mid": -1}))
    assert error.status == 501
    assert error.message == (
        "Infill is not supported by this model: prefix token is missing. middle token is missing. "
    )


def test_the_task_is_an_ordinary_one_of_its_own_type() -> None:
    data = {"input_prefix": "a", "input_suffix": "b", "n_predict": 3, "prompt": "c"}
    tokens = infill_prompt(context(), data)
    (task,) = build_completion_tasks(context(), {**data, "prompt": tokens}, FakeIds(), TaskType.INFILL)
    assert (task.type, task.tokens, task.params.n_predict) == (TaskType.INFILL, tokens, 3)
