"""The bridge's own way through a grammar: the same language as libllama's, in bounded time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

#: Grammar -> the regular expression of the same language.
LANGUAGES = [
    ('root ::= "yes" | "no" | "not yet"', r"yes|no|not yet"),
    ("root ::= [a-c]{3} [^a-z]{2}", r"[a-c]{3}[^a-z]{2}"),
    ('root ::= ("ab" | "a" "b"? "c")+ "!"', r"(?:ab|ab?c)+!"),
    ('root ::= "a"? "b"? "c"? "d"? "e"? [0-9]', r"a?b?c?d?e?[0-9]"),
    ('root ::= (a | b) (a | b) "."\na ::= [a-m]+\nb ::= [g-z]+', r"(?:[a-m]+|[g-z]+)(?:[a-m]+|[g-z]+)\."),
    ("root ::= [éß中]{4}", r"[éß中]{4}"),
    ("root ::= [😀-🙏]{3}", r"[😀-🙏]{3}"),
    ("root ::= [\\u0080-\\uffff]{3} .", r"[\u0080-\uffff]{3}[\s\S]"),
    ('root ::= ("(" root ")" | "x")', r"\(*x\)*"),
    ('root ::= "" | "one"', r"|one"),
    ('root ::= [^"\\\\\\n]{0,12} "\\n"', r'[^"\\\n]{0,12}\n'),
]


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_models["tiny-bpe"], "-c", 1024, "-np", 4, "-t", 1) as server:
        yield server


@pytest.mark.parametrize(("grammar", "expression"), LANGUAGES)
def test_what_is_generated_is_of_the_language(server: ServerProcess, grammar: str, expression: str) -> None:
    texts = []
    for seed in range(8):
        body = {"prompt": "a", "grammar": grammar, "seed": seed, "temperature": 3.0, "top_k": 0, "n_predict": 200}
        answer = server.post("/completion", body).json()
        if answer["stop_type"] == "eos":
            texts.append(answer["content"])
            assert re.fullmatch(expression, answer["content"]), answer["content"]
    assert texts


def test_tokens_that_a_grammar_names_are_the_only_ones(server: ServerProcess) -> None:
    ids = server.post("/tokenize", {"content": "the river"}).json()["tokens"]
    grammar = f"root ::= <[{ids[0]}]> !<[{ids[1]}]> [a-z] <[{ids[-1]}]>"
    for seed in range(8):
        body = {"prompt": "a", "grammar": grammar, "seed": seed, "temperature": 3.0, "top_k": 0, "n_predict": 8}
        found = server.post("/completion", {**body, "return_tokens": True}).json()["tokens"]
        assert found[0] == ids[0]
        assert found[1] != ids[1]
        assert found[3] == ids[-1]


def test_answers_under_one_grammar_are_clones_of_one_sampler(server: ServerProcess) -> None:
    body = {"prompt": "a", "grammar": 'root ::= [a-c]{5} "."', "n_cmpl": 4, "n_predict": 20, "seed": 1}
    for answer in server.post("/completion", body).json():
        assert re.fullmatch(r"[a-c]{5}\.", answer["content"])


@pytest.mark.parametrize(
    "pattern",
    [
        "(x)",
        "^[\\s\\S]*?(x+)[\\s\\S]*",
        "^a*(x)$",
        "(?:a|aa)*(x)",
        "nothing (like) that|(x)",
    ],
)
def test_a_trigger_starts_the_grammar_at_its_group(server: ServerProcess, pattern: str) -> None:
    # first letters a, then, as nothing is banned any more, an x
    body = {
        "prompt": "q",
        "grammar": 'root ::= "x" "yz"',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 2, "value": pattern}],
        "logit_bias": [["x", 90], ["a", 89.9]],
        "temperature": 5,
        "n_predict": 60,
        "seed": 3,
    }
    content = server.post("/completion", body).json()["content"]
    assert re.fullmatch(r"a*xyz", content), content


def test_time_does_not_double_with_every_letter(server: ServerProcess) -> None:
    # a token of eight letters that fails at the ninth has some 10^15 ways through this
    body = {"prompt": "a", "n_predict": 4, "grammar": "root ::= " + "[a-z ]? " * 200 + '"#"'}
    began = time.monotonic()
    response = server.post("/completion", body)
    assert response.status in (200, 400), response.text
    assert time.monotonic() - began < 30


def test_an_answer_that_becomes_too_ambiguous_is_ended_with_400(server: ServerProcess) -> None:
    grammar = 'root ::= [a-z A-Z,.] root "x" | [a-z A-Z,.] root "y"'
    response = server.post("/completion", {"prompt": "a", "n_predict": 200, "grammar": grammar})
    assert response.status == 400
    assert "the grammar is too complex" in response.json()["error"]["message"]
    assert server.post("/completion", {"prompt": "a", "n_predict": 2}).status == 200
