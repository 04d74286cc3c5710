"""Embeddings, rerank, infill, adapters and decisions of a whole server over tiny models."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerError, ServerProcess

from make_tiny_models import DECISION_ENCODERS, DECISION_TEMPLATES

TEXTS = ["Tom and Nora look for water", "the sound of a long day", "who did that"]
#: Without flash attention and rounded cells, batches of other sizes give the same numbers.
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", 1, "--no-warmup")


def ok(server: ServerProcess, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status == 200, response.text
    return response.json()


def error(server: ServerProcess, path: str, body: Any) -> tuple[int, str]:
    response = server.post(path, body)
    return response.status, response.json()["error"]["message"]


def length(vector: list[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


# -- embeddings


@pytest.fixture(scope="module")
def embed(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_models["tiny-embed"], "--embeddings", "-c", 512, "-ub", 128, *EXACT) as server:
        yield server


def vectors(server: ServerProcess, **body: Any) -> list[list[float]]:
    return [entry["embedding"] for entry in ok(server, "/v1/embeddings", body)["data"]]


def test_vectors_have_unit_length_and_do_not_depend_on_company(embed: ServerProcess) -> None:
    together = vectors(embed, input=TEXTS * 4)
    alone = [vectors(embed, input=text)[0] for text in TEXTS]
    assert len(together) == 12
    for index, vector in enumerate(together):
        assert length(vector) == pytest.approx(1.0, abs=1e-5)
        assert vector == pytest.approx(alone[index % 3], abs=1e-5)
    assert length([a - b for a, b in zip(alone[0], alone[1], strict=True)]) > 0.01


def test_many_requests_at_once(embed: ServerProcess) -> None:
    expected = [vectors(embed, input=text)[0] for text in TEXTS]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda place: vectors(embed, input=[TEXTS[place % 3]] * 3), range(24)))
    for place, got in enumerate(found):
        for vector in got:
            assert vector == pytest.approx(expected[place % 3], abs=1e-5)


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_native_routes(embed: ServerProcess, path: str) -> None:
    first, second = ok(embed, path, {"content": TEXTS[:2]})
    assert (first["index"], second["index"]) == (0, 1)
    assert first["embedding"] == [pytest.approx(vectors(embed, input=TEXTS[0])[0], abs=1e-6)]


def test_base64_and_dimensions(embed: ServerProcess) -> None:
    (plain,) = vectors(embed, input=TEXTS[0])
    (encoded,) = vectors(embed, input=TEXTS[0], encoding_format="base64")
    assert list(struct.unpack(f"<{len(plain)}f", base64.b64decode(encoded))) == pytest.approx(plain, abs=1e-6)
    (short,) = vectors(embed, input=TEXTS[0], dimensions=10)
    size = length(plain[:10])
    assert short == pytest.approx([value / size for value in plain[:10]], abs=1e-5)
    status, message = error(embed, "/v1/embeddings", {"input": "x", "dimensions": len(plain) + 1})
    assert (status, message.startswith("Field 'dimensions': ")) == (400, True)


def test_usage_counts_tokens(embed: ServerProcess) -> None:
    usage = ok(embed, "/v1/embeddings", {"input": ["who did", [3, 4, 5]]})["usage"]
    # [CLS] who did [SEP]
    assert usage == {"prompt_tokens": 7, "total_tokens": 7}


def test_too_long_inputs_are_the_callers_mistake(embed: ServerProcess) -> None:
    for path in ("/v1/embeddings", "/embeddings"):
        status, message = error(embed, path, {"input": ["who", "the " * 600]})
        assert status == 400
        assert message == (
            "input 1 (602 tokens) is too large to process. increase the physical batch size (current batch size: 128)"
        )
    assert len(vectors(embed, input="the " * 126)) == 1


@pytest.mark.parametrize(
    ("body", "n_vectors"),
    [({"input": ""}, 1), ({"input": [""]}, 1), ({"input": [[1, 2]]}, 1), ({"input": ["", [7]]}, 2)],
)
def test_small_inputs_are_taken(embed: ServerProcess, body: dict[str, Any], n_vectors: int) -> None:
    assert len(vectors(embed, **body)) == n_vectors


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": {}}, {"input": "x", "encoding_format": "hex"}])
def test_other_inputs_are_refused(embed: ServerProcess, body: dict[str, Any]) -> None:
    response = embed.post("/v1/embeddings", body)
    assert response.status == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
def test_poolings(tiny_models: dict[str, Path], pooling: str) -> None:
    flags = ["-m", tiny_models["tiny-llama"], "--embeddings", "--pooling", pooling, "-c", 1024, "-np", 2, "-ub", 32]
    with ServerProcess(*flags, *EXACT) as server:
        text = "Once there was a river"
        tokens = ok(server, "/tokenize", {"content": text, "add_special": True})["tokens"]
        (native,) = ok(server, "/embeddings", {"input": text})
        assert len(native["embedding"]) == (len(tokens) if pooling == "none" else 1)
        # a causal model sees the same whether its prompt comes in one piece or in several, if only the end counts
        long = " the" * 100
        if pooling == "last":
            assert length(vectors(server, input=long)[0]) == pytest.approx(1.0, abs=1e-5)
        else:
            status, message = error(server, "/embeddings", {"input": long})
            assert (status, message.startswith("input 0 (")) == (400, True)
        if pooling == "none":
            assert any(length(vector) != pytest.approx(1.0, abs=1e-3) for vector in native["embedding"])
            status, message = error(server, "/v1/embeddings", {"input": text})
            assert (status, message) == (
                400,
                "Pooling type 'none' is not OAI compatible. Please use a different pooling type",
            )


def test_the_norm_of_the_command_line_and_of_the_request(tiny_models: dict[str, Path]) -> None:
    flags = ["-m", tiny_models["tiny-embed"], "--embeddings", "--embd-normalize", 1, "-c", 512]
    with ServerProcess(*flags, *EXACT) as server:
        assert sum(map(abs, vectors(server, input=TEXTS[0])[0])) == pytest.approx(1.0, abs=1e-5)
        ((largest,),) = [entry["embedding"] for entry in ok(server, "/embedding", {"input": "x", "embd_normalize": 0})]
        assert max(map(abs, largest)) == pytest.approx(32760, rel=1e-5)
        ((raw,),) = [entry["embedding"] for entry in ok(server, "/embedding", {"input": "x", "embd_normalize": -1})]
        assert [value / length(raw) for value in raw] == pytest.approx(
            vectors(server, input="x", embd_normalize=2)[0], abs=1e-5
        )


def test_a_server_for_text_says_what_it_is_not_for(tiny_models: dict[str, Path]) -> None:
    with ServerProcess("-m", tiny_models["tiny-llama"], "-c", 256, "-np", 1, *EXACT) as server:
        assert error(server, "/v1/embeddings", {"input": "x"}) == (
            501,
            "This server does not support embeddings. Start it with `--embeddings`",
        )
        assert error(server, "/v1/rerank", {"query": "x", "documents": ["x"]}) == (
            501,
            "This server does not support reranking. Start it with `--reranking`",
        )
        assert error(server, "/v1/systemone", {}) == (501, "This model is not a decision model")
        status, message = error(server, "/infill", {"input_prefix": "a", "input_suffix": "b"})
        assert (status, message.startswith("Infill is not supported by this model: prefix token is missing. ")) == (
            501,
            True,
        )
        assert server.get("/lora-adapters").json() == []


# -- rerank


@pytest.fixture(scope="module")
def rank(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_models["tiny-rerank"], "--reranking", "-c", 512, "-ub", 128, *EXACT) as server:
        yield server


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_documents_are_sorted_by_score(rank: ServerProcess, path: str) -> None:
    answer = ok(rank, path, {"query": "who was Tom", "documents": TEXTS, "model": "m"})
    results = answer["results"]
    scores = [entry["relevance_score"] for entry in results]
    assert sorted(entry["index"] for entry in results) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 3
    assert answer["model"] == "m"
    # a document is rated the same alone
    for entry in results:
        (alone,) = ok(rank, path, {"query": "who was Tom", "documents": [TEXTS[entry["index"]]]})["results"]
        assert alone["relevance_score"] == pytest.approx(entry["relevance_score"], abs=1e-4)


def test_teis_dialect(rank: ServerProcess) -> None:
    jina = ok(rank, "/rerank", {"query": "who", "documents": TEXTS})["results"]
    tei = ok(rank, "/rerank", {"query": "who", "texts": TEXTS, "return_text": True, "top_n": 2})
    assert [entry["index"] for entry in tei] == [entry["index"] for entry in jina[:2]]
    assert [entry["text"] for entry in tei] == [TEXTS[entry["index"]] for entry in tei]
    assert [entry["score"] for entry in tei] == pytest.approx([entry["relevance_score"] for entry in jina[:2]])


def test_too_long_documents_are_the_callers_mistake(rank: ServerProcess) -> None:
    status, message = error(rank, "/rerank", {"query": "who", "documents": ["who", "the " * 600]})
    assert status == 400
    assert message.startswith("document 1 (603 tokens) is too large to process.")


# -- infill


@pytest.fixture(scope="module")
def fill(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_models["tiny-bpe"], "-c", 1024, "-np", 2, "-b", 256, *EXACT) as server:
        yield server


GAP = {"input_prefix": "def f(x):\n    ", "input_suffix": "\n", "prompt": "return x", "n_predict": 4, "temperature": 0}
BOS = "<|endoftext|>"


def evaluated(server: ServerProcess, **changed: Any) -> str:
    text: str = ok(server, "/infill", {**GAP, **changed})["prompt"]
    return text


def test_the_prompt_goes_before_the_gap_next_to_the_prefix(fill: ServerProcess) -> None:
    head = "<|test_fim_rep|>myproject\n<|test_fim_sep|>filename\n"
    gap = "<|test_fim_pre|>def f(x):\n    return x<|test_fim_suf|>\n<|test_fim_mid|>"
    assert evaluated(fill) == head + BOS + gap
    assert evaluated(fill, prompt=None) == head + BOS + gap.replace("return x", "")
    assert evaluated(fill, input_extra=[]) == head + BOS + gap
    extra = [{"filename": "a.py", "text": "x = 1\n"}]
    assert evaluated(fill, input_extra=extra) == (
        "<|test_fim_rep|>myproject\n<|test_fim_sep|>a.py\nx = 1\n<|test_fim_sep|>filename\n" + BOS + gap
    )


def test_the_other_order(tiny_models: dict[str, Path]) -> None:
    with ServerProcess("-m", tiny_models["tiny-bpe"], "-c", 1024, "-np", 1, "--spm-infill", *EXACT) as server:
        assert evaluated(server).endswith(
            BOS + "<|test_fim_suf|>\n<|test_fim_pre|>def f(x):\n    return x<|test_fim_mid|>"
        )


def test_more_context_than_there_is_room_for_is_cut(fill: ServerProcess) -> None:
    answer = ok(fill, "/infill", {**GAP, "input_extra": [{"text": "the sound of water " * 400}]})
    assert answer["tokens_evaluated"] + 4 < 512
    assert answer["prompt"].count(BOS) == 1
    assert answer["prompt"].endswith("<|test_fim_mid|>")
    # what must stand before the cursor cannot be cut
    response = fill.post("/infill", {**GAP, "prompt": "the sound of water " * 400})
    assert response.status == 400
    body = response.json()["error"]
    assert body["type"] == "exceed_context_size_error"
    assert (body["n_ctx"], body["n_prompt_tokens"] > 512) == (512, True)


def test_a_fill_can_be_streamed(fill: ServerProcess) -> None:
    whole = ok(fill, "/infill", GAP)
    with fill.stream("/infill", {**GAP, "stream": True}) as stream:
        events = list(stream)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["stop"] is True
    # too long in a stream: an answer with its status, not a stream
    with fill.stream("/infill", {**GAP, "prompt": "the sound of water " * 400, "stream": True}) as stream:
        assert stream.status == 400


@pytest.mark.parametrize("missing", ["input_prefix", "input_suffix"])
def test_parts_that_are_missing_are_named(fill: ServerProcess, missing: str) -> None:
    body = {name: value for name, value in GAP.items() if name != missing}
    assert error(fill, "/infill", body) == (400, f'"{missing}" is required')


# -- adapters


def adapters(tiny_models: dict[str, Path], *names: str) -> str:
    return ",".join(str(tiny_models[name]) for name in names)


def complete(server: ServerProcess, prompt: Any = "Once", **body: Any) -> Any:
    return ok(server, "/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0, **body})


def test_adapters_that_are_loaded_but_not_applied(tiny_models: dict[str, Path]) -> None:
    model = ["-m", tiny_models["tiny-llama"], "-c", 512, "-np", 2]
    with ServerProcess(*model, *EXACT) as server:
        bare = complete(server)["content"]
    flags = ["--lora", adapters(tiny_models, "tiny-lora-a", "tiny-lora-b")]
    with ServerProcess(*model, *flags, "--lora-init-without-apply", *EXACT) as server:
        assert [entry["scale"] for entry in server.get("/lora-adapters").json()] == [0.0, 0.0]
        assert complete(server)["content"] == bare
        assert ok(server, "/lora-adapters", [{"id": 0, "scale": 1.0}]) == {"success": True}
        assert [entry["scale"] for entry in server.get("/lora-adapters").json()] == [1.0, 0.0]
        under_a = complete(server)["content"]
        assert under_a != bare
        assert complete(server, lora=[])["content"] == bare
        # adapters left out are off
        under_b = complete(server, lora=[{"id": 1, "scale": 1.0}])["content"]
        assert under_b not in (bare, under_a)
        assert complete(server)["content"] == under_a
        assert ok(server, "/lora-adapters", []) == {"success": True}
        assert complete(server)["content"] == bare
        assert error(server, "/lora-adapters", {}) == (400, "Request body must be an array")


def test_the_list_of_adapters(tiny_models: dict[str, Path]) -> None:
    flags = ["--lora-scaled", f"{tiny_models['tiny-lora-a']}:0.25", "--lora", str(tiny_models["tiny-alora"])]
    with ServerProcess("-m", tiny_models["tiny-llama"], "-c", 256, "-np", 1, *flags, *EXACT) as server:
        plain, invoked = server.get("/lora-adapters").json()
        assert plain == {
            "id": 0,
            "path": str(tiny_models["tiny-lora-a"]),
            "scale": 0.25,
            "task_name": "",
            "prompt_prefix": "",
        }
        assert invoked["alora_invocation_string"] == " Once Tom"
        assert len(invoked["alora_invocation_tokens"]) == 2


def test_requests_under_different_adapters_at_once(tiny_models: dict[str, Path]) -> None:
    flags = ["--lora", adapters(tiny_models, "tiny-lora-a", "tiny-lora-b", "tiny-alora"), "--lora-init-without-apply"]
    chosen = [
        [],
        [{"id": 0, "scale": 1.0}],
        [{"id": 1, "scale": 1.0}],
        [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.5}],
        [{"id": 2, "scale": 1.0}],
    ]
    prompts = ["The river and the stone. Once Tom had seen it he", "The river and the stone. Once Nora had"]
    with ServerProcess("-m", tiny_models["tiny-llama"], "-c", 4096, "-np", 4, *flags, *EXACT) as server:
        requests = [(prompt, lora) for prompt in prompts for lora in chosen]
        expected = [complete(server, prompt, lora=lora, cache_prompt=False)["content"] for prompt, lora in requests]
        assert len(set(expected[:5])) == 5
        # without the invocation the last one is the bare model
        assert expected[9] == expected[5]
        with ThreadPoolExecutor(10) as pool:
            found = pool.map(lambda request: complete(server, request[0], lora=request[1])["content"], requests * 3)
        assert list(found) == expected * 3


def test_an_alora_shares_the_beginning_with_the_bare_model(tiny_models: dict[str, Path]) -> None:
    flags = ["--lora", adapters(tiny_models, "tiny-alora"), "--lora-init-without-apply", "--cache-ram", 0]
    before = "The river and the stone and what each other said of them all. "
    prompt = before + "Once Tom had seen it he"
    on = [{"id": 0, "scale": 1.0}]
    with ServerProcess("-m", tiny_models["tiny-llama"], "-c", 1024, "-np", 1, *flags, *EXACT) as server:
        cold = complete(server, prompt, lora=on, cache_prompt=False)["content"]
        complete(server, prompt, lora=[])
        tokens = ok(server, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
        invocation = server.get("/lora-adapters").json()[0]["alora_invocation_tokens"]
        start = next(i for i in range(len(tokens)) if tokens[i : i + 2] == invocation)
        warm = complete(server, prompt, lora=on)
        assert warm["content"] == cold
        assert warm["timings"]["cache_n"] == start - 1
        assert complete(server, prompt, lora=on)["timings"]["cache_n"] == len(tokens) - 1


# -- decisions

STATE = {"ticket": "Tom was asked twice and nobody came", "n": [1, 2.5, None]}
QUESTIONS: dict[str, Any] = {
    "route": {
        "type": "choice",
        "instructions": "Who is it for?",
        "criteria": {"water": "wells and rivers", "stone": None, "sound": ["a", {"b": 1}]},
    },
    "urgency": {"type": "score", "instructions": "How soon?", "criteria": ["can wait", "this week", "now"]},
    "angry": {"type": "noul", "instructions": {"ask": "Is he angry?"}},
}


@pytest.mark.parametrize("kind", DECISION_TEMPLATES)
def test_every_kind_of_decision_model_answers_every_type_of_question(tiny_models: dict[str, Path], kind: str) -> None:
    flags = ["-m", tiny_models[f"tiny-{kind}"], "-c", 4096, "-np", 3, "--metrics", *EXACT]
    with ServerProcess(*flags) as server:
        answer = ok(server, "/v1/systemone", {"state": STATE, "questions": QUESTIONS})
        again = ok(server, "/v1/systemone", {"state": STATE, "questions": QUESTIONS})
        alone = ok(server, "/v1/systemone", {"state": STATE, "questions": {"route": QUESTIONS["route"]}})
        (entry,) = server.get("/v1/models").json()["data"]
    assert entry["architecture"]["output_modalities"] == ["decisions"]
    assert answer["usage"]["output_tokens"] == 0
    assert list(answer["answers"]) == ["route", "urgency", "angry"]
    route, urgency, angry = answer["answers"].values()
    assert sorted(route["probabilities"]) == ["sound", "stone", "water"]
    assert sum(route["probabilities"].values()) == pytest.approx(1.0)
    assert route["choice"] == max(route["probabilities"], key=route["probabilities"].get)
    assert urgency["legend"] == {"0": "can wait", "1": "this week", "2": "now"}
    mean = sum(level * p for level, p in enumerate(urgency["probabilities"].values()))
    assert urgency["score"] == pytest.approx(mean)
    assert 0.0 <= angry["noul"] <= 1.0
    for got in (again, alone):
        assert got["answers"]["route"]["choice"] == route["choice"] or kind in ("clef", "nimble")
    # from the cache or computed anew
    assert again["answers"]["route"]["probabilities"] == pytest.approx(route["probabilities"], abs=1e-3)
    assert again["answers"]["angry"]["noul"] == pytest.approx(angry["noul"], abs=1e-3)
    if kind not in ("clef", "nimble"):
        # an answer does not depend on the other questions
        assert alone["answers"]["route"]["probabilities"] == pytest.approx(route["probabilities"], abs=1e-3)


def test_questions_share_their_beginning(tiny_models: dict[str, Path]) -> None:
    def run(n_slots: int) -> tuple[Any, dict[str, float]]:
        flags = ["-m", tiny_models["tiny-openjev"], "-c", 4096, "-np", n_slots, "--metrics", *EXACT]
        with ServerProcess(*flags) as server:
            answer = ok(server, "/v1/systemone", {"state": STATE, "questions": QUESTIONS})
            lines = [line.split() for line in server.get("/metrics").text.splitlines() if line.startswith("llamacpp:")]
            return answer, {name: float(value) for name, value in lines}

    shared, counts = run(3)
    n_cached = counts["llamacpp:prompt_tokens_cached_total"]
    assert n_cached > 0
    assert n_cached % 2 == 0
    assert counts["llamacpp:prompt_tokens_total"] + n_cached == shared["usage"]["input_tokens"]
    single, _ = run(1)
    assert single["usage"] == shared["usage"]
    for name in ("route", "urgency"):
        expected = shared["answers"][name]["probabilities"]
        assert single["answers"][name]["probabilities"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in DECISION_TEMPLATES if kind != "clef"])
def test_many_decisions_at_once(tiny_models: dict[str, Path], kind: str) -> None:
    states = ["Tom", "Nora and the river", {"k": ["a", "b"]}, "he said that " * 10]
    with ServerProcess("-m", tiny_models[f"tiny-{kind}"], "-c", 4096, "-np", 4, *EXACT) as server:

        def decide(state: Any) -> list[float]:
            answers = ok(server, "/v1/systemone", {"state": state, "questions": QUESTIONS})["answers"]
            return [*answers["route"]["probabilities"].values(), answers["urgency"]["score"], answers["angry"]["noul"]]

        expected = [decide(state) for state in states]
        with ThreadPoolExecutor(8) as pool:
            for place, got in enumerate(pool.map(decide, states * 4)):
                assert got == pytest.approx(expected[place % 4], abs=2e-3)


@pytest.mark.parametrize("kind", sorted(DECISION_ENCODERS))
def test_a_prompt_in_one_piece_has_to_fit(tiny_models: dict[str, Path], kind: str) -> None:
    with ServerProcess("-m", tiny_models[f"tiny-{kind}"], "-c", 512, "-np", 2, "-ub", 64, *EXACT) as server:
        status, message = error(server, "/v1/systemone", {"state": "the " * 200, "questions": QUESTIONS})
        assert status == 400
        assert "is too large to process. increase the physical batch size (current batch size: 64)" in message


def test_a_question_that_exceeds_the_batch_is_refused(tiny_models: dict[str, Path]) -> None:
    with ServerProcess("-m", tiny_models["tiny-kev"], "-c", 2048, "-np", 2, "-ub", 64, *EXACT) as server:
        asked = {"q": {"type": "choice", "instructions": "i", "criteria": {"a": "the " * 100, "b": "of"}}}
        # the ends of the options are close together, the rest may be long
        ok(server, "/v1/systemone", {"state": "the " * 200, "questions": asked})
        asked["q"]["criteria"] = {"a": "of", "b": "the " * 100}
        status, message = error(server, "/v1/systemone", {"state": "s", "questions": asked})
        assert status == 400
        assert message.startswith("the question and its options (")


def test_mistakes_and_media_are_refused(tiny_models: dict[str, Path]) -> None:
    with ServerProcess("-m", tiny_models["tiny-openjev"], "-c", 1024, "-np", 2, *EXACT) as server:
        assert error(server, "/v1/systemone", {"questions": QUESTIONS}) == (400, '"state" must be provided')
        assert error(server, "/v1/systemone", {"state": "s", "questions": {}}) == (
            400,
            '"questions" must be a non-empty object',
        )
        image = "data:image/png;base64,AAAA"
        status, message = error(server, "/v1/systemone", {"state": "s", "questions": QUESTIONS, "images": [image]})
        assert (status, message.startswith("This server does not support image input for decisions.")) == (501, True)
        status, _ = error(server, "/v1/systemone", {"state": "s", "questions": QUESTIONS, "images": ["http://x"]})
        assert status == 400


def test_an_incomplete_decision_model_does_not_start(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    data = tiny_models["tiny-openjev"].read_bytes()
    assert data.count(b"openjev") >= 2
    # the type is the last text of that length in the metadata
    place = data.index(b"decision.type") + len(b"decision.type") + 4 + 8
    assert data[place : place + 7] == b"openjev"
    broken.write_bytes(data[:place] + b"unknown" + data[place + 7 :])
    server = ServerProcess("-m", broken, "-c", 256, "-np", 1, *EXACT)
    with pytest.raises(ServerError, match="failed to init decision model: unsupported decision model type: unknown"):
        server.start()
    assert server.process.returncode == 1
