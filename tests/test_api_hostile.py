"""Any JSON value in any field gives tasks or a refusal that is the caller's to mend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
import pytest
from api_fakes import FakeIds, FakeServer, FakeVocab, server_meta, server_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamasrv.api.context import ApiContext
from llamasrv.api.decision.tasks import build_decision_tasks
from llamasrv.api.embeddings import build_embedding_tasks
from llamasrv.api.errors import ApiError
from llamasrv.api.infill import infill_prompt
from llamasrv.api.jsonio import dumps, parse
from llamasrv.api.lora import parse_lora
from llamasrv.api.rerank import build_rerank_tasks
from make_tiny_models import DECISION_TEMPLATES

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-1, 0, 1, 5, 300, 2**31, 1e300, -0.0, 0.5]),
    st.text(max_size=8),
    st.sampled_from(["", "<s>", "[mask]", "[sep]", "choice", "score", "noul", "data:image/png;base64,AAAA", "base64"]),
)
NAMES = [
    "content",
    "type",
    "text",
    "prompt_string",
    "criteria",
    "instructions",
    "true",
    "yes",
    "id",
    "scale",
    "filename",
]
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner),
    max_leaves=12,
)


def bodies(**usual: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies in which every member may be missing, as usual, or anything."""
    return st.fixed_dictionaries({}, optional={name: st.just(value) | JSON for name, value in usual.items()})


QUESTION = {"type": "choice", "instructions": "i", "criteria": {"a": None, "b": "x"}}
QUESTIONS = st.dictionaries(st.text(max_size=3), bodies(**QUESTION) | JSON, min_size=1, max_size=3)


def context(kind: str = "") -> ApiContext:
    facts: dict[str, Any] = {"n_embd_out": 8, "pooling_type": 1}
    if kind:
        template = (
            DECISION_TEMPLATES[kind].replace("[CLS]", "<s>").replace("[SEP]", "[sep]").replace("[MASK]", "[mask]")
        )
        facts.update(decision={"type": kind, "max_head_tokens": "64"}, systemone_template=template)
    vocab = Marked() if kind == "kev" else Yes()
    return ApiContext(FakeServer(server_params(embedding=True, pooling_type="rank"), server_meta(**facts), vocab))


class Yes(FakeVocab):
    """Knows the words that one kind of decision model needs."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        words = {"yes": 3, "no": 4}
        return [words[text]] if text in words else super().tokenize(text, add_special, parse_special)


class Marked(FakeVocab):
    """Knows what ends an option."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        first, *others = text.split("<|box_end|>") if parse_special else [text]
        tokens = super().tokenize(first, add_special, parse_special)
        for part in others:
            tokens += [7, *super().tokenize(part, False, parse_special)]
        return tokens


def tolerates(call: Callable[[Mapping[str, Any]], Any], body: Any, statuses: tuple[int, ...] = (400,)) -> None:
    error: ApiError | None = None
    # what arrives has been through the parser
    body = parse(orjson.dumps(body))
    try:
        call(body)
    except ApiError as caught:
        error = caught
    if error is not None:
        assert error.status in statuses, error.message
        assert error.message
        dumps(error.body())


quickly = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@quickly
@given(bodies(input="a", content="b", encoding_format="float", embd_normalize=2, dimensions=4, model="m"))
def test_embeddings(body: Any) -> None:
    tolerates(lambda data: build_embedding_tasks(context(), data, FakeIds(), True), body)
    tolerates(lambda data: build_embedding_tasks(context(), data, FakeIds(), False), body)


@quickly
@given(bodies(query="q", documents=["a", "b"], texts=["c"], top_n=1, return_text=True, model="m"))
def test_rerank(body: Any) -> None:
    tolerates(lambda data: build_rerank_tasks(context(), data, FakeIds()), body)


@quickly
@given(bodies(input_prefix="a", input_suffix="b", prompt="c", input_extra=[{"text": "x", "filename": "f"}]))
def test_infill(body: Any) -> None:
    tolerates(lambda data: infill_prompt(context(), data), body)


@quickly
@given(JSON | st.lists(bodies(id=0, scale=1.0)))
def test_adapters(body: Any) -> None:
    tolerates(parse_lora, body)


@pytest.mark.parametrize("kind", DECISION_TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.tuples(bodies(state="s", images=[], files=[], videos=[]), QUESTIONS | JSON))
def test_decisions(kind: str, body: Any) -> None:
    rest, questions = body
    of = context(kind)
    tolerates(lambda data: build_decision_tasks(of, data, FakeIds()), {**rest, "questions": questions}, (400, 501))
