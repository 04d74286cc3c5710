"""Coverage-guided fuzzing of every parser, for a few seconds each; LLAMASRV_FUZZ_S makes it longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris")

SECONDS = int(os.environ.get("LLAMASRV_FUZZ_S", "6"))
HERE = Path(__file__).resolve().parent
PATHS = [str(HERE), str(HERE.parent), str(HERE.parent / "scripts"), str(HERE.parent / "native")]

CALL = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
QUESTIONS = {
    "a": {"type": "choice", "instructions": "i", "criteria": {"a": None, "b": "x"}},
    "b": {"type": "score", "instructions": "i", "criteria": ["a", "b"]},
    "c": {"type": "noul", "instructions": {"x": 1}, "criteria": {"yes": "y"}},
}
#: What the fuzzer begins with.
SEEDS: dict[str, list[object]] = {
    "json": [{"a": [1, 2.5, None, True, "\u00e9\\"]}, [[[{}]]], "x"],
    "gbnf": [
        'root ::= ("a" | b+ | [^c-d]{2,3})* # x\nb ::= <[3]> !<x> "\\u00e9" .',
        'root ::= a\na ::= b? a "x" |\nb ::= ""',
    ],
    "pattern": ["^[a-c\\d]+(x|y){2,}.*$", "{% if a %}{{ b[1:2] | c }}{% elif d %}{% endif %}{# e #}"],
    "schema": [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": [1]}}},
        {"anyOf": [{"type": ["string", "null"], "pattern": "^a$"}, {"allOf": [{"items": {}, "minItems": 2}]}]},
    ],
    "completion": [
        {"prompt": ["a", [1, "b"]], "stop": ["x"], "logit_bias": [[1, 2.0], ["a", False]], "samplers": "kp", "n": 2},
        {"input_prefix": "a", "input_suffix": [1, "b"], "input_extra": [{"text": "x", "filename": "f"}], "lora": []},
        {"grammar": "root ::= x", "grammar_triggers": [{"type": 0, "value": "a", "token": 1}], "json_schema": {}},
    ],
    "chat": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [TOOL]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}]},
        {"messages": [], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
    "anthropic": [
        {
            "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}],
            "system": [{"type": "text", "text": "a"}],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled"},
        },
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
    ],
    "responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "b"},
                {"type": "reasoning", "summary": [{"text": "a"}]},
            ],
            "text": {"format": {"type": "json_schema", "schema": {}}},
            "include": ["message.output_text.logprobs"],
        },
        {"input": "a", "instructions": "b", "tools": [{"type": "function", "name": "f"}], "reasoning": {"effort": "x"}},
    ],
    "vectors": [
        {"input": ["a", [1, 2], {"content": [{"type": "text", "text": "a"}]}], "dimensions": 2},
        {"query": "a", "documents": ["b"], "top_n": 1},
        {"query": "a", "texts": ["b"], "input": "x", "encoding_format": "base64", "embd_normalize": 1},
    ],
    "decision": [
        {"state": {"messages": [{"role": "user", "content": "x"}]}, "questions": QUESTIONS},
        {"state": [{"content": [{"type": "text", "text": "a"}]}], "questions": QUESTIONS, "images": []},
    ],
}


@pytest.mark.parametrize("target", SEEDS)
def test_nothing_but_refusals(target: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[target]):
        (corpus / str(number)).write_text(seed if isinstance(seed, str) else json.dumps(seed))
    options = [f"-max_total_time={SECONDS}", "-timeout=20", "-rss_limit_mb=2000", "-max_len=2000", "-seed=1"]
    command = [sys.executable, str(HERE / "fuzz_targets.py"), target, *options, f"-artifact_prefix={tmp_path}/"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    run = subprocess.run([*command, str(corpus)], capture_output=True, env=env, check=False, timeout=SECONDS + 200)
    output = (run.stdout + run.stderr).decode(errors="replace")
    assert run.returncode == 0, output[-4000:]
    assert "DONE" in output or "Done " in output, output[-2000:]
