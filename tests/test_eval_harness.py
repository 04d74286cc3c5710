"""lm-evaluation-harness as a client of ``/v1/completions``; runs where it is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from server_process import ServerProcess

pytest.importorskip("lm_eval")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Question, right answer, wrong answers: what a small model knows.
QUESTIONS = [
    ("The capital of France is", "Paris", ["banana", "Tuesday"]),
    ("Two plus two equals", "four", ["purple", "elephant"]),
    ("The opposite of hot is", "cold", ["seven", "bicycle"]),
    ("The color of grass is", "green", ["Wednesday", "hammer"]),
    ("Once upon a", "time", ["iron", "seventeen"]),
]


@pytest.fixture(scope="module")
def url(demo_model_path: Path) -> Iterator[str]:
    with ServerProcess("-m", demo_model_path, "-c", 4096, "-np", 4, "-t", 2, "--no-warmup") as server:
        yield f"http://127.0.0.1:{server.port}"


class Tokenizer:
    """The server's own tokenizer, in the shape of tiktoken's."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.eot_token = self.encode("<|im_end|>")[0]

    def encode(self, text: str) -> list[int]:
        answer = requests.post(f"{self.url}/tokenize", json={"content": text, "parse_special": True}, timeout=60)
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        answer = requests.post(f"{self.url}/detokenize", json={"tokens": tokens}, timeout=60)
        text: str = answer.json()["content"]
        return text


def harness(url: str, **settings: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lm = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="any", tokenizer_backend="none", max_retries=1, **settings
    )
    lm.tokenizer_backend = "tiktoken"
    lm.tokenizer = Tokenizer(url)
    lm.tokenized_requests = True
    return lm


@pytest.mark.parametrize(("batch_size", "num_concurrent"), [(1, 1), (5, 1), (1, 4)])
def test_right_answers_are_likelier(url: str, tmp_path: Path, batch_size: int, num_concurrent: int) -> None:
    import lm_eval

    data = tmp_path / "questions.jsonl"
    rows = [{"q": q, "choices": [right, *wrong]} for q, right, wrong in QUESTIONS]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    lm = harness(url, batch_size=batch_size, num_concurrent=num_concurrent)
    found = lm_eval.simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0)
    assert found["results"]["questions"]["acc,none"] == 1.0


def test_log_likelihood_of_a_text_is_the_sum_over_its_tokens(url: str) -> None:
    """What the harness reads from ``echo`` agrees with generating the same tokens one by one."""
    from lm_eval.api.instance import Instance

    context, wanted = "The capital of France is", " Paris"
    instance = Instance("loglikelihood", {}, (context, wanted), 0)
    [(total, greedy)] = harness(url).loglikelihood([instance])
    body = {"prompt": context, "n_predict": 1, "temperature": 0, "n_probs": 1}
    step = requests.post(f"{url}/completion", json=body, timeout=60).json()
    [best] = step["completion_probabilities"]
    assert step["content"] == wanted
    assert greedy
    assert total == pytest.approx(best["logprob"], abs=0.05)
