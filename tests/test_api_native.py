"""Grammar, prompts and settings against the real library."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_fakes import FakeIds, server_meta

from llamasrv.api import gbnf
from llamasrv.api.completion import build_completion_tasks
from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.api.grammar import native_tools
from llamasrv.api.settings import generation_settings
from llamasrv.api.tokenize import detokenize_json, tokenize_json
from llamasrv.engine.meta import ServerMeta

binding = pytest.importorskip("llamasrv.binding")


@dataclass
class LoadedServer:
    params: dict[str, Any]
    vocab: Any
    meta: ServerMeta


@pytest.fixture(scope="module")
def context(tiny_model_path: Path) -> Iterator[ApiContext]:
    argv = ["llama-server", "-m", str(tiny_model_path), "-c", "256", "-np", "2", "--temp", "0.3", "-n", "9", "-lv", "0"]
    with binding.Params.parse(argv) as params:
        binding.backend_init(params)
        with binding.Model.load(params) as model:
            meta = server_meta(n_vocab=model.vocab.n_tokens, slot_n_ctx=128)
            yield ApiContext(LoadedServer(params.to_dict(), model.vocab, meta))


def grammar_of(context: ApiContext, **data: Any) -> tuple[str, str]:
    return context.schema.parse(data).sampling.grammar


def test_defaults_come_from_the_command_line(context: ApiContext) -> None:
    settings = generation_settings(context.schema.parse({}))
    assert settings["temperature"] == pytest.approx(0.3)
    assert settings["n_predict"] == 9
    assert "top_k" in settings["samplers"]


def test_schemas_become_grammars(context: ApiContext) -> None:
    schema = {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": r"^\d{3}-\w+$"}, "tree": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    kind, text = grammar_of(context, json_schema=schema)
    assert kind == "output_format"
    assert "[0-9]" in text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (True, "must be an object"),
        ({"type": "foo"}, "unrecognized type foo"),
        ({"$ref": "#/x"}, "cannot resolve $ref #/x"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "below its minimum"),
        ({"type": "string", "minLength": 5_000}, "exceeds 2000"),
        ({"type": "string", "pattern": "^(?=a)a$"}, "'^(?=a)a$' at # is not supported"),
        ({"properties": {"a": {"type": "string", "pattern": "^[a$"}}}, "at #/properties/a cannot be used"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "failed to parse grammar"),
    ],
)
def test_schemas_without_a_usable_grammar_are_refused(context: ApiContext, schema: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(context, json_schema=schema)
    assert caught.value.message.startswith("Field 'json_schema': \"json_schema\": ")
    assert message in caught.value.message


@pytest.mark.parametrize("grammar", ["root ::= <no-such-token>", 'root ::= ("a" | "")*', 'root ::= "a"{100}{100}'])
def test_grammars_that_only_the_library_refuses(context: ApiContext, grammar: str) -> None:
    gbnf.check(grammar)
    with pytest.raises(ApiError, match="failed to parse grammar"):
        grammar_of(context, grammar=grammar)


def test_the_library_takes_no_grammar_that_has_a_mistake_here(context: ApiContext) -> None:
    """Both read the same syntax: what is refused here for its syntax is refused there."""
    tools = native_tools()
    choose = random.Random(7).choice
    atoms = (
        '"a"',
        '"b\\n"',
        "[a-z]",
        "[^x]",
        "[]",
        '""',
        "a",
        ".",
        "<[3]>",
        "(",
        ")",
        "*",
        "{2}",
        "{1,}",
        "|",
        "\n",
        "[",
    )
    n_mistakes = 0
    for _ in range(1_500):
        text = "root ::= " + " ".join(choose(atoms) for _ in range(6)) + '\na ::= "x"'
        try:
            gbnf.check(text)
        except gbnf.GrammarError:
            n_mistakes += 1
            with pytest.raises(Exception, match="failed to parse grammar"):
                tools.check_grammar(context.vocab, text)
    assert n_mistakes > 100


def test_text_survives_the_way_through_tokens(context: ApiContext) -> None:
    text = "Once <s> é😀\0x"
    tokens = tokenize_json(context.vocab, {"content": text, "parse_special": False})["tokens"]
    assert detokenize_json(context.vocab, {"tokens": tokens})["content"].lstrip() == text


def test_control_tokens_in_prompts_are_recognised(context: ApiContext) -> None:
    plain, special = (
        tokenize_json(context.vocab, {"content": "</s>", "parse_special": flag})["tokens"] for flag in (False, True)
    )
    assert len(special) == 1
    assert len(plain) > 1


def test_a_request_becomes_tasks(context: ApiContext) -> None:
    (task,) = build_completion_tasks(context, {"prompt": "Once upon", "n": 2, "seed": 1}, FakeIds())
    assert task.tokens
    assert len(task.child_tasks) == 1
