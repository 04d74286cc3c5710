"""Results in the native dialect."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from api_fakes import BOS, EOS, api_context

from llamasrv.api import sse
from llamasrv.api.errors import ApiError
from llamasrv.api.fields import FLOAT_MAX
from llamasrv.api.format_native import completion_response, final_frame, final_json, partial_frame
from llamasrv.api.jsonio import dumps
from llamasrv.engine.result import (
    ErrorResult,
    ErrorType,
    FinalResult,
    PartialResult,
    PromptProgress,
    StopType,
    TokenProb,
)
from llamasrv.engine.stats import SlotStats
from llamasrv.engine.task import SamplingParams, TaskParams

CONTEXT = api_context()
STATS = SlotStats(
    n_prompt_cached=2, n_prompt_processed=4, n_gen=3, t_start=1_000, t_prompt_last=5_000, t_gen_last=25_000
)
PROBS = [TokenProb(65, b"A\xf0\x9f", 0.5, [(65, b"A\xf0\x9f", 0.5), (66, b"\xff", 0.0)])]


def event(frame: bytes) -> dict[str, Any]:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    value: dict[str, Any] = json.loads(frame[6:])
    return value


def final(**values: Any) -> FinalResult:
    return FinalResult(id=1, **{"content": b"ab", "prompt": [BOS, 97], "stats": STATS, **values})


def test_a_piece_of_a_stream() -> None:
    result = PartialResult(id=1, index=2, content="é\n".encode(), tokens=[5], n_decoded=7, n_prompt_tokens=9)
    assert event(partial_frame(result)) == {
        "index": 2,
        "content": "é\n",
        "tokens": [5],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 7,
        "tokens_evaluated": 9,
    }


def test_broken_bytes_of_the_model_are_replaced() -> None:
    assert event(partial_frame(PartialResult(id=1, content=b"a\xff\xed\xa0\x80")))["content"].startswith("a\ufffd")
    assert completion_response(CONTEXT, [final(content=b"\xf0\x9f")])["content"] == "\ufffd"


def test_the_begin_of_a_stream_shows_nothing() -> None:
    assert partial_frame(PartialResult(id=1, is_begin=True)) == b""


def test_a_piece_with_progress_timings_and_probabilities() -> None:
    value = event(partial_frame(PartialResult(id=1, progress=PromptProgress(10, 2, 5, 33), stats=STATS, prob=PROBS[0])))
    assert value["prompt_progress"] == {"total": 10, "cache": 2, "processed": 5, "time_ms": 33}
    assert value["timings"]["prompt_n"] == 4
    assert [entry["id"] for entry in value["completion_probabilities"]] == [65]


def test_timings_and_probabilities_stay_out_where_there_are_none() -> None:
    value = event(partial_frame(PartialResult(id=1, stats=SlotStats(), prob=TokenProb(1, b"x", 1.0))))
    assert not {"timings", "completion_probabilities", "prompt_progress"} & value.keys()


def test_a_whole_completion() -> None:
    result = final(
        index=1,
        id_slot=3,
        tokens=[97, 98],
        truncated=True,
        has_new_line=True,
        stop=StopType.WORD,
        stopping_word="END",
        n_decoded=3,
        n_prompt_tokens=6,
        n_tokens_cached=8,
    )
    value = json.loads(dumps(final_json(CONTEXT, result)))
    settings = value.pop("generation_settings")
    assert settings["max_tokens"] == -1
    assert value == {
        "index": 1,
        "content": "ab",
        "tokens": [97, 98],
        "id_slot": 3,
        "stop": True,
        "model": "tiny",
        "tokens_predicted": 3,
        "tokens_evaluated": 6,
        "prompt": "<s>a",
        "has_new_line": True,
        "truncated": True,
        "stop_type": "word",
        "stopping_word": "END",
        "tokens_cached": 8,
        "timings": {
            "cache_n": 2,
            "prompt_n": 4,
            "prompt_ms": 4.0,
            "prompt_per_token_ms": 1.0,
            "prompt_per_second": 1000.0,
            "predicted_n": 3,
            "predicted_ms": 20.0,
            "predicted_per_token_ms": 10.0,
            "predicted_per_second": 100.0,
        },
    }


def test_drafts_show_in_timings_once_there_are_some() -> None:
    stats = SlotStats(n_draft_tokens=5, n_draft_accepted=3)
    value = final_json(CONTEXT, final(stats=stats))["timings"]
    assert (value["draft_n"], value["draft_n_accepted"]) == (5, 3)


def test_one_result_is_an_object_several_are_a_list() -> None:
    assert completion_response(CONTEXT, [final()])["content"] == "ab"
    assert [value["index"] for value in completion_response(CONTEXT, [final(index=0), final(index=1)])] == [0, 1]


def test_response_fields_pick_members() -> None:
    paths = ("content", "generation_settings/n_predict", "a/b", "content/x", "timings/prompt_n", "/content", "")
    params = TaskParams(n_predict=5, response_fields=paths)
    assert final_json(CONTEXT, final(params=params)) == {
        "content": "ab",
        "generation_settings/n_predict": 5,
        "timings/prompt_n": 4,
    }


def test_log_probabilities_have_no_infinity() -> None:
    (entry,) = json.loads(dumps(final_json(CONTEXT, final(probs=PROBS))))["completion_probabilities"]
    assert entry == {
        "id": 65,
        "token": "A",
        "bytes": [65, 240, 159],
        "logprob": pytest.approx(math.log(0.5)),
        "top_logprobs": [
            {"id": 65, "token": "A", "bytes": [65, 240, 159], "logprob": pytest.approx(math.log(0.5))},
            {"id": 66, "token": "\ufffd", "bytes": [255], "logprob": -FLOAT_MAX},
        ],
    }


def test_probabilities_after_sampling() -> None:
    params = TaskParams(post_sampling_probs=True)
    (entry,) = final_json(CONTEXT, final(probs=PROBS, params=params))["completion_probabilities"]
    assert entry["prob"] == 0.5
    assert [top["prob"] for top in entry["top_probs"]] == [0.5, 0.0]
    assert "logprob" not in entry


def test_the_end_of_a_stream_repeats_no_probabilities() -> None:
    value = event(final_frame(CONTEXT, final(params=TaskParams(stream=True), probs=PROBS)))
    assert value["stop"] is True
    assert "completion_probabilities" not in value


def test_settings_in_full() -> None:
    sampling = SamplingParams(
        logit_bias=((EOS, -math.inf), (5, 0.5)),
        grammar=("user", 'root ::= "x"'),
        grammar_triggers=((0, "q", 5), (1, "w", -1)),
        preserved_tokens=frozenset({9, 3}),
        samplers=("top_k", "temperature"),
    )
    params = TaskParams(
        stream=True,
        antiprompt=("END",),
        lora={1: 0.5, 0: 1.0},
        sampling=sampling,
        reasoning_format="deepseek-legacy",
        n_predict=4,
    )
    value = json.loads(dumps(final_json(CONTEXT, final(params=params))))["generation_settings"]
    assert value["logit_bias"] == [{"bias": None, "token": EOS}, {"bias": 0.5, "token": 5}]
    assert value["grammar"] == 'root ::= "x"'
    assert value["grammar_triggers"] == [{"type": 0, "value": "q", "token": 5}, {"type": 1, "value": "w"}]
    assert value["preserved_tokens"] == [3, 9]
    assert value["stop"] == ["END"]
    assert value["lora"] == [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}]
    assert value["samplers"] == ["top_k", "temperature"]
    assert value["reasoning_in_content"] is True
    assert (value["max_tokens"], value["n_predict"]) == (4, 4)


def test_errors_carry_the_counts_of_a_prompt_that_is_too_long() -> None:
    result = ErrorResult(id=1, type=ErrorType.EXCEED_CONTEXT_SIZE, message="too long", n_prompt_tokens=900, n_ctx=256)
    error = ApiError.from_result(result)
    assert error.status == 400
    assert event(sse.frame(error.body())) == {
        "error": {
            "code": 400,
            "message": "too long",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 900,
            "n_ctx": 256,
        }
    }


def test_other_errors_carry_no_counts() -> None:
    error = ApiError.from_result(ErrorResult(id=1, type=ErrorType.SERVER, message="broken"))
    assert error.body() == {"error": {"code": 500, "message": "broken", "type": "server_error"}}
