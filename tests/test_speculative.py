"""Speculative decoding end to end: the same texts, told truthfully."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from talk import EXACT, complete, joined, metric, streamed

FLAGS = ("-c", 2048, "-np", 2, "-t", 1, "--metrics", *EXACT)
REPEATED = "the river and the stone and the river and the stone and the river and the"
PROMPTS = ("Once upon a time", REPEATED, "Tom")


@pytest.fixture(scope="module")
def plain(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_model_path, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module", params=["draft-simple", "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache"])
def speculating(
    request: pytest.FixtureRequest, tiny_model_path: Path, tiny_models: dict[str, Path]
) -> Iterator[ServerProcess]:
    draft = ("-md", tiny_models["tiny-draft"]) if request.param == "draft-simple" else ()
    with ServerProcess("-m", tiny_model_path, *FLAGS, "--spec-type", request.param, *draft) as server:
        yield server


def probabilities(answer: Any) -> list[tuple[int, float, list[int]]]:
    return [
        (entry["id"], entry["logprob"], [top["id"] for top in entry["top_logprobs"]])
        for entry in answer["completion_probabilities"]
    ]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_and_probabilities_are_those_without_drafts(
    plain: ServerProcess, speculating: ServerProcess, prompt: str
) -> None:
    body = {"prompt": prompt, "n_predict": 60, "n_probs": 3}
    expected, got = complete(plain, **body), complete(speculating, **body)
    assert got["content"] == expected["content"]
    assert (got["stop_type"], got["tokens_predicted"]) == (expected["stop_type"], expected["tokens_predicted"])
    for (id_a, prob_a, top_a), (id_b, prob_b, top_b) in zip(probabilities(expected), probabilities(got), strict=True):
        assert (id_a, top_a) == (id_b, top_b)
        assert prob_a == pytest.approx(prob_b, abs=1e-2)


@pytest.mark.parametrize("body", [{"stop": ["e"]}, {"n_predict": 1}, {"n_predict": 7}, {"ignore_eos": True}])
def test_ends_are_those_without_drafts(plain: ServerProcess, speculating: ServerProcess, body: dict[str, Any]) -> None:
    body = {"prompt": REPEATED, "n_predict": 40, **body}
    expected = complete(plain, **body)
    assert joined(streamed(speculating, **body)) == expected["content"]
    got = complete(speculating, **body)
    assert got["content"] == expected["content"]
    assert (got["stop_type"], got["tokens_predicted"]) == (expected["stop_type"], expected["tokens_predicted"])


def test_a_grammar_holds_under_drafts(plain: ServerProcess, speculating: ServerProcess) -> None:
    body = {"prompt": REPEATED, "n_predict": 40, "grammar": 'root ::= ("ab" | "cd")+ "."'}
    assert complete(speculating, **body)["content"] == complete(plain, **body)["content"]


def test_drafts_are_counted(tiny_model_path: Path, tiny_models: dict[str, Path]) -> None:
    flags = (*FLAGS, "--spec-type", "draft-simple", "-md", tiny_models["tiny-draft"])
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        timings = complete(server, prompt=REPEATED, n_predict=40, ignore_eos=True)["timings"]
        assert timings["draft_n"] > 0
        assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
        assert metric(server, "spec_decode_num_draft_tokens_total") == timings["draft_n"]
        assert metric(server, "spec_decode_num_accepted_tokens_total") == timings["draft_n_accepted"]
        assert all(slot["speculative"] for slot in server.get("/slots").json())


def test_a_state_that_cannot_go_back_is_restored_and_replayed(
    tiny_models: dict[str, Path],
) -> None:
    model = tiny_models["tiny-mamba"]
    with ServerProcess("-m", model, *FLAGS) as plain:
        expected = [complete(plain, prompt=prompt, n_predict=60)["content"] for prompt in PROMPTS]
    with ServerProcess("-m", model, *FLAGS, "--spec-type", "ngram-simple") as server:
        assert [complete(server, prompt=prompt, n_predict=60)["content"] for prompt in PROMPTS] == expected


def test_a_shifted_context_goes_on_under_drafts(tiny_model_path: Path, tiny_models: dict[str, Path]) -> None:
    flags = ("-c", 256, "-np", 1, "-t", 1, "--context-shift", "--spec-type", "draft-simple")
    with ServerProcess("-m", tiny_model_path, *flags, "-md", tiny_models["tiny-draft"]) as server:
        answer = complete(server, prompt="Once", n_predict=500, ignore_eos=True)
        assert (answer["truncated"], answer["tokens_predicted"]) == (True, 500)


def test_synthetic_acceptance_draws_from_the_given_rate(tiny_model_path: Path, tiny_models: dict[str, Path]) -> None:
    flags = (*FLAGS, "--spec-type", "draft-simple", "-md", tiny_models["tiny-draft"], "--spec-synth-len", 2)
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        timings = complete(server, prompt=REPEATED, n_predict=100, ignore_eos=True, seed=1)["timings"]
        assert 0 < timings["draft_n_accepted"] < timings["draft_n"]
