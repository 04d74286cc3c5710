"""The whole server over real HTTP, with a tiny model and with SmolLM2."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, Stream
from talk import EXACT, PATIENCE, all_idle, complete, joined, metric, streamed, wait_for

#: What answers at once when all is well answers within this, seconds; what it is told from takes ten times as long.
PROMPTLY = 10.0


@pytest.fixture(scope="module")
def tiny(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_model_path, "-c", 16384, "-np", 4, "-t", 1, "--metrics", *EXACT) as server:
        yield server


@pytest.fixture(scope="module")
def smol(demo_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", demo_model_path, "-c", 8192, "-np", 4, "-t", 1, "--kv-unified", "--metrics") as server:
        yield server


# -- many at once


def crowd(server: ServerProcess, prompts: list[str], **body: Any) -> tuple[list[list[Any]], float]:
    """One stream per prompt, all at once: their events, and the most requests that waited for a slot at a time."""
    waiting: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            waiting.append(metric(server, "requests_deferred"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: streamed(server, prompt=prompt, **body), prompts))
    finally:
        done.set()
        watcher.join()
    return answers, max(waiting)


def test_sixteen_clients_on_four_slots_get_what_each_gets_alone(tiny_model_path: Path) -> None:
    prompts = [f"Client {number} said: " + "the river " * number for number in range(16)]
    with ServerProcess("-m", tiny_model_path, "-c", 8192, "-np", 4, "-t", 1, "--metrics", *EXACT) as server:
        answers, waiting = crowd(server, prompts, n_predict=200, ignore_eos=True)
        assert waiting > 0
        assert all_idle(server)
        for prompt, events in zip(prompts, answers, strict=True):
            assert events[-1]["tokens_predicted"] == 200
            alone = complete(server, prompt=prompt, n_predict=200, ignore_eos=True, cache_prompt=False)
            assert joined(events) == alone["content"]


@pytest.mark.slow
def test_sixteen_clients_of_a_real_model_get_their_full_answers(smol: ServerProcess) -> None:
    prompts = [f"{number}. My favourite number is" for number in range(16)]
    answers, waiting = crowd(smol, prompts, n_predict=12, ignore_eos=True)
    assert waiting > 0
    for events in answers:
        assert events[-1]["tokens_predicted"] == 12
        assert joined(events).strip()
    assert all_idle(smol)


# -- clients that leave


def visit(server: ServerProcess, chance: random.Random) -> None:
    """One request of any kind; every second client hangs up before the end."""
    body: dict[str, Any] = {
        "prompt": " ".join(chance.choices(["the", "river", "Tom", "and", "Nora", "said"], k=chance.randint(0, 60))),
        "n_predict": chance.choice([0, 1, 5, 50, 400]),
        "stream": chance.random() < 0.7,
        "temperature": chance.choice([0, 0.8, 2.0]),
        "n_cmpl": chance.choice([1, 1, 1, 2, 4]),
        "id_slot": chance.choice([-1, -1, -1, 0, 3]),
        "stop": chance.choice([[], ["e"], ["the", " a"]]),
        "n_probs": chance.choice([0, 0, 3]),
        "cache_prompt": chance.random() < 0.8,
    }
    leaves = chance.random() < 0.5
    if not leaves:
        response = server.post("/completion", body)
        assert response.status == 200, response.text
        return
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    moment = chance.random()
    if moment < 0.3 or not body["stream"]:
        # before or while the answer is made
        time.sleep(chance.random() * 0.05)
    else:
        response_ = connection.getresponse()
        for _ in range(chance.randint(0, 10)):
            response_.readline()
        response_.close()
    connection.close()


def test_clients_that_hang_up_leave_nothing_behind(tiny: ServerProcess) -> None:
    question = {"prompt": "Once there was a river", "n_predict": 60, "cache_prompt": False}
    answer = complete(tiny, **question)["content"]

    def visits(count: int, seed: int) -> None:
        chances = [random.Random(seed + number) for number in range(count)]
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda chance: visit(tiny, chance), chances))
        wait_for(lambda: all_idle(tiny))

    # buffers, threads and the prompt cache grow to their size
    visits(100, seed=1000)
    before = tiny.memory_kb()
    visits(200, seed=2000)
    assert tiny.memory_kb() - before < 24 * 1024
    assert metric(tiny, "requests_deferred") == 0
    assert metric(tiny, "requests_processing") == 0
    assert complete(tiny, **question)["content"] == answer


def test_a_client_that_leaves_while_queued_disturbs_nobody_and_costs_nothing(tiny: ServerProcess) -> None:
    long = {"prompt": "Once", "n_predict": 3000, "ignore_eos": True, "temperature": 0, "stream": True}
    before = metric(tiny, "tokens_predicted_total")
    running = [tiny.stream("/completion", {**long, "id_slot": number}) for number in range(4)]
    readers = [iter(stream) for stream in running]
    for reader in readers:
        next(reader)
    for _ in range(10):
        connection = http.client.HTTPConnection("127.0.0.1", tiny.port)
        connection.request("POST", "/completion", json.dumps({"prompt": "Tom", "n_predict": 3000}))
        connection.close()
    for stream, reader in zip(running, readers, strict=True):
        with stream:
            assert list(reader)[-1]["tokens_predicted"] == 3000
    wait_for(lambda: all_idle(tiny) and metric(tiny, "requests_deferred") == 0)
    assert metric(tiny, "tokens_predicted_total") - before == 4 * 3000


# -- what must answer whatever is going on


@pytest.fixture
def long_prompt(smol: ServerProcess) -> Iterator[Stream]:
    """A request whose prompt of 8,000 tokens is being evaluated."""
    tokens = [500 + number % 997 for number in range(8000)]
    body = {"prompt": tokens, "n_predict": 4, "stream": True, "return_progress": True, "cache_prompt": False}
    stream = smol.stream("/completion", body)
    progress = next(iter(stream))["prompt_progress"]
    assert progress["processed"] < progress["total"] == 8000
    yield stream
    stream.hang_up()
    wait_for(lambda: all_idle(smol))


@pytest.mark.slow
def test_everything_that_only_reads_answers_while_a_long_prompt_is_evaluated(
    smol: ServerProcess, long_prompt: Stream
) -> None:
    for _ in range(5):
        for path in ("/health", "/props", "/v1/models", "/slots", "/metrics"):
            assert smol.get(path, timeout=PROMPTLY).status == 200
        assert smol.post("/tokenize", {"content": "Hello"}, timeout=PROMPTLY).status == 200
    assert metric(smol, "requests_processing") == 1


@pytest.mark.slow
def test_a_long_prompt_whose_client_leaves_is_abandoned(smol: ServerProcess, long_prompt: Stream) -> None:
    long_prompt.hang_up()
    # the whole prompt would take much longer than one batch of it
    wait_for(lambda: all_idle(smol))
    counted = metric(smol, "prompt_tokens_total")
    time.sleep(1.0)
    assert metric(smol, "prompt_tokens_total") == counted
    # that nobody wants the answer any more is no fault
    assert "failed to compute" not in smol.log


def test_health_answers_while_all_workers_are_busy(tiny_model_path: Path) -> None:
    flags = ("-c", 4096, "-np", 1, "-t", 1, "--threads-http", 2)
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        body = {"prompt": "Once", "n_predict": 1000, "ignore_eos": True, "stream": True}
        streams = [server.stream("/completion", body) for _ in range(1)]
        next(iter(streams[0]))
        waiting = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(32)]
        for connection in waiting:
            connection.request("POST", "/completion", json.dumps(body))
        for _ in range(10):
            assert server.get("/health", timeout=PROMPTLY).json() == {"status": "ok"}
        for connection in waiting:
            connection.close()
        for stream in streams:
            stream.hang_up()


@pytest.mark.slow
def test_sigterm_amid_all_kinds_of_work_ends_with_code_0(demo_model_path: Path) -> None:
    with ServerProcess("-m", demo_model_path, "-c", 8192, "-np", 2, "--kv-unified", "-t", 1) as server:
        talking = server.stream(
            "/completion", {"prompt": "Hello", "n_predict": 2000, "stream": True, "ignore_eos": True}
        )
        next(iter(talking))
        prompt = [500 + number % 997 for number in range(8000)]
        body = {"prompt": prompt, "n_predict": 4, "stream": True, "return_progress": True}
        reading = server.stream("/completion", body)
        next(iter(reading))
        queued = http.client.HTTPConnection("127.0.0.1", server.port)
        queued.request("POST", "/completion", json.dumps({"prompt": "Hi", "n_predict": 4}))
        assert server.stop() == 0
        for stream in (talking, reading):
            assert "error" in list(stream)[-1]
            stream.connection.close()
        response = queued.getresponse()
        assert response.status == 503
        assert "error" in json.loads(response.read())
        queued.close()


# -- streams say what plain replies say


def test_joined_stream_equals_the_plain_reply_for_all_kinds_of_stop_lists(tiny: ServerProcess) -> None:
    chance = random.Random(5)
    kinds = set()
    for _ in range(60):
        prompt = " ".join(chance.choices(["Once", "Tom", "the", "water", "He", "they said"], k=chance.randint(1, 4)))
        body = {"prompt": prompt, "n_predict": chance.randint(5, 40), "cache_prompt": False}
        full = complete(tiny, **body)["content"]
        stops = []
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(full))
            said = full[start : start + chance.randint(1, 12)]
            # what is said; what begins like it; what never comes
            stops.append(chance.choice([said, said + "#", said[: len(said) // 2 + 1] + "~", "\n"]))
        plain = complete(tiny, **body, stop=stops)
        events = streamed(tiny, **body, stop=stops)
        assert joined(events) == plain["content"], (prompt, stops)
        assert full.startswith(plain["content"])
        for name in ("stop_type", "stopping_word", "tokens_predicted", "truncated"):
            assert events[-1][name] == plain[name]
        if plain["stop_type"] == "word":
            assert (plain["content"] + plain["stopping_word"]) in full
            assert not any(stop in plain["content"] for stop in stops)
        kinds.add(plain["stop_type"])
    assert kinds >= {"word", "limit"}


def test_a_stop_string_that_shares_its_start_with_the_answer_repeats_nothing(smol: ServerProcess) -> None:
    body = {"prompt": "Nora: Where is Tom?\nTom: He is with", "n_predict": 12, "stop": ["\n", "Nora:"]}
    assert joined(streamed(smol, **body)) == complete(smol, **body)["content"]


@pytest.mark.parametrize("n_predict", [60, 3])
def test_held_back_text_is_released_at_the_end(tiny: ServerProcess, n_predict: int) -> None:
    body = {"prompt": "x", "grammar": 'root ::= "one two three"', "stop": ["three\nEND", "one two three four"]}
    plain = complete(tiny, **body, n_predict=n_predict)
    if n_predict == 60:
        assert plain["content"] == "one two three"
    assert joined(streamed(tiny, **body, n_predict=n_predict)) == plain["content"] != ""


def test_a_stop_string_over_several_tokens_is_found(tiny: ServerProcess) -> None:
    body = {"prompt": "x", "grammar": 'root ::= "A B C D E F G H I J"', "stop": ["F G H"], "n_predict": 60}
    for answer in (complete(tiny, **body), streamed(tiny, **body)[-1]):
        assert (answer["stop_type"], answer["stopping_word"]) == ("word", "F G H")
    assert complete(tiny, **body)["content"] == joined(streamed(tiny, **body)) == "A B C D E "


def test_a_stop_string_that_comes_first_leaves_nothing(tiny: ServerProcess) -> None:
    body = {"prompt": "x", "grammar": 'root ::= "\\n"', "stop": ["\n"], "n_probs": 5}
    plain = complete(tiny, **body)
    assert (plain["content"], plain["stop_type"]) == ("", "word")
    assert plain.get("completion_probabilities", []) == []
    events = streamed(tiny, **body)
    assert joined(events) == ""
    assert not any(event.get("completion_probabilities") for event in events)


@pytest.mark.parametrize("n_predict", [0, 1, 2])
def test_n_predict_is_exact(tiny: ServerProcess, n_predict: int) -> None:
    body = {"prompt": "Once the river", "n_predict": n_predict, "return_tokens": True, "ignore_eos": True}
    plain = complete(tiny, **body)
    events = streamed(tiny, **body)
    assert plain["tokens_predicted"] == events[-1]["tokens_predicted"] == n_predict
    assert len(plain["tokens"]) == sum(len(event["tokens"]) for event in events) == n_predict
    assert joined(events) == plain["content"]
    assert plain["tokens_evaluated"] > 1


def test_n_predict_minus_one_goes_on_to_the_end(tiny: ServerProcess) -> None:
    body = {"prompt": "x", "grammar": 'root ::= "one two three"', "n_predict": -1}
    assert complete(tiny, **body)["stop_type"] == "eos"


def test_characters_of_several_tokens_arrive_whole(tiny: ServerProcess) -> None:
    text = "é猫€😀🦊ß日"
    events = streamed(tiny, prompt="x", grammar=f'root ::= "{text}"', n_predict=60)
    assert joined(events) == text
    assert "\ufffd" not in json.dumps(events)
    assert not any("\ufffd" in event["content"] for event in events)


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_hot_nonsense_is_still_text_and_its_bytes_are_told(tiny: ServerProcess, path: str) -> None:
    def tokens_of(answer: Any) -> list[Any]:
        if path == "/completion":
            return answer.get("completion_probabilities") or []
        return (answer["choices"][0]["logprobs"] or {}).get("content") or []

    def text_of(answer: Any) -> str:
        text = answer["content"] if path == "/completion" else answer["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    texts = []
    for seed in range(12):
        hot = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "seed": seed, "cache_prompt": False}
        body = {"prompt": "Tell me about rain.", "max_tokens": 120, "logprobs": 5, "return_tokens": True, **hot}
        response = tiny.post(path, body)
        assert response.status == 200, response.text
        raw = b"".join(bytes(token["bytes"]) for token in tokens_of(response.json()))
        assert raw.decode(errors="replace") == text_of(response.json())
        with tiny.stream(path, {**body, "stream": True}) as stream:
            events = list(stream)
        assert "".join(map(text_of, events)) == text_of(response.json())
        assert b"".join(bytes(token["bytes"]) for event in events for token in tokens_of(event)) == raw
        texts.append(text_of(response.json()))
    # there was something to replace
    assert any("\ufffd" in text for text in texts)


# -- hostile values

HOSTILE: list[dict[str, Any]] = [
    {"n_discard": -5, "n_predict": 600},
    {"n_keep": -9, "n_predict": 600},
    {"n_keep": 1000000, "n_predict": 600},
    {"n_discard": 1000000, "n_predict": 600},
    {"n_keep": 250, "n_discard": 250, "n_predict": 600},
    {"n_predict": -99},
    {"n_predict": 2**31},
    {"n_predict": 10**30},
    {"n_probs": 2147483647, "n_predict": 2},
    {"n_probs": -1, "n_predict": 2},
    {"n_probs": 10, "post_sampling_probs": True, "top_k": 0, "n_predict": 2},
    {"id_slot": 99, "n_predict": 2},
    {"id_slot": -7, "n_predict": 2},
    {"seed": -1, "n_predict": 2},
    {"seed": 2**40, "n_predict": 2},
    {"top_k": -3, "n_predict": 2},
    {"repeat_last_n": 99999999, "repeat_penalty": 1.1, "n_predict": 2},
    {"dry_penalty_last_n": 99999999, "dry_multiplier": 1.0, "n_predict": 2},
    {"dry_allowed_length": -5, "dry_multiplier": 1.0, "n_predict": 2},
    {"n": 100000, "n_predict": 2},
    {"n_cmpl": 0, "n_predict": 2},
    {"n_cmpl": -1, "n_predict": 2},
    {"min_keep": -1, "n_predict": 2},
    {"min_keep": 10**9, "n_predict": 2},
    {"temperature": 1e308, "n_predict": 2},
    {"temperature": -1, "n_predict": 2},
    {"top_p": -1, "min_p": 2, "typical_p": -3, "n_predict": 2},
    {"mirostat": 99, "n_predict": 2},
    {"mirostat": 2, "mirostat_tau": -1, "mirostat_eta": 1e30, "n_predict": 2},
    {"dynatemp_range": 1e30, "n_predict": 2},
    {"xtc_probability": 2, "xtc_threshold": -1, "n_predict": 2},
    {"t_max_predict_ms": -5, "n_predict": 2},
    {"n_indent": -5, "n_predict": 2},
    {"logit_bias": [[2**31, 1.0], [5, 1e308], ["the", float("nan")]], "n_predict": 2},
    {"logit_bias": [[token, False] for token in range(1000)], "n_predict": 2},
    {"sse_ping_interval": -1, "stream": True, "n_predict": 2},
    {"stop": ["x" * 100000], "n_predict": 2},
    {"samplers": ["top_k"] * 10000, "n_predict": 2},
    {"prompt": "\ud800", "n_predict": 2},
    {"prompt": [-1], "n_predict": 2},
    {"prompt": [999999999], "n_predict": 2},
    {"prompt": [2**31], "n_predict": 2},
    {"prompt": [2**70], "n_predict": 2},
    {"prompt": [1, "x", [2]], "n_predict": 2},
    {"prompt": [[1, 2], "x"], "n_predict": 2},
    {"prompt": [1.5], "n_predict": 2},
    {"prompt": [], "n_predict": 2},
    {"prompt": [True], "n_predict": 2},
    {"prompt": {"prompt_string": "x"}, "n_predict": 2},
    {"lora": [{"id": 5, "scale": 1.0}], "n_predict": 2},
    {"grammar": "root ::= " + "(" * 60000 + '"a"' + ")" * 60000},
    {"grammar": "root ::= root"},
    {"json_schema": {"type": "string", "pattern": "^[a$"}},
]


@pytest.fixture(scope="module")
def small(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_model_path, "-c", 256, "-np", 1, "-t", 1, "--context-shift", "-v") as server:
        yield server


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_values_are_clamped_or_refused(small: ServerProcess, number: int) -> None:
    body = {"prompt": "a b c", "temperature": 0.8, "ignore_eos": True, **HOSTILE[number]}
    data = json.dumps(body).encode()
    if body.get("n_predict", 0) < 0 or body.get("n_predict", 0) > 1000:
        # without an end: it has to begin, or be refused
        with small.stream("/completion", {**body, "stream": True}) as stream:
            status = stream.status
            if status == 200:
                next(iter(stream))
            stream.hang_up()
    else:
        response = small.post("/completion", data)
        status = response.status
        assert response.body
    assert status in (200, 400)
    assert small.get("/health").status == 200
    wait_for(lambda: all_idle(small))
    assert small.post("/completion", {"prompt": "Once", "n_predict": 2}).json()["tokens_predicted"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**40]}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/tokenize", {"content": {"a": 1}}),
    ],
)
def test_hostile_tokens_are_refused(small: ServerProcess, path: str, body: Any) -> None:
    response = small.post(path, body)
    assert response.status == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert small.get("/health").status == 200


@pytest.mark.parametrize("tokens", [[-1], [999999999], [2**31], [2**70]])
def test_tokens_outside_the_vocabulary_are_refused(small: ServerProcess, tokens: list[int]) -> None:
    response = small.post("/completion", {"prompt": tokens, "n_predict": 2})
    assert response.status == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/completion", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("depth", [3000, 200000])
def test_deeply_nested_bodies_are_refused(small: ServerProcess, path: str, depth: int) -> None:
    body = b'{"prompt": "x", "content": ' + b"[" * depth + b"]" * depth + b', "tokens": []}'
    assert small.post(path, body).status == 400
    assert small.get("/health").status == 200


# -- asleep and awake


def test_an_idle_server_sleeps_although_it_is_watched_and_answers_as_before(tiny_model_path: Path) -> None:
    flags = ("-c", 2048, "-np", 2, "-t", 1, "--metrics", "--sleep-idle-seconds", 1, *EXACT)
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        body = {"prompt": "Once there was a river", "n_predict": 20}
        answer = complete(server, **body)["content"]

        def asleep() -> bool:
            assert server.get("/metrics").status == 200
            return bool(server.get("/props").json()["is_sleeping"])

        wait_for(asleep)
        assert metric(server, "tokens_predicted_total") == 20
        assert asleep()
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(lambda _: complete(server, **body)["content"], range(10)))
        assert set(answers) == {answer}
        assert "server is exiting sleeping state" in server.log
        wait_for(asleep)
