"""What holds whatever dialect a question comes in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from dialects import DIALECTS, Dialect
from server_process import ServerProcess
from talk import EXACT, all_idle, wait_for

#: The Messages API has no grammars.
WITH_GRAMMAR = DIALECTS[:-1]


def name(dialect: Dialect) -> str:
    return dialect.path


every = pytest.mark.parametrize("dialect", DIALECTS, ids=name)
with_grammar = pytest.mark.parametrize("dialect", WITH_GRAMMAR, ids=name)


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[ServerProcess]:
    flags = ("-c", 1024, "-np", 2, "-kvu", "-t", 1, "--context-shift")
    with ServerProcess("-m", tiny_model_path, *flags, *EXACT) as server:
        yield server


@every
def test_a_stream_says_what_the_plain_answer_says_for_all_kinds_of_stop_lists(
    server: ServerProcess, dialect: Dialect
) -> None:
    chance = random.Random(7)
    n_cut = 0
    for _ in range(25):
        prompt = " ".join(chance.choices(["Once", "Tom", "the", "water", "He"], k=3))
        n_predict = chance.randint(4, 30)
        full = dialect.text(dialect.ask(server, prompt, n_predict))
        # an unfinished character at the end is told as U+FFFD, which the model never said
        sayable = full.rstrip("\ufffd")
        stops = []
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(sayable))
            said = sayable[start : start + chance.randint(1, 12)]
            stops.append(chance.choice([said, said + "#", said[: len(said) // 2 + 1] + "~", "\n"]))
        plain = dialect.text(dialect.ask(server, prompt, n_predict, stops))
        events = dialect.stream(server, prompt, n_predict, stops)
        assert "".join(map(dialect.text, events)) == plain, (prompt, stops)
        assert full.startswith(plain)
        assert not any(stop in plain for stop in stops if "\ufffd" not in stop)
        n_cut += plain != full
    assert n_cut > 5


@with_grammar
@pytest.mark.parametrize("n_predict", [60, 5])
def test_text_held_back_is_released_at_the_end(server: ServerProcess, dialect: Dialect, n_predict: int) -> None:
    asked = {"stop": ["three\nEND"], "grammar": 'root ::= "one two three"'}
    plain = dialect.text(dialect.ask(server, "x", n_predict, **asked))
    assert plain == "one two three" if n_predict == 60 else "one two three".startswith(plain) and plain
    assert "".join(map(dialect.text, dialect.stream(server, "x", n_predict, **asked))) == plain


@with_grammar
def test_of_a_stop_string_nothing_is_said(server: ServerProcess, dialect: Dialect) -> None:
    for grammar, stop, said in (("abc STOP", "STOP", "abc "), ("A B C D E F G H I J", "F G H", "A B C D E ")):
        asked = {"stop": [stop], "grammar": f'root ::= "{grammar}"'}
        assert dialect.text(dialect.ask(server, "x", 60, **asked)) == said
        assert "".join(map(dialect.text, dialect.stream(server, "x", 60, **asked))) == said


@every
@pytest.mark.parametrize("n_predict", [0, 1, 2])
def test_the_limit_is_exact(server: ServerProcess, dialect: Dialect, n_predict: int) -> None:
    ends = {"ignore_eos": True} if dialect in WITH_GRAMMAR else {}
    answer = dialect.ask(server, "Once the river", n_predict, **ends)
    assert dialect.n_tokens(answer) == n_predict
    events = dialect.stream(server, "Once the river", n_predict, **ends)
    assert "".join(map(dialect.text, events)) == dialect.text(answer)
    if n_predict == 0:
        assert dialect.text(answer) == ""


@with_grammar
def test_no_limit_goes_on_to_the_end(server: ServerProcess, dialect: Dialect) -> None:
    assert dialect.text(dialect.ask(server, "x", -1, grammar='root ::= "one two three"')) == "one two three"


@every
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_before_any_stream(
    server: ServerProcess, dialect: Dialect, stream: bool
) -> None:
    response = server.post(dialect.path, dialect.body("tick tock " * 400, 4, stream=stream))
    assert response.status == 400
    error = response.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 1024


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS[:2], ids=name)
def test_one_prompt_of_several_that_is_too_long_refuses_them_all(
    server: ServerProcess, dialect: Dialect, stream: bool
) -> None:
    body = {**dialect.body("", 4, stream=stream), "prompt": ["Once", [5, 6, 7], [8] * 1024]}
    response = server.post(dialect.path, body)
    assert response.status == 400
    error = response.json()["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 1024, 1024)
    assert all_idle(server)


@with_grammar
@pytest.mark.parametrize(
    "grammar", ['root := "x"', 'Root ::= "x"', "root ::= missing", 'root ::= root "x"', 7, "root ::= " + "(" * 60000]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_none_is_refused(
    server: ServerProcess, dialect: Dialect, grammar: object, stream: bool
) -> None:
    response = server.post(dialect.path, dialect.body("x", 8, grammar=grammar, stream=stream))
    assert response.status == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "grammar" in error["message"]


@with_grammar
def test_an_empty_list_of_adapters_is_the_bare_model(
    server: ServerProcess, tiny_models: dict[str, Path], dialect: Dialect
) -> None:
    bare = dialect.text(dialect.ask(server, "Once", 8))
    flags = ("-c", 1024, "-np", 2, "-kvu", "-t", 1, "--lora", tiny_models["tiny-lora-a"])
    with ServerProcess("-m", tiny_models["tiny-llama"], *flags, *EXACT) as adapted:
        assert dialect.text(dialect.ask(adapted, "Once", 8)) != bare
        for off in ([], [{"id": 0, "scale": 0.0}]):
            assert dialect.text(dialect.ask(adapted, "Once", 8, lora=off)) == bare
            assert "".join(map(dialect.text, dialect.stream(adapted, "Once", 8, lora=off))) == bare


@every
def test_a_client_that_leaves_frees_its_slot(server: ServerProcess, dialect: Dialect) -> None:
    # nothing but the client's going ends this within the time that is waited
    body = dialect.body("Once", 100_000, stream=True, ignore_eos=True)
    with server.stream(dialect.path, body) as stream:
        next(iter(stream))
        stream.hang_up()
    wait_for(lambda: all_idle(server))
