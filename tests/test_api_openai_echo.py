"""What ``echo`` gives back: the prompt as it was sent, and log-probabilities token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from api_fakes import BOS, HELLO, FakeVocab

from llamasrv.api.errors import ApiError
from llamasrv.api.fields import FLOAT_MAX
from llamasrv.api.openai.echo import MAX_TOP, Echo, LegacyLogprobs, prompt_pieces, with_echo
from llamasrv.engine.result import PromptTokenProb, TokenProb
from llamasrv.engine.task import SamplingParams, Task, TaskParams, TaskType


class BosVocab(FakeVocab):
    bos = BOS
    add_bos = True


class SpaceVocab(BosVocab):
    """Puts a space before the first word, as SentencePiece does."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return super().tokenize(" " + text, add_special, parse_special) if text else []

    def text(self, tokens: Sequence[int], special: bool) -> bytes:
        return self.detokenize(tokens, special).removeprefix(b" ")


def task(tokens: Sequence[int], n_probs: int = 0, n: int = 1) -> Task:
    params = TaskParams(sampling=SamplingParams(n_probs=n_probs))
    made = Task(id=1, type=TaskType.COMPLETION, tokens=list(tokens), params=params)
    for i in range(n - 1):
        made.add_child(2 + i)
    return made


@pytest.mark.parametrize("text", ["", "a", "hello é", " two", "日", "a</s>b"])
@pytest.mark.parametrize("vocab", [BosVocab(), SpaceVocab()])
def test_the_pieces_of_a_text_are_the_text(vocab: BosVocab, text: str) -> None:
    tokens = vocab.tokenize(text, True, True)
    pieces = prompt_pieces(vocab, tokens, True)
    assert len(pieces) == len(tokens)
    assert b"".join(pieces).decode() == text


def test_a_bos_that_the_client_sent_is_shown() -> None:
    assert prompt_pieces(BosVocab(), [BOS, HELLO], False) == [b"<s>", b"hello"]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("hello", b"hello"),
        ({"prompt_string": "hello"}, b"hello"),
        (["hello", "a"], b"hello"),
        (["hello", 5], b"hello"),
        ([["hello", 5]], b"hello"),
        ([BOS, HELLO], b"<s>hello"),
        ([[BOS, HELLO]], b"<s>hello"),
        ([BOS, "a"], b"<s>hello"),
        ({"prompt_string": [BOS, HELLO]}, b"<s>hello"),
    ],
)
def test_whether_the_tokenizer_added_bos_is_seen_in_the_request(prompt: Any, shown: bytes) -> None:
    echo = Echo(BosVocab(), {"prompt": prompt}, [task([BOS, HELLO])])
    assert b"".join(echo.pieces([BOS, HELLO])) == shown


def test_the_tasks_are_told_what_to_score() -> None:
    tasks = [task([1], 3, n=2), task([2], 3)]
    echo = Echo(BosVocab(), {"prompt": ["a", "b"]}, tasks)
    assert echo.is_scored
    assert echo.prompts == [[1], [1], [2]]
    assert [part.prompt_logprobs for part in (tasks[0], *tasks[0].child_tasks, tasks[1])] == [3, 3, 3]
    plain = task([1])
    assert not Echo(BosVocab(), {"prompt": "a"}, [plain]).is_scored
    assert plain.prompt_logprobs == -1


def test_too_many_candidates_are_refused() -> None:
    Echo(BosVocab(), {"prompt": "a"}, [task([1], MAX_TOP)])
    with pytest.raises(ApiError, match=f"together with 'echo' at most {MAX_TOP}"):
        Echo(BosVocab(), {"prompt": "a"}, [task([1], MAX_TOP + 1)])


@pytest.mark.parametrize(
    ("data", "wanted", "logprobs"),
    [
        ({}, False, None),
        ({"echo": None}, False, None),
        ({"echo": False, "logprobs": 0}, False, 0),
        ({"echo": True}, True, None),
        ({"echo": True, "logprobs": None}, True, None),
        ({"echo": True, "logprobs": 0}, True, 1),
        ({"echo": True, "logprobs": 4}, True, 4),
        ({"echo": True, "logprobs": False}, True, False),
    ],
)
def test_what_of_the_request_is_read(data: dict[str, Any], wanted: bool, logprobs: Any) -> None:
    read, is_wanted = with_echo(data)
    assert is_wanted is wanted
    assert read.get("logprobs") is logprobs or read.get("logprobs") == logprobs


@pytest.mark.parametrize("value", ["yes", 1, []])
def test_echo_is_a_boolean(value: Any) -> None:
    with pytest.raises(ApiError, match="Field 'echo'"):
        with_echo({"echo": value})


def test_offsets_count_characters_across_tokens_that_split_them() -> None:
    logprobs = LegacyLogprobs(BosVocab())
    pieces = [b"", b"a", b"\xc3", b"\xa9", b"b"]
    logprobs.add_prompt(pieces, [PromptTokenProb(i, -1.0) for i in range(4)])
    logprobs.add_generated([TokenProb(7, "日".encode(), 0.5, [(7, "日".encode(), 0.5)]), TokenProb(8, b"c", 0.25)])
    out = logprobs.members()
    assert out["text_offset"] == [0, 0, 1, 1, 2, 3, 4]
    text = "aéb日c"
    assert [text[i] for i in out["text_offset"][4:]] == ["b", "日", "c"]
    assert out["tokens"] == ["", "a", "�", "�", "b", "日", "c"]
    assert out["token_logprobs"][0] is None
    assert out["token_logprobs"][5:] == pytest.approx([-0.693147, -1.386294])


def test_the_first_token_has_no_probability_and_others_have_their_candidates() -> None:
    logprobs = LegacyLogprobs(BosVocab())
    top = [(HELLO, -0.25), (ord("b"), -1.5)]
    logprobs.add_prompt([b"", b"a", b"b"], [PromptTokenProb(97, -2.0, top), PromptTokenProb(98, float("-inf"), [])])
    out = logprobs.members()
    assert out["token_logprobs"] == [None, -2.0, -FLOAT_MAX]
    assert out["top_logprobs"] == [None, {"hello": -0.25, "b": -1.5}, {}]


def test_of_candidates_that_look_alike_the_best_counts() -> None:
    logprobs = LegacyLogprobs(BosVocab())
    logprobs.add_prompt([b"a", b"b"], [PromptTokenProb(98, -2.0, [(0xC3, -0.5), (0xA9, -3.0)])])
    assert logprobs.members()["top_logprobs"][1] == {"�": -0.5}


def test_taking_goes_on_where_it_ended() -> None:
    logprobs = LegacyLogprobs(BosVocab())
    logprobs.add_prompt([b"ab"], [])
    assert logprobs.take()["text_offset"] == [0]
    logprobs.add_generated([TokenProb(1, b"c", 1.0), TokenProb(2, b"d", 0.0)])
    assert logprobs.take() == {
        "tokens": ["c", "d"],
        "token_logprobs": [0.0, -FLOAT_MAX],
        "top_logprobs": [{}, {}],
        "text_offset": [2, 3],
    }
    assert logprobs.take()["tokens"] == []
