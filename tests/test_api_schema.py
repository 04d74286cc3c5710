"""Fields of a completion request: defaults, aliases, types, bounds, and what handlers make of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from api_fakes import BOS, EOS, HELLO, FakeTools, FakeVocab, api_context
from hypothesis import given
from hypothesis import strategies as st

from llamasrv.api.errors import ApiError
from llamasrv.api.fields import FLOAT_MAX, INT32_MAX, Kind
from llamasrv.api.jsonio import dumps
from llamasrv.api.schema import FIELDS, MIN_HISTORY
from llamasrv.api.settings import generation_settings
from llamasrv.engine.task import TaskParams

NINF = -math.inf
SCHEMA = api_context().schema


def parse(_server: dict[str, Any] | None = None, _tools: FakeTools | None = None, **data: Any) -> TaskParams:
    return api_context(_tools, **(_server or {})).schema.parse(data)


def refused(_server: dict[str, Any] | None = None, _tools: FakeTools | None = None, **data: Any) -> str:
    with pytest.raises(ApiError) as caught:
        parse(_server, _tools, **data)
    assert caught.value.status == 400
    return caught.value.message


def test_defaults_come_from_the_server() -> None:
    params = parse(
        {
            "n_predict": 7,
            "n_keep": 3,
            "cache_prompt": False,
            "antiprompt": ["END"],
            "sse_ping_interval": 5,
            "verbosity": 10,
            "speculative": {"types": ["ngram-simple", "draft-simple"]},
            "sampling": {"top_k": 5, "logit_bias": [[1, "-inf"], [2, 0.5]], "preserved_tokens": [BOS]},
        }
    )
    assert (params.n_predict, params.n_keep, params.cache_prompt, params.sse_ping_interval) == (7, 3, False, 5)
    assert (params.antiprompt, params.verbose, params.reasoning_format) == (("END",), True, "auto")
    assert params.speculative_types == "ngram-simple,draft-simple"
    assert params.sampling.top_k == 5
    assert params.sampling.logit_bias == ((1, NINF), (2, 0.5))
    assert params.sampling.samplers == ("top_k", "temperature")
    assert params.sampling.preserved_tokens == frozenset({BOS})


def test_a_request_leaves_no_trace_in_the_next() -> None:
    schema = api_context().schema
    schema.parse({"top_k": 3, "stop": ["x"], "n_predict": 1})
    params = schema.parse({})
    assert (params.sampling.top_k, params.antiprompt, params.n_predict) == (40, (), -1)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_null_is_the_same_as_absent(field: Any) -> None:
    data = {field.group: {field.name: None}} if field.group else {field.name: None}
    assert parse(**data) == parse()


def test_every_field_is_declared_once_and_described() -> None:
    names = [name for field in FIELDS for name in field.names]
    assert len(names) == len(set(names))
    assert all(field.description.endswith(".") for field in FIELDS)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4, "max_tokens": 3}, 4),
        ({"n_predict": 5, "max_completion_tokens": 4}, 5),
        ({"n_predict": None, "max_tokens": 3}, 3),
        ({"n_predict": 4.7}, 4),
    ],
)
def test_aliases_are_tried_in_order(data: dict[str, Any], expected: int) -> None:
    assert parse(**data).n_predict == expected


@pytest.mark.parametrize("value", [True, "5", [5], {}])
@pytest.mark.parametrize("name", [field.name for field in FIELDS if field.kind in (Kind.INT, Kind.FLOAT)])
def test_numbers_of_another_type_are_refused(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"Field '{name}': type must be number, but is ")


@pytest.mark.parametrize("value", [1, "true", []])
@pytest.mark.parametrize("name", [field.name for field in FIELDS if field.kind is Kind.BOOL and not field.group])
def test_flags_of_another_type_are_refused(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"Field '{name}': type must be boolean, but is ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_fields", "x"),
        ("response_fields", [1]),
        ("lora", 5),
        ("lora", [5]),
        ("lora", [{"scale": 1}]),
        ("lora", [{"id": "a"}]),
        ("dry_sequence_breakers", []),
        ("dry_sequence_breakers", [1]),
        ("grammar", 7),
        ("reasoning_format", "foo"),
        ("reasoning_format", 1),
        ("continue_final_message", "other"),
        ("continue_final_message", 1),
        ("preserved_tokens", "x"),
        ("preserved_tokens", [1]),
        ("grammar_triggers", 5),
        ("grammar_triggers", [5]),
        ("grammar_triggers", [{"value": "x"}]),
        ("grammar_triggers", [{"type": 4, "value": "x"}]),
        ("grammar_triggers", [{"type": 0, "value": "x"}]),
        ("grammar_triggers", [{"type": 0, "value": "x", "token": 9999}]),
        ("grammar_triggers", [{"type": 2, "value": "x" * 100_000}]),
        ("reasoning_budget_start_tag", 5),
        ("reasoning_budget_end_tags", 5),
        ("reasoning_budget_end_tags", [5]),
        ("reasoning_budget_message", 5),
        ("logit_bias", 5),
        ("logit_bias", "x"),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [["a"]]),
        ("stop", ["a"] * 2_000),
        ("samplers", 5),
        ("samplers", [5]),
        ("samplers", "k" * 1_000),
        ("stream_options", 5),
    ],
)
def test_wrong_shapes_are_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"Field '{name}': ")


def test_the_message_names_the_alias_that_was_used() -> None:
    assert refused(n=5) == "Field 'n': Value must be between 1 <= value <= 4, but got 5"
    assert refused(logprobs="x") == "Field 'logprobs': type must be number, but is string"
    assert refused(reasoning_budget_end_tag=3).startswith("Field 'reasoning_budget_end_tag': ")


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("n_predict", -2, "-1 <= value <= 2147483647"),
        ("n_predict", 2**40, "-1 <= value <= 2147483647"),
        ("n_keep", -9, "-1 <= value <= 2147483647"),
        ("n_discard", -5, "0 <= value <= 2147483647"),
        ("n_indent", -1, "0 <= value <= 2147483647"),
        ("n_cmpl", 0, "1 <= value <= 4"),
        ("n_cmpl", 100_000, "1 <= value <= 4"),
        ("n_cache_reuse", -1, "0 <= value <= 2147483647"),
        ("t_max_predict_ms", -3, "-1 <= value <= 9223372036854775807"),
        ("sse_ping_interval", -2, "-1 <= value <= 2147483647"),
        ("repeat_last_n", -1, "0 <= value <= 2147483647"),
        ("dry_allowed_length", -1, "0 <= value <= 2147483647"),
        ("dry_penalty_last_n", -1, "0 <= value <= 2147483647"),
        ("min_keep", -1, "0 <= value <= 2147483647"),
        ("reasoning_budget_tokens", -2, "-1 <= value <= 2147483647"),
    ],
)
def test_integers_beyond_hard_limits_are_refused(name: str, value: Any, bounds: str) -> None:
    assert refused(**{name: value}) == f"Field '{name}': Value must be between {bounds}, but got {value}"


def test_floats_beyond_hard_limits_are_refused() -> None:
    expected = "Field 'adaptive_decay': Value must be between 0.000000 <= value <= 0.990000, but got 1.500000"
    assert refused(adaptive_decay=1.5) == expected
    assert parse(adaptive_decay=0.99).sampling.adaptive_decay == pytest.approx(0.99)


def test_huge_numbers_have_a_readable_message() -> None:
    assert refused(n_predict=1e300).endswith("but got 1e+300")


@pytest.mark.parametrize(
    ("name", "target", "value", "expected"),
    [
        ("top_k", "top_k", -3, 0),
        ("top_k", "top_k", 2**31, INT32_MAX),
        ("top_p", "top_p", 3, 1.0),
        ("top_p", "top_p", -1, 0.0),
        ("min_p", "min_p", 1e300, 1.0),
        ("xtc_probability", "xtc_probability", -5, 0.0),
        ("xtc_threshold", "xtc_threshold", 2, 1.0),
        ("temperature", "temp", -1, 0.0),
        ("temperature", "temp", 1e300, FLOAT_MAX),
        ("typical_p", "typ_p", -1e300, -FLOAT_MAX),
        ("mirostat", "mirostat", 7, 2),
        ("adaptive_target", "adaptive_target", 5, 1.0),
        ("n_probs", "n_probs", -1, 0),
        ("n_probs", "n_probs", 2147483647, FakeVocab.n_tokens),
        ("repeat_last_n", "penalty_last_n", 99_999_999, MIN_HISTORY),
        ("dry_penalty_last_n", "dry_penalty_last_n", 99_999_999, MIN_HISTORY),
    ],
)
def test_other_numbers_are_clamped(name: str, target: str, value: Any, expected: float) -> None:
    assert getattr(parse(**{name: value}).sampling, target) == expected


def test_floats_are_those_of_32_bits() -> None:
    sampling = parse(temperature=0.1, top_p=0.3).sampling
    assert (sampling.temp, sampling.top_p) == (0.10000000149011612, 0.30000001192092896)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-1, 0xFFFFFFFF), (-2, 0xFFFFFFFE), (2**32 + 5, 5), (42, 42), (1.5, 1), (1732924800123, 1732924800123 % 2**32)],
)
def test_seeds_wrap_to_32_bits(value: float, expected: int) -> None:
    assert parse(seed=value).sampling.seed == expected


def test_a_seed_beyond_64_bits_is_refused() -> None:
    assert refused(seed=1e30).startswith("Field 'seed': ")


def test_usage_is_asked_for_inside_stream_options() -> None:
    assert parse(stream_options={"include_usage": True}).include_usage
    assert not parse(stream_options={}).include_usage
    assert not parse(include_usage=True).include_usage
    assert refused(stream_options={"include_usage": 1}).startswith("Field 'include_usage': ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", ("a",)),
        (["a", "", None, "b"], ("a", "b")),
        ([], ("DEF",)),
        ("", ("DEF",)),
        ([""], ("DEF",)),
    ],
)
def test_stop_strings_fall_back_to_the_servers(value: Any, expected: tuple[str, ...]) -> None:
    assert parse({"antiprompt": ["DEF"]}, stop=value).antiprompt == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            ["top-k", "TEMP", "foo", "nucleus", "typ", "minp", "adaptive-p"],
            "top_k temperature top_p typ_p min_p adaptive_p",
        ),
        (["top_k", "top_k"], "top_k top_k"),
        ("dkypmxtisea?", "dry top_k typ_p top_p min_p xtc temperature infill top_n_sigma penalties adaptive_p"),
        ([], ""),
        ("", ""),
    ],
)
def test_samplers_by_name_and_by_letter(value: Any, expected: str) -> None:
    assert parse(samplers=value).sampling.samplers == tuple(expected.split())


def test_logit_bias_as_pairs() -> None:
    value = [
        [1, False],
        [2, 0.5],
        ["hello", -1],
        [3, True],
        [4],
        [5, None],
        [99_999, 1],
        [-1, 1],
        [1.5, 2],
        [True, 3],
        7,
    ]
    assert parse(logit_bias=value).sampling.logit_bias == ((1, NINF), (2, 0.5), (HELLO, -1.0))


def test_logit_bias_as_an_object() -> None:
    value = {"1": False, "hello": 1.5, "": 3, " 7": 2, "9999": 1, "4294967297": 1, "ab": 1}
    expected = ((1, NINF), (HELLO, 1.5), (7, 2.0), (ord("a"), 1.0), (ord("b"), 1.0))
    assert parse(logit_bias=value).sampling.logit_bias == expected


def test_huge_biases_stay_usable() -> None:
    assert parse(logit_bias=[[1, 1e300], [2, -1e300]]).sampling.logit_bias == ((1, FLOAT_MAX), (2, NINF))


def test_special_tokens_in_biased_text_are_plain_text() -> None:
    assert parse(logit_bias=[["<s>", 1]]).sampling.logit_bias == tuple((ord(char), 1.0) for char in "<s>")


def test_ignore_eos_bans_the_ends() -> None:
    sampling = parse(ignore_eos=True, logit_bias=[[5, 1]]).sampling
    assert sampling.ignore_eos
    assert sampling.logit_bias == ((5, 1.0), (EOS, NINF))


def test_ignore_eos_of_the_server_survives_other_biases_and_can_be_lifted() -> None:
    server = {"sampling": {"ignore_eos": True, "logit_bias": [[3, 2.0], [EOS, "-inf"]]}}
    assert parse(server).sampling.logit_bias == ((3, 2.0), (EOS, NINF))
    assert parse(server, logit_bias=[[5, 1]]).sampling.logit_bias == ((5, 1.0), (EOS, NINF))
    assert parse(server, ignore_eos=False).sampling.logit_bias == ((3, 2.0),)


def test_lora_absent_and_empty_differ() -> None:
    assert parse().lora is None
    assert parse(lora=[]).lora == {}
    assert parse(lora=[{"id": 1, "scale": 0.5}, {"id": 0}]).lora == {1: 0.5, 0: 0.0}


@pytest.mark.parametrize(("value", "expected"), [(0.5, 1.75), (1.0, 1.0), (2, 2.0)])
def test_a_dry_base_below_one_is_the_servers(value: float, expected: float) -> None:
    assert parse(dry_base=value).sampling.dry_base == expected


def test_a_repeat_penalty_of_zero_is_refused() -> None:
    expected = "Failed to initialize samplers: penalty_repeat must be finite and greater than 0"
    assert refused(repeat_penalty=0) == expected


def test_reasoning_budget() -> None:
    sampling = parse(
        reasoning_budget_start_tag="a",
        reasoning_budget_end_tags=["b", "", "hello"],
        reasoning_budget_message="m",
        reasoning_budget_tokens=5,
    ).sampling
    assert sampling.reasoning_budget_start == (ord("a"),)
    assert sampling.reasoning_budget_end == ((ord("b"),), (HELLO,))
    assert sampling.reasoning_budget_forced == (ord("m"), ord("b"))
    assert sampling.reasoning_budget_tokens == 5
    assert parse(reasoning_budget_end_tag="b").sampling.reasoning_budget_end == ((ord("b"),),)


def test_preserved_tokens_are_those_that_are_one_token() -> None:
    assert parse(preserved_tokens=["<s>", "ab", "hello"]).sampling.preserved_tokens == frozenset({BOS, HELLO})


def test_grammar_triggers() -> None:
    triggers = [
        {"type": 0, "value": "q", "token": 5},
        {"type": 1, "value": "hello"},
        {"type": 1, "value": "ab"},
        {"type": 3, "value": "^a$"},
    ]
    found = parse(grammar_triggers=triggers, preserved_tokens=["hello"]).sampling.grammar_triggers
    assert found == ((0, "q", 5), (0, "hello", HELLO), (1, "ab", -1), (3, "^a$", -1))


@pytest.mark.parametrize("value", [r"(a*)b\1", r"(a)\\\1", r"(a)(b)(c)\3+"])
def test_a_trigger_that_refers_back_is_refused(value: str) -> None:
    for kind in (2, 3):
        assert "refer back" in refused(grammar_triggers=[{"type": kind, "value": value}])
    assert parse(grammar_triggers=[{"type": 1, "value": value}])
    assert parse(grammar_triggers=[{"type": 2, "value": r"(a*)\\1\d\0"}])


def test_a_trigger_word_of_one_token_must_be_preserved() -> None:
    assert "preserved token" in refused(grammar_triggers=[{"type": 1, "value": "hello"}])


def test_a_lazy_grammar_needs_a_trigger() -> None:
    grammar = 'root ::= "x"'
    assert "no triggers" in refused(grammar=grammar, grammar_lazy=True)
    assert "no triggers" in refused(grammar=grammar, grammar_lazy=True, grammar_triggers=[])
    assert parse(grammar_lazy=True).sampling.grammar_lazy


def test_a_grammar_is_checked_and_kept() -> None:
    tools = FakeTools()
    grammar = 'root ::= "a" [0-9]+'
    assert parse(_tools=tools, grammar=grammar).sampling.grammar == ("user", grammar)
    assert parse(_tools=tools, grammar=grammar, grammar_type="tool_calls").sampling.grammar[0] == "tool_calls"
    assert tools.grammars == [grammar, grammar]


def test_an_empty_grammar_is_none() -> None:
    assert parse(grammar="").sampling.grammar == ("none", "")


@pytest.mark.parametrize(
    "grammar",
    [
        'root := "x"',
        'Root ::= "x"',
        "root ::= missing",
        'root ::= root "x"',
        "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000,
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5_000)) + 'r5000 ::= "a"\n',
        "%llguidance {}",
    ],
)
def test_a_bad_grammar_never_reaches_the_library(grammar: str) -> None:
    tools = FakeTools()
    assert refused(_tools=tools, grammar=grammar).startswith("Field 'grammar': failed to parse grammar: ")
    assert tools.grammars == []


def test_the_librarys_verdict_on_a_grammar_counts() -> None:
    tools = FakeTools(error="token out of range")
    assert (
        refused(_tools=tools, grammar='root ::= "x"') == "Field 'grammar': failed to parse grammar: token out of range"
    )


def test_a_json_schema_becomes_a_grammar() -> None:
    tools = FakeTools()
    assert parse(_tools=tools, json_schema={"type": "integer"}).sampling.grammar == ("output_format", 'root ::= "x"\n')
    assert tools.schemas == ['{"type":"integer"}']


def test_an_empty_json_schema_is_any_object() -> None:
    tools = FakeTools()
    parse(_tools=tools, json_schema={})
    assert json.loads(tools.schemas[0]) == {"type": "object"}


@pytest.mark.parametrize("grammar", [None, ""])
def test_a_json_schema_counts_beside_an_empty_grammar(grammar: str | None) -> None:
    assert parse(json_schema={"type": "integer"}, grammar=grammar).sampling.grammar[0] == "output_format"


def test_a_grammar_wins_over_a_json_schema() -> None:
    tools = FakeTools()
    assert parse(_tools=tools, json_schema={"type": "integer"}, grammar='root ::= "y"').sampling.grammar[0] == "user"
    assert tools.schemas == []


def test_a_hostile_json_schema_is_refused_before_the_library() -> None:
    tools = FakeTools()
    circle = {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert "circular" in refused(_tools=tools, json_schema=circle)
    assert tools.schemas == []


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.sampled_from(["content", "reasoning_content", "hello", "0", "top_k", 'root ::= "x"']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "scale", "type", "value", "token", "1", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [name for field in FIELDS for name in field.names] + ["stream_options", "grammar_type"]


def params_or_status(data: dict[str, Any]) -> TaskParams | int:
    try:
        return SCHEMA.parse(data)
    except ApiError as error:
        return error.status


@given(st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=4))
def test_any_values_give_settings_or_a_400(data: dict[str, Any]) -> None:
    outcome = params_or_status(data)
    if isinstance(outcome, int):
        assert outcome == 400
        return
    settings = json.loads(dumps(generation_settings(outcome)))
    assert 0 <= settings["n_probs"] <= FakeVocab.n_tokens
    assert 0 <= settings["seed"] <= 0xFFFFFFFF
    assert all(0 <= bias["token"] < FakeVocab.n_tokens for bias in settings["logit_bias"])
    assert -1 <= settings["n_predict"] <= INT32_MAX
    assert all(isinstance(word, str) and word for word in settings["stop"])
