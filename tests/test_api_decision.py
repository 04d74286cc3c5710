"""Decision requests: questions, prompts and labels of every kind of model, answers."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from api_fakes import BOS, MASK, SEP, FakeIds, FakeServer, FakeVocab, server_meta, server_params
from hypothesis import given
from hypothesis import strategies as st

from llamasrv.api.context import ApiContext, check_model
from llamasrv.api.decision.answer import (
    choice_confidence,
    format_answer,
    n_outputs,
    n_variants,
    score_confidence,
    softmax,
    temperature_of,
)
from llamasrv.api.decision.joint import joint_prompt
from llamasrv.api.decision.labels import choose_labels
from llamasrv.api.decision.model import DecisionModel, DecisionModelError, Kind, load_decision_model
from llamasrv.api.decision.prompt import question_prompt, render
from llamasrv.api.decision.question import Option, Question, QuestionType, parse_questions
from llamasrv.api.decision.state import parse_state
from llamasrv.api.decision.tasks import build_decision_tasks, decisions_json, group_tasks
from llamasrv.api.decision.values import as_outline, escape_special, map_strings, sort_keys
from llamasrv.api.errors import ApiError
from llamasrv.engine.result import DecisionResult
from llamasrv.engine.task import Decision, Task, TaskType

CHOICE, SCORE, NOUL = QuestionType.CHOICE, QuestionType.SCORE, QuestionType.NOUL


class Recorder:
    """A template that remembers what it was given; ``text`` makes the prompt of it."""

    def __init__(self, text: Any = lambda values: "?") -> None:
        self.text = text
        self.values: dict[str, Any] = {}

    def render(self, values: Mapping[str, Any]) -> str:
        self.values = dict(values)
        return str(self.text(values))


class WordVocab(FakeVocab):
    """Some words are tokens: 1000 + place in the list. Others are letter by letter, as ever."""

    def __init__(self, words: list[str], **changed: Any) -> None:
        super().__init__(**changed)
        self.words = words

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        if text in self.words:
            return [1000 + self.words.index(text)]
        return super().tokenize(text, add_special, parse_special)


def model(
    kind: Kind = Kind.OPENJEV, template: Any = None, vocab: FakeVocab | None = None, **fields: Any
) -> DecisionModel:
    return DecisionModel(kind, vocab or FakeVocab(), template or Recorder(), **fields)


def question(type_: QuestionType = CHOICE, *options: str, **fields: Any) -> Question:
    found = tuple(Option(option) for option in options)
    return Question(fields.get("id", "q"), type_, fields.get("instructions", "which?"), found)


def refused(call: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


# -- what the model file says


def load(facts: dict[str, str], vocab: FakeVocab | None = None, template: str = "x") -> DecisionModel | None:
    meta = server_meta(decision=facts, systemone_template=template)
    return load_decision_model(meta, vocab or FakeVocab(), lambda source: Recorder(lambda values: source))


def test_other_models_are_none() -> None:
    assert load({}) is None


def test_letters_are_labels() -> None:
    found = load({"type": "openjev"})
    assert found is not None
    assert found.n_options_max == 52
    assert found.labels[:2] == (ord("A"), ord("B"))
    assert found.labels[-1] == ord("z")
    assert found.label_texts == ()


def test_codes_are_labels_as_far_as_they_are_single_tokens() -> None:
    found = load({"type": "lev"}, WordVocab(["AB", "ZZ"]))
    assert found is not None
    assert found.n_options_max == 28
    assert found.label_texts[25:] == ("Z", "AB", "ZZ")
    assert found.labels[25:] == (ord("Z"), 1000, 1001)
    many = load(
        {"type": "pplx-decider"}, WordVocab([a + b for a in "ABCDEFGHIJ" for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
    )
    assert many is not None
    assert (many.n_options_max, len(many.labels)) == (255, 255)


def test_temperatures_are_single_precision() -> None:
    found = load({"type": "openjev", "temperature.choice": "0.850000", "temperature.score.3_5": "2"})
    assert found is not None
    assert found.temperatures == {"choice": 0.8500000238418579, "score.3_5": 2.0}


@pytest.mark.parametrize(
    ("facts", "vocab", "template", "message"),
    [
        ({"type": "openjev"}, {}, "", 'decision model has no "systemone" template'),
        ({"type": "telepathy"}, {}, "x", "unsupported decision model type: telepathy"),
        ({"type": "lev", "temperature.noul": "0.0"}, {}, "x", "invalid decision temperature: temperature.noul = 0.0"),
        ({"type": "lev", "temperature.noul": "hot"}, {}, "x", "invalid decision temperature: temperature.noul = hot"),
        ({"type": "kev"}, {}, "x", "decision model has no <|box_end|> token"),
        ({"type": "laya", "max_head_tokens": "9"}, {"mask": -1}, "x", "decision model has no mask or sep token"),
        ({"type": "laya", "max_head_tokens": "9"}, {"sep": -1}, "x", "decision model has no mask or sep token"),
        ({"type": "laya"}, {}, "x", "decision model has no valid max_head_tokens"),
        ({"type": "lfm2-d1-omni"}, {"mask": -1}, "x", "decision model has no mask token"),
    ],
)
def test_incomplete_files_are_refused(
    facts: dict[str, str], vocab: dict[str, Any], template: str, message: str
) -> None:
    with pytest.raises(DecisionModelError) as caught:
        load(facts, FakeVocab(**vocab), template)
    assert str(caught.value) == message


def test_a_letter_that_is_no_token_is_refused() -> None:
    class Pairs(FakeVocab):
        def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
            return super().tokenize(text, add_special, parse_special) * (2 if text == "q" else 1)

    with pytest.raises(DecisionModelError, match="decision label 'q' is not a single token"):
        load({"type": "openjev"}, Pairs())


def test_the_start_checks_the_model() -> None:
    server = FakeServer(meta=server_meta(decision={"type": "telepathy"}, systemone_template="x"))
    with pytest.raises(RuntimeError, match="failed to init decision model: unsupported decision model type: telepathy"):
        check_model(server)
    with pytest.raises(RuntimeError, match="failed to init decision model: "):
        check_model(FakeServer(meta=server_meta(decision={"type": "openjev"}, systemone_template="{% if %}")))
    check_model(FakeServer())


# -- questions


def parse(questions: Any, kind: Kind = Kind.OPENJEV, state: Any = "s", **fields: Any) -> list[Question]:
    return parse_questions(model(kind, **fields), {"state": state, "questions": questions})


def ask(**fields: Any) -> dict[str, Any]:
    return {"q": {"type": "choice", "instructions": "i", "criteria": {"b": 1, "a": None}, **fields}}


def test_options_of_each_type() -> None:
    questions = {
        "one": {"type": "choice", "instructions": ["i"], "criteria": {"b": {"x": 1}, "a": None}},
        "two": {"type": "score", "instructions": "i", "criteria": ["low", None, "high"]},
        "three": {"type": "noul", "instructions": "i", "criteria": {"true": "T"}},
        "four": {"type": "noul", "instructions": "i"},
    }
    one, two, three, four = parse(questions, Kind.LEV)
    assert (one.id, one.type, one.instructions) == ("one", CHOICE, ["i"])
    assert one.options == (Option("b", {"x": 1}), Option("a", None))
    assert two.options == (Option("0", "low"), Option("1", None), Option("2", "high"))
    assert three.options == (Option("false"), Option("true", "T"))
    assert four.options == (Option("false"), Option("true"))


@pytest.mark.parametrize("kind", Kind)
def test_the_order_of_options_is_the_models(kind: Kind) -> None:
    (noul,) = parse({"q": {"type": "noul", "instructions": "i"}}, kind)
    true_first = kind in (Kind.OPENJEV, Kind.CLEF, Kind.LFM2_D1)
    assert [option.key for option in noul.options] == (["true", "false"] if true_first else ["false", "true"])
    (choice,) = parse(ask(), kind)
    assert [option.key for option in choice.options] == (["a", "b"] if kind is Kind.CLEF else ["b", "a"])


def test_yes_and_no_are_other_words_for_one_kind() -> None:
    asked = {"q": {"type": "noul", "instructions": "i", "criteria": {"yes": "Y", "no": "N", "true": None}}}
    (noul,) = parse(asked, Kind.LFM2_D1_OMNI)
    # a key that is there counts, whatever it says
    assert noul.options == (Option("false", "N"), Option("true", None))
    (noul,) = parse(asked, Kind.LEV)
    assert noul.options == (Option("false"), Option("true"))


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        (None, '"questions" must be a non-empty object'),
        ({}, '"questions" must be a non-empty object'),
        ([], '"questions" must be a non-empty object'),
        ({"q": 5}, "questions.q: must be an object"),
        ({"q": {"type": "noul"}}, 'questions.q: "instructions" must be provided'),
        (ask(instructions=None), 'questions.q: "instructions" must be provided'),
        (ask(type="unknown"), 'questions.q: "type" must be one of: choice, score, noul'),
        (ask(type=5), 'questions.q: "type" must be one of: choice, score, noul'),
        (ask(type=["choice"]), 'questions.q: "type" must be one of: choice, score, noul'),
        (ask(criteria=None), 'questions.q: "criteria" must be a non-empty object'),
        (ask(criteria={}), 'questions.q: "criteria" must be a non-empty object'),
        (ask(criteria=["a"]), 'questions.q: "criteria" must be a non-empty object'),
        (ask(type="score", criteria=["a"]), 'questions.q: "criteria" must be an array of 2 to 10 levels'),
        (ask(type="score", criteria=["a"] * 11), 'questions.q: "criteria" must be an array of 2 to 10 levels'),
        (ask(type="score", criteria={}), 'questions.q: "criteria" must be an array of 2 to 10 levels'),
        (ask(type="noul", criteria=[]), 'questions.q: "criteria" must be an object'),
    ],
)
def test_mistakes_in_questions_are_refused(questions: Any, message: str) -> None:
    error = refused(lambda: parse(questions))
    assert (error.status, error.message) == (400, message)


def test_more_options_than_labels_are_refused() -> None:
    error = refused(lambda: parse(ask(), n_options_max=1))
    assert error.message == "questions.q: too many options (2), this model supports at most 1"


@pytest.mark.parametrize("kind", Kind)
def test_only_some_kinds_take_no_state(kind: Kind) -> None:
    assert refused(lambda: parse_questions(model(kind), {"questions": ask()})).message == '"state" must be provided'
    if kind in (Kind.LFM2_D1, Kind.LFM2_D1_OMNI):
        assert parse(ask(), kind, state=None)
    else:
        assert refused(lambda: parse(ask(), kind, state=None)).message == '"state" must be provided'


# -- state and media

PNG = "data:image/png;base64," + base64.b64encode(b"png").decode()


def test_images_come_from_fields_and_messages_in_order() -> None:
    def url(name: str) -> str:
        return "data:image/png;base64," + base64.b64encode(name.encode()).decode()

    message = {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url("c")}},
            {"type": "text", "text": "t"},
            {"type": "image_url", "image_url": url("d")},
            {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"e").decode()}},
            "loose",
        ],
    }
    kept = {"role": "user", "content": [{"type": "text", "text": "t"}, "loose"]}
    for state, expected in (
        ([message, 5, {"content": "x"}], [kept, 5, {"content": "x"}]),
        ({"messages": [message], "more": 1}, {"messages": [kept], "more": 1}),
    ):
        data = {"state": state, "images": [url("b")], "files": [url("a")], "videos": []}
        assert parse_state(data) == (expected, [b"a", b"b", b"c", b"d", b"e"])


@pytest.mark.parametrize("state", ["text", 5, None, {"a": [1]}, {"messages": "x"}, ["a", 1]])
def test_other_states_stay_as_they_are(state: Any) -> None:
    assert parse_state({"state": state, "files": None}) == (state, [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"videos": ["x"]}, '"videos" is not supported'),
        ({"files": "x"}, '"files" must be an array'),
        ({"images": {}}, '"images" must be an array'),
        ({"images": ["https://example.com/a.png"]}, "images must be data URLs"),
        ({"images": [5]}, "images must be data URLs"),
        ({"images": [PNG] * 9}, "too many images, the maximum is 8"),
        ({"images": ["data:image/png;base64"]}, "Invalid uri-encoded base64 value"),
        ({"images": ["data:text/plain;base64,AAAA"]}, "Invalid uri format: data:text/plain;base64"),
        ({"images": ["data:image/png,AAAA"]}, "uri must be base64 encoded"),
        ({"images": ["data:image/png;base64,!"]}, "Invalid base64 value"),
        (
            {"state": [{"content": [{"type": "input_audio", "input_audio": {"url": "http://x"}}]}]},
            "audio must be base64 data",
        ),
        ({"state": [{"content": [{"type": "input_audio", "input_audio": 5}]}]}, "audio must be base64 data"),
        (
            {"images": [PNG] * 8, "state": [{"content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}]},
            "too many media files, the maximum is 8",
        ),
        ({"state": [{"content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]}, "Invalid base64 value"),
    ],
)
def test_mistakes_in_media_are_refused(data: dict[str, Any], message: str) -> None:
    error = refused(lambda: parse_state({"state": "s", **data}))
    assert error.status == 400
    assert error.message.startswith(message)


# -- values


def test_strings_are_changed_everywhere() -> None:
    value = {"a x": ["x", 5, None, {"b": "xx"}]}
    assert map_strings(value, lambda text: text.replace("x", "y")) == {"a x": ["y", 5, None, {"b": "yy"}]}
    assert map_strings(value, lambda text: text.replace("x", "y"), keys=True) == {"a y": ["y", 5, None, {"b": "yy"}]}


def test_keys_are_sorted_everywhere() -> None:
    got = sort_keys({"b": [{"d": 1, "c": 2}], "a": {"z": 1, "y": 2}})
    assert list(got) == ["a", "b"]
    assert list(got["a"]) == ["y", "z"]
    assert list(got["b"][0]) == ["c", "d"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        ("a", "a"),
        (True, "True"),
        (5, "5"),
        (2.5, "2.5"),
        (["a", "b"], "- a\n- b"),
        ({"a": 1, "b": None}, "a: 1\nb: "),
        ({"a": {"b": [1, {"c": 2, "d": 3}]}}, "a:\n  b:\n    - 1\n    - c: 2\n      d: 3"),
        ([[1, 2], "x"], "- - 1\n  - 2\n- x"),
    ],
)
def test_values_as_plain_text(value: Any, expected: str) -> None:
    assert as_outline(value) == expected


def test_special_tokens_in_texts_are_made_harmless() -> None:
    assert escape_special("a <|im_end|> <| b|> <|x|>") == "a <¦im_end¦> <| b|> <¦x¦>"


# -- prompts

ABC = question(CHOICE, "a", "b", "c")


def test_label_models_read_their_labels_at_the_end() -> None:
    template = Recorder(lambda values: "<s>hi")
    tokens, decision = question_prompt(model(Kind.OPENJEV, template, labels=(1, 2, 3, 4)), {"k": 1}, [ABC], ABC, 0)
    assert tokens == [BOS, *b"hi"]
    assert decision == Decision(labels=(1, 2, 3))
    assert template.values == {
        "id": "q",
        "type": "choice",
        "instructions": "which?",
        "state": {"k": 1},
        "options": [{"key": key, "description": None} for key in "abc"],
        "images": [],
    }


def test_one_kind_sees_choices_in_both_orders_and_yes_on_a_scale() -> None:
    template = Recorder()
    lev = model(Kind.LEV, template, labels=tuple(range(20)), label_texts=tuple("ABCDEFGHIJKLMNOPQRST"))
    assert [n_variants(lev, question(type_, "a", "b")) for type_ in (CHOICE, SCORE, NOUL)] == [2, 1, 1]
    assert n_variants(lev, question(CHOICE, "a")) == 1
    assert n_variants(model(Kind.NIMBLE), ABC) == 1
    _, decision = question_prompt(lev, {"b": 1, "a": 2}, [ABC], ABC, 1)
    assert [(option["key"], option["label"]) for option in template.values["options"]] == [
        ("c", "A"),
        ("b", "B"),
        ("a", "C"),
    ]
    assert list(template.values["state"]) == ["a", "b"]
    assert decision.labels == (0, 1, 2)
    noul = question(NOUL, "false", "true")
    assert n_outputs(lev, noul) == 9
    assert question_prompt(lev, "s", [noul], noul, 0)[1].labels == tuple(range(9))


def test_one_kind_sees_all_questions_of_the_request() -> None:
    template = Recorder()
    nimble = model(Kind.NIMBLE, template, labels=tuple(range(9)), label_texts=tuple("ABCDEFGHI"))
    other = question(SCORE, "0", "1", id="other", instructions={"x": 1})
    question_prompt(nimble, "s", [ABC, other], ABC, 0)
    assert template.values["questions"][1] == {
        "id": "other",
        "type": "score",
        "instructions": {"x": 1},
        "options": [
            {"key": "0", "description": None, "label": "A"},
            {"key": "1", "description": None, "label": "B"},
        ],
    }


def test_a_pointer_model_reads_the_ends_of_options_and_of_the_prompt() -> None:
    template = Recorder(lambda values: "s[mask]a[mask]b[mask]?")
    kev = model(Kind.KEV, template, marker=MASK)
    asked = Question("q", CHOICE, {"a": 1}, (Option("<|x|>"), Option("b", ["y"]), Option("c")))
    tokens, decision = question_prompt(kev, ["<|y|>"], [asked], asked, 0)
    assert decision == Decision(markers=(1, 3, 5), pointer=6)
    assert tokens[1] == MASK
    assert template.values["state"] == "- <¦y¦>"
    assert template.values["instructions"] == "a: 1"
    assert template.values["options"] == [
        {"key": "<¦x¦>", "description": None},
        {"key": "b", "description": "- y"},
        {"key": "c", "description": None},
    ]
    with pytest.raises(DecisionModelError, match="unexpected layout of the decision prompt"):
        question_prompt(kev, "s", [asked], question(CHOICE, "a", "b"), 0)


def head_text(instructions: str, options: list[str], state: str) -> str:
    return f"<s>{instructions}[sep]" + "".join(f"[mask]{option}" for option in options) + f"[sep]{state}[sep]"


def laya(text: str, max_head_tokens: int = 256) -> DecisionModel:
    fields: dict[str, Any] = {"marker": MASK, "marker_text": "[mask]", "max_head_tokens": max_head_tokens}
    return model(Kind.LAYA, Recorder(lambda values: text), **fields)


def test_a_head_that_fits_stays_whole() -> None:
    asked = question(SCORE, "0", "1")
    tokens, decision = question_prompt(laya(head_text("how?", ["x", "yy"], "state")), "s", [asked], asked, 0)
    assert tokens == [BOS, *b"how?", SEP, MASK, *b"x", MASK, *b"yy", SEP, *b"state", SEP]
    assert decision == Decision(markers=(6, 8), column=1)
    assert [
        question_prompt(laya(head_text("?", ["a"], "s")), "s", [], question(t, "a"), 0)[1].column
        for t in (CHOICE, SCORE, NOUL)
    ] == [0, 1, 2]


def test_long_options_are_cut() -> None:
    asked = question(CHOICE, "a", "b")
    tokens, decision = question_prompt(laya(head_text("?", ["x" * 60, "y"], "s")), "s", [asked], asked, 0)
    assert tokens == [BOS, *b"?", SEP, MASK, *(b"x" * 48), MASK, *b"y", SEP, *b"s", SEP]
    assert decision.markers == (3, 52)


def test_many_options_share_the_head_and_the_question_gets_the_rest() -> None:
    asked = question(CHOICE, *"abcd")
    text = head_text("i" * 100, ["x" * 20] * 4, "state")
    tokens, decision = question_prompt(laya(text, max_head_tokens=64), "s", [asked], asked, 0)
    # (64 - 16) / 4 tokens each with the marker, 64 - 48 for the question
    assert tokens == [BOS, *(b"i" * 16), SEP, *[MASK, *(b"x" * 11)] * 4, SEP, *b"state", SEP]
    assert [tokens[position] for position in decision.markers] == [MASK] * 4
    # never less than 4 and 8
    tokens, _ = question_prompt(laya(text, max_head_tokens=8), "s", [asked], asked, 0)
    assert tokens == [BOS, *(b"i" * 8), SEP, *[MASK, *(b"x" * 3)] * 4, SEP, *b"state", SEP]


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "<s>[sep][mask]a[sep]s",
        "<s>[mask]a[sep]s[sep]",
        "<s>?[sep][mask]a[sep]",
        "<s>?[sep][mask]a[mask]b[sep]s[sep]",
    ],
)
def test_heads_of_another_shape_are_refused(text: str) -> None:
    asked = question(CHOICE, "a")
    with pytest.raises(DecisionModelError, match="unexpected layout of the decision prompt"):
        question_prompt(laya(text), "s", [asked], asked, 0)


def test_input_never_holds_the_mark_of_options() -> None:
    template = Recorder()
    render(
        model(Kind.LAYA, template, marker=MASK, marker_text="[mask]"),
        {"[mask]": ["a[mask]b"]},
        [],
        Question("q", CHOICE, "[mask]", (Option("[mask]", "[mask]"),)),
        0,
    )
    assert template.values["state"] == {"[mask]": ["a b"]}
    assert template.values["instructions"] == " "
    assert template.values["options"] == [{"key": " ", "description": " "}]


def pieces_text(values: Mapping[str, Any]) -> str:
    options = "".join(
        f"{values['sep']}[mask]{values['sep']}{values['mark_option']}{o['key']}" for o in values["options"]
    )
    asked = f"{values['sep']}{values['mark_question']}{values['instructions']}"
    return f"{asked}{options}{values['sep']}|{values['sep']}{values['mark_state']}{values['state']}{values['sep']}."


def test_pieces_are_cut_to_their_budgets() -> None:
    omni = model(Kind.LFM2_D1_OMNI, Recorder(pieces_text), marker=MASK)
    asked = Question("q", NOUL, "i" * 200, (Option("false"), Option("t" * 60)))
    tokens, decision = question_prompt(omni, "s" * 17000, [asked], asked, 0)
    # 96 tokens for two options, 45 each; the same for the question
    head = [*(b"i" * 96), MASK, *b"false", MASK, *(b"t" * 45), *b"|"]
    assert tokens[: len(head)] == head
    assert tokens[len(head) :] == [*(b"s" * (16384 - len(head) - 1)), *b"."]
    assert decision == Decision(markers=(96, 102), column=2)


def test_pieces_of_the_caller_are_no_pieces() -> None:
    template = Recorder(pieces_text)
    omni = model(Kind.LFM2_D1_OMNI, template, marker=MASK)
    asked = Question("q", CHOICE, "<<d1omni:sep>>", (Option("<|a|>"),))
    question_prompt(omni, {"<|k|>": "<|v|>"}, [asked], asked, 0)
    assert template.values["instructions"] == "<<d1omni sep>>"
    assert template.values["state"] == {"<¦k¦>": "<¦v¦>"}
    assert template.values["options"][0]["key"] == "<¦a¦>"
    assert template.values["audio"] is False


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("x{sep}", DecisionModelError, "unexpected layout"),
        ("{sep}x", DecisionModelError, "unexpected layout"),
        ("{sep}{mark_state}a{sep}{mark_state}b", DecisionModelError, "unexpected layout"),
        ("{sep}{mark_state}a", ApiError, "the options do not fit in the context"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(text: str, error: type[Exception], message: str) -> None:
    omni = model(Kind.LFM2_D1_OMNI, Recorder(lambda values: text.format(**values)), marker=MASK)
    with pytest.raises(error, match=message):
        question_prompt(omni, "s", [ABC], ABC, 0)


# -- labels that depend on the question


def labels(vocab: FakeVocab, asked: Question) -> list[tuple[str, list[int]]]:
    texts, groups = choose_labels(vocab, asked)
    return list(zip(texts, groups, strict=True))


def test_levels_and_yes_and_no_have_their_own_words() -> None:
    vocab = WordVocab(["yes", "Yes", "No"])
    assert labels(vocab, question(SCORE, "0", "1")) == [("0", [ord("0")]), ("1", [ord("1")])]
    assert labels(vocab, question(NOUL, "true", "false")) == [("true", [1000, 1001]), ("false", [1002])]
    with pytest.raises(DecisionModelError, match="decision label is not a single token: true"):
        labels(FakeVocab(), question(NOUL, "true", "false"))


def test_choices_keep_their_own_letters() -> None:
    vocab = WordVocab([" Z"])
    assert labels(vocab, question(CHOICE, "Z", "b")) == [("Z", [ord("Z"), 1000]), ("b", [ord("b")])]
    # the same letter cannot stand for two
    assert labels(vocab, question(CHOICE, "é", "b")) == [("A", [ord("A")]), ("B", [ord("B")])]


def test_many_choices_have_numbers_and_what_else_is_a_token() -> None:
    numbers = [f"{number:02d}" for number in range(0, 30, 2)]
    found = labels(WordVocab(numbers), question(CHOICE, *(f"o{i}" for i in range(30))))
    texts = [text for text, _ in found]
    assert texts[:4] == ["00", "A", "02", "B"]
    assert len({group[0] for _, group in found}) == 30


def test_too_many_choices_for_the_vocabulary_are_refused() -> None:
    # 52 letters, one by one
    error = refused(lambda: labels(FakeVocab(), question(CHOICE, *(f"o{i}" for i in range(53)))))
    assert (error.status, error.message) == (400, "no single-token label left for 53 options")
    assert len(labels(FakeVocab(), question(CHOICE, *(f"o{i}" for i in range(52))))) == 52


def test_label_groups_are_read_together() -> None:
    template = Recorder()
    d1 = model(Kind.LFM2_D1, template, WordVocab(["yes", "YES", "no"]))
    asked = question(NOUL, "true", "false")
    _, decision = question_prompt(d1, "s", [asked], asked, 0)
    assert decision == Decision(labels=(1000, 1001, 1002), label_groups=(2, 1))
    assert [option["label"] for option in template.values["options"]] == ["true", "false"]


# -- the joint prompt


def joint_text(values: Mapping[str, Any]) -> str:
    sep = values["sep"]
    out = f"<s>{values['state']}"
    for asked in values["questions"]:
        out += f"{sep}{values['mark_question']}{asked['instructions']}{sep}:"
        for option in asked["options"]:
            out += f"{sep}{values['mark_option']}{option['key']}{sep},"
    return out


def test_a_joint_prompt_tells_the_role_of_every_token() -> None:
    clef = model(Kind.CLEF, Recorder(joint_text))
    asked = [
        question(NOUL, "t", "f", instructions="n?"),
        question(CHOICE, "a", instructions="c?"),
        question(SCORE, "0", "1", instructions="s?"),
    ]
    tokens, decision = joint_prompt(clef, "x", asked)
    assert tokens == [BOS, *b"xn?:t,f,c?:a,s?:0,1,"]
    assert decision.order == tuple(map(int, "0011" + "04040" + "220" + "40" + "330" + "4040"))
    assert decision.n_scores == 5


def test_marks_of_the_caller_are_no_marks_and_keys_are_sorted() -> None:
    template = Recorder(joint_text)
    asked = question(CHOICE, "<<clef:option>>", instructions="<<clef:sep>>")
    joint_prompt(model(Kind.CLEF, template), {"b": "<<clef:sep>>", "a": 1}, [asked])
    assert list(template.values["state"].items()) == [("a", 1), ("b", "<<clef sep>>")]
    assert template.values["questions"][0]["instructions"] == "<<clef sep>>"
    assert template.values["questions"][0]["options"][0]["key"] == "<<clef option>>"


def test_joint_prompts_that_do_not_fit_are_refused() -> None:
    clef = model(Kind.CLEF, Recorder(joint_text))
    error = refused(lambda: joint_prompt(clef, "x", [question(CHOICE, "a", instructions="")]))
    assert (error.status, error.message) == (400, "the instructions and the options of a question must not be empty")
    for text in ("x", "{mark_question}a{sep}{mark_question}b{sep}{mark_option}c", "{mark_question}a"):
        other = model(Kind.CLEF, Recorder(lambda values, text=text: text.format(**values)))
        with pytest.raises(DecisionModelError, match="unexpected layout of the decision prompt"):
            joint_prompt(other, "x", [question(CHOICE, "a")])


# -- answers


@pytest.mark.parametrize(
    ("kind", "n", "expected"),
    [
        (Kind.OPENJEV, 2, 2.0),
        (Kind.OPENJEV, 3, 3.0),
        (Kind.OPENJEV, 5, 3.0),
        (Kind.OPENJEV, 6, 1.5),
        (Kind.OPENJEV, 11, 11.0),
        (Kind.LEV, 8, 7.0),
        (Kind.LEV, 9, 8.0),
        (Kind.LEV, 27, 1.5),
    ],
)
def test_temperatures_go_by_the_number_of_options(kind: Kind, n: int, expected: float) -> None:
    names = {
        "choice.2": 2.0,
        "choice.3_5": 3.0,
        "choice.11": 11.0,
        "choice.small": 7.0,
        "choice.mid": 8.0,
        "choice": 1.5,
    }
    of = model(kind, temperatures=names)
    assert temperature_of(of, question(CHOICE, *map(str, range(n)))) == expected
    assert temperature_of(of, question(SCORE, "0", "1")) == 1.0


def test_a_choice() -> None:
    asked = question(CHOICE, "a", "b", "c")
    scores = [1.0, 3.0, 2.0]
    answer = format_answer(model(temperatures={"choice": 2.0}), asked, [scores])
    weights = [math.exp(score / 2.0) for score in scores]
    expected = {key: weight / sum(weights) for key, weight in zip("abc", weights, strict=True)}
    assert (answer["type"], answer["choice"]) == ("choice", "b")
    assert answer["probabilities"] == pytest.approx(expected)
    assert answer["confidence"] == pytest.approx((expected["b"] - 1 / 3) / (1 - 1 / 3))


def test_a_score() -> None:
    asked = Question("q", SCORE, "?", (Option("0", "low"), Option("1", None), Option("2", "high")))
    answer = format_answer(model(), asked, [[0.0, math.log(2.0), 0.0]])
    assert answer == {
        "type": "score",
        "score": pytest.approx(1.0),
        "legend": {"0": "low", "1": None, "2": "high"},
        "probabilities": {"0": pytest.approx(0.25), "1": pytest.approx(0.5), "2": pytest.approx(0.25)},
        "confidence": pytest.approx(1.0 - 0.5 / (2 / 3)),
    }


@pytest.mark.parametrize(("keys", "expected"), [(("false", "true"), 0.75), (("true", "false"), 0.25)])
def test_a_noul_is_the_probability_of_true(keys: tuple[str, str], expected: float) -> None:
    answer = format_answer(model(), question(NOUL, *keys), [[0.0, math.log(3.0)]])
    assert answer == {"type": "noul", "noul": pytest.approx(expected)}


def test_a_noul_on_a_scale_is_its_mean() -> None:
    lev = model(Kind.LEV)
    scores = [0.0] * 8 + [50.0]
    assert format_answer(lev, question(NOUL, "false", "true"), [scores])["noul"] == pytest.approx(1.0)
    assert format_answer(lev, question(NOUL, "false", "true"), [[0.0] * 9])["noul"] == pytest.approx(0.5)


def test_variants_are_averaged_in_the_same_order() -> None:
    answer = format_answer(model(Kind.LEV), question(CHOICE, "a", "b"), [[math.log(3.0), 0.0], [0.0, 0.0]])
    assert answer["probabilities"] == {"a": pytest.approx(0.625), "b": pytest.approx(0.375)}
    answer = format_answer(model(Kind.LEV), question(CHOICE, "a", "b"), [[0.0, 0.0], [math.log(3.0), 0.0]])
    assert answer["probabilities"] == {"a": pytest.approx(0.375), "b": pytest.approx(0.625)}


def test_answers_about_media_are_not_calibrated_by_one_kind() -> None:
    for kind, temperature in ((Kind.LFM2_D1_OMNI, 1.0), (Kind.LFM2_D1, 2.0)):
        of = model(kind, temperatures={"noul": 2.0})
        answer = format_answer(of, question(NOUL, "false", "true"), [[0.0, 4.0]], has_media=True)
        assert answer["noul"] == pytest.approx(1 / (1 + math.exp(-4.0 / temperature)))


def test_outputs_that_are_no_numbers_are_an_error() -> None:
    error = refused(lambda: format_answer(model(), question(CHOICE, "a", "b"), [[1.0, math.nan]]))
    assert (error.status, error.message) == (500, "the model could not evaluate the decision")


def test_one_option_is_certain() -> None:
    answer = format_answer(model(), question(CHOICE, "a"), [[-3.0]])
    assert answer == {"type": "choice", "choice": "a", "probabilities": {"a": 1.0}, "confidence": 1.0}


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=10), st.floats(0.1, 10))
def test_probabilities_and_confidence_are_within_their_bounds(scores: list[float], temperature: float) -> None:
    shares = softmax(scores, temperature)
    assert shares.sum() == pytest.approx(1.0)
    # scores that differ by less than a float32 can tell give equal shares
    assert shares[np.argmax(np.asarray(scores, dtype=np.float32))] == pytest.approx(shares.max())
    assert 0.0 <= choice_confidence(shares) <= 1.0
    assert 0.0 <= score_confidence(shares) <= 1.0


# -- tasks


def task(*tokens: int) -> Task:
    return Task(id=sum(tokens), type=TaskType.DECISION, tokens=list(tokens))


def test_tasks_that_begin_alike_are_groups() -> None:
    tasks = [task(1, 2, 3), task(1, 2, 4, 5), task(1, 2, 3, 4), task(1, 2, 9)]
    (parent,) = group_tasks(tasks, 4)
    assert (parent, parent.n_tokens_shared) == (tasks[0], 2)
    assert parent.child_tasks == tasks[1:]
    assert {child.id_parent for child in parent.child_tasks} == {parent.id}


def test_each_of_a_group_has_a_token_of_its_own() -> None:
    (parent,) = group_tasks([task(1, 2, 3), task(1, 2, 3)], 4)
    assert parent.n_tokens_shared == 2
    (parent,) = group_tasks([task(1, 2, 3, 4), task(1, 2)], 4)
    assert parent.n_tokens_shared == 1


def test_groups_are_no_larger_than_the_slots() -> None:
    tasks = [task(1, 2, place) for place in range(3, 8)]
    groups = group_tasks(tasks, 2)
    assert [len(group.ids()) for group in groups] == [2, 2, 1]
    assert [part for group in groups for part in (group, *group.child_tasks)] == tasks


@pytest.mark.parametrize("n_slots", [0, 1])
def test_one_slot_has_no_groups(n_slots: int) -> None:
    tasks = [task(1, 2, 3), task(1, 2, 4)]
    assert group_tasks(tasks, n_slots) == tasks
    assert not tasks[0].is_parent


def test_tasks_that_begin_otherwise_are_alone() -> None:
    tasks = [task(1, 2), task(3, 4)]
    assert group_tasks(tasks, 4) == tasks
    assert tasks[0].n_tokens_shared == 0
    assert group_tasks([task(1), task(1)], 4) == [task(1), task(1)]


TEMPLATE = "<s>{{ state }} {{ instructions }} {% for o in options %}{{ o.key }} {% endfor %}"
DATA = {
    "state": "s",
    "questions": {
        "x": {"type": "choice", "instructions": "i", "criteria": {"a": None, "b": None}},
        "y": {"type": "noul", "instructions": "j"},
    },
}


def context(kind: str = "openjev", template: str = TEMPLATE) -> ApiContext:
    meta = server_meta(decision={"type": kind, "max_head_tokens": "64"}, systemone_template=template)
    return ApiContext(FakeServer(server_params(), meta))


def test_a_request_from_tasks_to_answer() -> None:
    of = context()
    request, tasks = build_decision_tasks(of, DATA, FakeIds())
    (parent,) = tasks
    first, second = parent, parent.child_tasks[0]
    assert first.tokens == [BOS, *b"s i a b "]
    assert second.tokens == [BOS, *b"s j true false "]
    assert parent.n_tokens_shared == 3
    results = [
        DecisionResult(id=1, index=0, scores=[0.0, 1.0], n_tokens=first.n_tokens),
        DecisionResult(id=2, index=1, scores=[2.0, 0.0], n_tokens=second.n_tokens),
    ]
    answer = decisions_json(of, request, results)
    assert answer["model"] == "tiny"
    assert list(answer["answers"]) == ["x", "y"]
    assert answer["answers"]["x"]["choice"] == "b"
    assert answer["answers"]["y"]["noul"] == pytest.approx(1 / (1 + math.exp(-2.0)))
    assert answer["usage"] == {"input_tokens": first.n_tokens + second.n_tokens, "output_tokens": 0}


def test_a_joint_request_is_one_task_whose_scores_are_dealt_out() -> None:
    template = (
        "{{ state }}{% for q in questions %}{{ sep }}{{ mark_question }}{{ q.instructions }}"
        "{% for o in q.options %}{{ sep }},{{ sep }}{{ mark_option }}{{ o.key }}{% endfor %}{% endfor %}"
    )
    of = context("clef", template)
    request, (only,) = build_decision_tasks(of, DATA, FakeIds())
    assert not only.is_parent
    assert only.decision is not None
    assert only.decision.n_scores == 4
    answer = decisions_json(of, request, [DecisionResult(id=1, scores=[0.0, 1.0, 5.0, 0.0], n_tokens=7)])
    assert answer["answers"]["x"]["choice"] == "b"
    assert answer["answers"]["y"]["noul"] == pytest.approx(1 / (1 + math.exp(-5.0)))
    assert answer["usage"]["input_tokens"] == 7


def test_variants_of_a_question_are_tasks_of_their_own() -> None:
    request, tasks = build_decision_tasks(context("lev"), DATA, FakeIds())
    assert [len(group.ids()) for group in tasks] == [3]
    results = [DecisionResult(id=1, scores=[1.0, 0.0]), DecisionResult(id=2, scores=[0.0, 1.0])]
    results.append(DecisionResult(id=3, scores=[0.0] * 9))
    answers = decisions_json(context("lev"), request, results)["answers"]
    assert answers["x"]["choice"] == "a"
    assert answers["y"]["noul"] == pytest.approx(0.5)


def test_other_models_and_media_are_not_supported() -> None:
    error = refused(lambda: build_decision_tasks(ApiContext(FakeServer()), DATA, FakeIds()))
    assert (error.status, error.message) == (501, "This model is not a decision model")
    error = refused(lambda: build_decision_tasks(context(), {**DATA, "images": [PNG]}, FakeIds()))
    assert error.status == 501
    assert error.message.startswith("This server does not support image input for decisions.")


def test_a_template_that_does_not_fit_the_model_is_the_servers_fault() -> None:
    error = refused(lambda: build_decision_tasks(context("laya"), DATA, FakeIds()))
    assert (error.status, error.message) == (500, "unexpected layout of the decision prompt")
