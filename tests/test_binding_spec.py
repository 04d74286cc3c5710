"""Speculative decoding through the binding: drafting, verification, roll-back, and the samplers' part in it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import spec_models

from llamasrv.binding import (
    SEQ_RM_FULL,
    SEQ_RM_PART,
    SEQ_RM_RS,
    STATE_PARTIAL_ONLY,
    Batch,
    ClosedError,
    DraftRequest,
    Model,
    NativeError,
    PairedMemory,
    Params,
    Sampler,
    Speculative,
    Verified,
    VerifyRequest,
    backend_init,
    log,
    output_limits,
    sample_many,
    set_sampler,
    speculative_types,
    token_probs,
)

TEXT = "Once upon a time there was a little cat and "
GREEDY = {"temp": 0.0}
#: Tokens that repeat themselves, whatever the model would rather say; each digit has a byte token as well.
CHORUS = {
    "temp": 0.0,
    "grammar": {"type": "user", "value": 'root ::= "123456" root'},
    "logit_bias": [[token, "-inf"] for token in range(3, 259)],
}

NGRAM_TYPES = {
    "ngram-simple": ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "6"],
    "ngram-map-k": ["--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "6"],
    "ngram-map-k4v": ["--spec-ngram-map-k4v-size-n", "3", "--spec-ngram-map-k4v-size-m", "6"],
    "ngram-mod": ["--spec-ngram-mod-n-match", "2", "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "6"],
    "ngram-cache": [],
}

Probs = tuple[float, list[tuple[int, float]]]


def make_params(path: Path, *args: str) -> Params:
    """Without flash attention, whose sums depend on the size of the batch and can turn near ties around."""
    common = ["-c", "4096", "-np", "2", "-t", "1", "--no-warmup", "-lv", "0", "-fa", "off"]
    params = Params.parse(["llamasrv", "-m", str(path), *common, *args])
    backend_init(params)
    limits = params.to_dict()["speculative"]["output_limits"]
    params.set(n_outputs_max=max(2, limits["total"]), n_outputs_max_per_seq=max(1, limits["per_seq"]))
    return params


class Pair:
    """A model and its drafters."""

    def __init__(self, path: Path, *args: str) -> None:
        self.params = make_params(path, *args)
        self.model = Model.load(self.params)
        self.seq_rm_type = self.model.context.seq_rm_type()
        spec = Speculative.load(self.model, self.params)
        assert spec is not None
        self.spec = spec
        self.memory = PairedMemory(self.model.context.memory, spec.context)

    def close(self) -> None:
        self.model.close()
        self.params.close()

    def sampler(self, settings: dict[str, Any]) -> Sampler:
        return Sampler(self.model, self.params, settings)


Load = Callable[..., Pair]


@pytest.fixture
def load() -> Iterator[Load]:
    pairs: list[Pair] = []

    def make(path: Path, *args: str) -> Pair:
        pairs.append(Pair(path, *args))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def draft_args(tiny_models: dict[str, Path], *args: str) -> list[str]:
    return ["--spec-type", "draft-simple", "-md", str(tiny_models["tiny-draft"]), *args]


class Generation:
    """An engine's loop for one sequence, with drafts or without."""

    def __init__(
        self,
        pair: Pair,
        settings: dict[str, Any],
        *,
        speculate: bool = True,
        seq: int = 0,
        n_top: int = -1,
        post: bool = False,
    ) -> None:
        self.pair = pair
        self.model = pair.model
        self.spec = pair.spec if speculate else None
        self.sampler = pair.sampler(settings)
        self.temp = float(settings.get("temp", 0.0))
        self.seed = int(settings.get("seed", 1))
        self.seq, self.n_top, self.post = seq, n_top, post
        self.tokens: list[int] = []  # in the cells
        self.out: list[int] = []
        self.probs: list[Probs] = []
        self.pending: list[int] = []  # accepted, but taken out of the cells again
        self.n_steps = self.n_drafted = self.n_accepted = self.n_replays = 0

    def _decode(self, tokens: Sequence[int], all_outputs: bool) -> None:
        batch = Batch(len(tokens))
        batch.extend(tokens, len(self.tokens), self.seq, all_outputs)
        batch.set_output(len(tokens) - 1, True)
        assert self.model.context.decode(batch, 0, len(tokens), sync=True, serial=1) == 0
        if self.spec is not None:
            assert self.spec.process(batch, 0, len(tokens))
        self.tokens += tokens

    def start(self, text: str) -> None:
        self.pair.memory.seq_rm(self.seq)
        prompt = self.model.vocab.tokenize(text, True, True)
        self._decode(prompt, False)
        if self.spec is not None:
            self.spec.begin(self.seq, self.tokens, self.seed)
        self._sample(len(prompt) - 1)

    def _sample(self, index: int) -> None:
        (token,) = sample_many(self.model, [self.sampler], [index])
        if isinstance(token, NativeError):
            raise token
        self.out.append(token)
        if self.n_top >= 0:
            self.probs.append(token_probs(self.model, self.sampler, index, token, self.n_top, self.post))

    def _draft(self) -> list[int]:
        assert self.spec is not None
        pos0 = len(self.tokens)
        request = DraftRequest(self.seq, self.tokens, self.out[-1], pos0, 32, self.temp, self.seed)
        context = self.spec.context
        state = b""
        if context is not None and context.seq_rm_type == SEQ_RM_FULL:
            state = context.state_seq_get(self.seq, STATE_PARTIAL_ONLY)
        (draft,) = self.spec.draft([request])
        if context is not None:
            if state:
                assert context.state_seq_set(self.seq, state, STATE_PARTIAL_ONLY) == len(state)
            assert context.memory.seq_rm(self.seq, pos0, -1)
        self.n_drafted += len(draft)
        return draft

    def step(self) -> None:
        self.n_steps += 1
        replay = bool(self.pending)
        draft, self.pending = (self.pending, []) if replay else (self._draft() if self.spec else [], [])
        if not draft:
            self._decode([self.out[-1]], True)
            self._sample(0)
            return
        assert self.spec is not None
        context, n_before = self.model.context, len(self.tokens)
        can_part = self.pair.seq_rm_type == SEQ_RM_PART or (
            self.pair.seq_rm_type == SEQ_RM_RS and len(draft) <= context.n_rs_seq
        )
        state = b"" if can_part else context.state_seq_get(self.seq, STATE_PARTIAL_ONLY)
        draft_context = self.spec.context
        draft_state = b""
        if draft_context is not None and not can_part:
            draft_state = draft_context.state_seq_get(self.seq, STATE_PARTIAL_ONLY)
        saved = self.sampler.clone()
        self._decode([self.out[-1], *draft], True)
        request = VerifyRequest(self.sampler, self.seq, 0, draft, self.temp > 0, replay, self.n_top, self.post)
        (verified,) = self.spec.verify([request])
        if isinstance(verified, NativeError):
            raise verified
        if len(verified.tokens) <= len(draft) and not can_part:
            # back to before the draft; the accepted tokens are decoded again
            assert context.state_seq_set(self.seq, state, STATE_PARTIAL_ONLY) == len(state)
            if draft_context is not None:
                draft_context.state_seq_set(self.seq, draft_state, STATE_PARTIAL_ONLY)
            assert self.pair.memory.seq_rm(self.seq, n_before, -1)
            del self.tokens[n_before:]
            self.sampler.copy_from(saved)
            self.pending = verified.tokens
            self.n_replays += 1
            return
        if replay:
            assert verified.tokens[: len(draft)] == draft
        n_accepted = len(verified.tokens) - 1
        self.spec.accept(self.seq, n_accepted)
        self.n_accepted += n_accepted - (1 if replay and n_accepted else 0)
        del self.tokens[n_before + 1 + n_accepted :]
        assert self.pair.memory.seq_rm(self.seq, len(self.tokens), -1)
        self.out += verified.tokens
        self.probs += verified.probs

    def run(self, n: int, text: str = TEXT) -> list[int]:
        """At least ``n`` tokens unless the text ends, cut to ``n``."""
        if not self.out:
            self.start(text)
        while len(self.out) < n and not self.model.vocab.is_eog(self.out[-1]):
            self.step()
        return self.out[:n]


def plain(pair: Pair, settings: dict[str, Any], n: int, text: str = TEXT) -> list[int]:
    return Generation(pair, settings, speculate=False).run(n, text)


# greedy text is the same with and without drafts


def test_a_draft_model_does_not_change_greedy_text(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    generation = Generation(pair, GREEDY)
    assert generation.run(150) == plain(pair, GREEDY, 150)
    assert 0 < generation.n_accepted < generation.n_drafted
    assert generation.n_steps < 149


@pytest.mark.parametrize("kind", NGRAM_TYPES)
def test_ngrams_do_not_change_greedy_text(kind: str, tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", kind, *NGRAM_TYPES[kind])
    assert pair.spec.types == (kind,)
    assert pair.spec.context is None
    settings = {"temp": 0.0, "penalty_repeat": 0.7, "penalty_last_n": 64}  # likes to repeat itself
    generation = Generation(pair, settings)
    assert generation.run(100, TEXT * 6) == plain(pair, settings, 100, TEXT * 6)
    assert generation.n_drafted > 0


@pytest.mark.parametrize("kind", NGRAM_TYPES)
def test_ngrams_save_steps_on_repetitive_text(kind: str, tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", kind, *NGRAM_TYPES[kind])
    generation = Generation(pair, CHORUS)
    text = "123456" * 6  # ngram-cache learns from the prompt alone
    assert generation.run(150, text) == plain(pair, CHORUS, 150, text)
    assert generation.n_accepted > 75
    assert generation.n_steps < 75


def test_several_types_chain(tiny_models: dict[str, Path], load: Load) -> None:
    args = [*draft_args(tiny_models), "--spec-type", "draft-simple,ngram-simple", *NGRAM_TYPES["ngram-simple"]]
    pair = load(tiny_models["tiny-llama"], *args)
    assert set(pair.spec.types) == {"draft-simple", "ngram-simple"}
    assert pair.spec.n_max == 6
    generation = Generation(pair, CHORUS)
    assert generation.run(100) == plain(pair, CHORUS, 100)
    assert generation.n_accepted > 0


def test_two_sequences_in_one_call_are_as_each_alone(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    model, spec = pair.model, pair.spec
    both = [Generation(pair, GREEDY, seq=seq) for seq in (0, 1)]
    texts = [TEXT, "Tom and Nora go down to the water "]
    for generation, text in zip(both, texts, strict=True):
        generation.start(text)
    alone = [plain(pair, GREEDY, 40, text) for text in texts]
    for generation, text in zip(both, texts, strict=True):
        generation.out.clear()
        generation.tokens.clear()
        generation.sampler.reset()
        generation.start(text)

    n_long = 0
    while min(len(generation.out) for generation in both) < 40:
        requests = [DraftRequest(g.seq, g.tokens, g.out[-1], len(g.tokens), 8) for g in both]
        drafts = spec.draft(requests)
        batch = Batch(32)
        verify: list[VerifyRequest] = []
        for g, draft in zip(both, drafts, strict=True):
            assert spec.context is not None
            spec.context.memory.seq_rm(g.seq, len(g.tokens), -1)
            index = batch.extend([g.out[-1], *draft], len(g.tokens), g.seq, True)
            assert draft
            verify.append(VerifyRequest(g.sampler, g.seq, index, draft))
        assert model.context.decode(batch, 0, batch.n_tokens, sync=True, serial=1) == 0
        assert spec.process(batch, 0, batch.n_tokens)
        for g, result in zip(both, spec.verify(verify), strict=True):
            assert isinstance(result, Verified)
            spec.accept(g.seq, len(result.tokens) - 1)
            n_long += len(result.tokens) > 1
            g.tokens += [g.out[-1], *result.tokens[:-1]]
            g.out += result.tokens
            assert pair.memory.seq_rm(g.seq, len(g.tokens), -1)
    assert [g.out[:40] for g in both] == alone
    assert n_long > 0


def test_the_models_own_prediction_heads_draft(tmp_path: Path, load: Load) -> None:
    pair = load(spec_models.make_mtp(tmp_path / "mtp.gguf"), "--spec-type", "draft-mtp")
    assert pair.seq_rm_type == SEQ_RM_RS
    assert pair.model.context.n_rs_seq == 3
    assert pair.spec.context is not None
    generation = Generation(pair, GREEDY)
    assert generation.run(100) == plain(pair, GREEDY, 100)
    assert generation.n_accepted > 0
    assert generation.n_replays == 0


# memories that cannot remove single positions: checkpoint and replay


def test_a_recurrent_model_rolls_back_and_replays(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-mamba"], "--spec-type", "ngram-cache")
    assert pair.seq_rm_type == SEQ_RM_FULL
    generation = Generation(pair, GREEDY)
    assert generation.run(80, TEXT * 6) == plain(pair, GREEDY, 80, TEXT * 6)
    assert generation.n_replays > 0


def test_a_recurrent_model_keeps_whole_drafts_without_a_replay(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-mamba"], "--spec-type", "ngram-cache")
    generation = Generation(pair, CHORUS)
    assert generation.run(80, "123456" * 6) == plain(pair, CHORUS, 80, "123456" * 6)
    assert generation.n_accepted > 40
    assert generation.n_replays == 0


def test_a_replay_repeats_what_rejection_sampling_accepted(tiny_models: dict[str, Path], load: Load) -> None:
    args = draft_args(tiny_models, "--spec-draft-sampling", "probabilistic")
    pair = load(tiny_models["tiny-mamba"], *args)
    settings = {"temp": 1.5, "seed": 3}
    generation = Generation(pair, settings)  # step() compares each replay with what it repeats
    tokens = generation.run(60)
    assert generation.n_replays > 5
    assert Generation(pair, settings).run(60) == tokens


def test_a_recurrent_draft_model_serves_any_target(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", "draft-simple", "-md", str(tiny_models["tiny-mamba"]))
    assert pair.spec.context is not None
    assert pair.spec.context.seq_rm_type == SEQ_RM_FULL
    generation = Generation(pair, GREEDY)
    assert generation.run(60) == plain(pair, GREEDY, 60)
    assert generation.n_drafted > 0


# verification by rejection sampling


def test_rejection_sampling_keeps_the_targets_distribution(tiny_models: dict[str, Path], load: Load) -> None:
    """The second token of many runs: as often as its exact probability says."""
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models, "--spec-draft-sampling", "probabilistic"))
    settings = {"temp": 0.8, "top_k": 6, "samplers": ["top_k", "temperature"]}
    model, spec = pair.model, pair.spec
    assert spec.context is not None
    prompt = model.vocab.tokenize(TEXT, True, True)
    last = prompt.pop()
    batch = Batch(len(prompt))
    batch.extend(prompt, 0, 0, False)
    assert model.context.decode(batch, 0, len(prompt), sync=True, serial=1) == 0
    assert spec.process(batch, 0, len(prompt))

    counts: Counter[int] = Counter()
    n_runs, n_drafted, n_kept = 3000, 0, 0
    exact: dict[int, float] = {}
    for seed in range(n_runs):
        sampler = pair.sampler({**settings, "seed": seed})
        spec.begin(0, prompt)
        (draft,) = spec.draft([DraftRequest(0, prompt, last, len(prompt), 1, 0.8, seed)])
        spec.context.memory.seq_rm(0, len(prompt), -1)
        assert len(draft) == 1
        batch = Batch(2)
        batch.extend([last, *draft], len(prompt), 0, True)
        assert model.context.decode(batch, 0, 2, sync=True, serial=1) == 0
        (verified,) = spec.verify([VerifyRequest(sampler, 0, 0, draft, rejection=True, n_top=6, post=True)])
        assert isinstance(verified, Verified)
        counts[verified.tokens[0]] += 1
        exact = dict(verified.probs[0][1])
        n_drafted += 1
        n_kept += len(verified.tokens) > 1
        sampler.close()
        assert pair.memory.seq_rm(0, len(prompt), -1)
    assert 0 < n_kept < n_drafted
    assert math.isclose(sum(exact.values()), 1.0, abs_tol=1e-4)
    assert set(counts) <= set(exact)
    chi2 = sum((counts[token] - n_runs * p) ** 2 / (n_runs * p) for token, p in exact.items())
    assert chi2 < 20.5  # 99.9 % point for 5 degrees of freedom


def test_equal_seeds_give_equal_text(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models, "--spec-draft-sampling", "probabilistic"))
    texts = [Generation(pair, {"temp": 1.0, "seed": seed}).run(60) for seed in (5, 5, 6)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
def test_a_grammar_holds_for_accepted_drafts(how: str, tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models, "--spec-draft-sampling", how))
    for seed, (grammar, expected) in itertools.product(
        range(3),
        [
            ('root ::= "the " ("cat " | "dog ")+', None),
            ('root ::= "a" "b" "c"', "abc"),
            ("root ::= [0-9] [0-9] [0-9]", None),
            ('root ::= "the end" | "the cat"', None),
        ],
    ):
        settings = {"temp": 1.2, "seed": seed, "grammar": {"type": "user", "value": grammar}}
        tokens = Generation(pair, settings).run(30)
        text = pair.model.vocab.detokenize(tokens, False).decode()
        sampler = pair.sampler(settings)
        sampler.accept([token for token in tokens if not pair.model.vocab.is_eog(token)], True)
        if expected is not None:
            assert text == expected


def test_a_grammar_without_a_way_on_is_an_error_of_that_sampler_alone(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    biased = {"temp": 0.0, "grammar": {"type": "user", "value": 'root ::= "a" | "b"'}}
    vocab = pair.model.vocab
    biased["logit_bias"] = [[token, "-inf"] for token in range(vocab.n_tokens) if vocab.piece(token) in (b"a", b"b")]
    stuck, fine = pair.sampler(biased), pair.sampler(GREEDY)
    batch = Batch(8)
    for seq in (0, 1):
        batch.extend([5, 6, 7], 0, seq, True)
    assert pair.model.context.decode(batch, 0, batch.n_tokens, sync=True, serial=1) == 0
    requests = [VerifyRequest(stuck, 0, 0, [6, 7]), VerifyRequest(fine, 1, 3, [6, 7])]
    first, second = pair.spec.verify(requests)
    assert isinstance(first, NativeError)
    assert "grammar" in str(first)
    assert isinstance(second, Verified)
    with pytest.raises(NativeError, match="failed before"):
        stuck.accept([5], True)


# synthetic acceptance


def test_synthetic_acceptance_has_the_length_asked_for(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models, "--spec-synth-len", "2.5"))
    assert len(pair.spec.synth_probs) == pair.spec.n_max == 3
    generation = Generation(pair, {"temp": 0.0, "seed": 9})
    tokens = generation.run(600)
    assert 2.2 < 1 + generation.n_accepted / generation.n_steps < 2.8
    assert Generation(pair, {"temp": 0.0, "seed": 9}).run(600) == tokens
    assert Generation(pair, {"temp": 0.0, "seed": 10}).run(600) != tokens


def test_synthetic_acceptance_survives_a_replay(tiny_models: dict[str, Path], load: Load) -> None:
    args = ["--spec-type", "ngram-cache", "--spec-synth-rates", "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2"]
    pair = load(tiny_models["tiny-mamba"], *args)
    assert pair.spec.synth_probs[:2] == pytest.approx((0.9, 0.8 / 0.9))
    generation = Generation(pair, {"temp": 0.0, "seed": 4})
    generation.run(80, TEXT * 6)
    assert generation.n_replays > 0


# probabilities


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("n_top", [0, 3])
def test_probabilities_are_those_without_drafts(
    post: bool, n_top: int, tiny_models: dict[str, Path], load: Load
) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    settings = {"temp": 0.0, "n_probs": 3}
    with_drafts = Generation(pair, settings, n_top=n_top, post=post)
    without = Generation(pair, settings, speculate=False, n_top=n_top, post=post)
    assert with_drafts.run(60) == without.run(60)
    assert with_drafts.n_accepted > 0
    for ours, theirs in zip(with_drafts.probs[:60], without.probs, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
        assert [token for token, _ in ours[1]] == [token for token, _ in theirs[1]]
        assert [p for _, p in ours[1]] == pytest.approx([p for _, p in theirs[1]], abs=1e-3)
        if not post:
            assert 0.0 < ours[0] < 1.0
            assert len(ours[1]) == n_top


def test_probabilities_under_rejection_sampling_are_the_targets(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models, "--spec-draft-sampling", "probabilistic"))
    settings = {"temp": 1.0, "seed": 5, "n_probs": 2, "samplers": ["temperature"]}
    raw = Generation(pair, settings, n_top=2)
    after = Generation(pair, settings, n_top=2, post=True)
    assert raw.run(60) == after.run(60)
    assert raw.n_accepted > 0
    # with temperature 1 alone in the chain the two ways are one
    for ours, theirs in zip(raw.probs[:60], after.probs[:60], strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
        assert [token for token, _ in ours[1]] == [token for token, _ in theirs[1]]


# samplers


def test_a_clone_goes_on_as_its_original(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", "ngram-cache")
    settings = {"temp": 1.5, "seed": 7, "penalty_repeat": 1.3, "penalty_last_n": 32}
    generation = Generation(pair, settings, speculate=False)
    generation.run(10)
    copy = generation.sampler.clone()
    assert copy.seed == generation.sampler.seed
    batch = Batch(1)
    batch.add(generation.out[-1], len(generation.tokens), 0, True)
    assert pair.model.context.decode(batch, 0, 1, sync=True, serial=1) == 0
    ours = [sample_many(pair.model, [generation.sampler], [0])[0] for _ in range(20)]
    theirs = [sample_many(pair.model, [copy], [0])[0] for _ in range(20)]
    assert ours == theirs
    assert len(set(ours)) > 1


def test_a_copy_brings_a_sampler_back_to_an_earlier_state(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", "ngram-cache")
    grammar = {"type": "user", "value": 'root ::= "a" "b" "c" "d"'}
    generation = Generation(pair, {"temp": 0.0, "grammar": grammar}, speculate=False)
    generation.run(2)
    saved = generation.sampler.clone()
    rest = generation.run(5)[2:]
    generation.sampler.copy_from(saved)
    del generation.tokens[-3:], generation.out[2:]
    pair.memory.seq_rm(0, len(generation.tokens), -1)
    assert generation.run(5)[2:] == rest
    saved.close()
    generation.sampler.close()


def test_unrelated_samplers_cannot_be_copied(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", "ngram-cache")
    plain_sampler = pair.sampler(GREEDY)
    other = pair.sampler({"temp": 0.0, "grammar": {"type": "user", "value": 'root ::= "a"'}})
    with pytest.raises(NativeError, match="clones"):
        plain_sampler.copy_from(other)
    grandchild = other.clone().clone()
    other.copy_from(grandchild)
    with pytest.raises(ClosedError):
        closed = other.clone()
        closed.close()
        other.copy_from(closed)


def test_reasoning_can_be_ended(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", "ngram-cache")
    vocab = pair.model.vocab
    start, middle, end = (vocab.tokenize(text, False, False) for text in ("<think>", "time", "</think>"))
    settings = {
        "temp": 0.0,
        "reasoning_control": True,
        "reasoning_budget_start": start,
        "reasoning_budget_end": [end],
        "reasoning_budget_forced": end,
    }
    generation = Generation(pair, settings, speculate=False)
    generation.start(TEXT)
    assert not generation.sampler.force_reasoning_end()
    generation.sampler.accept([*start, *middle], True)
    assert generation.sampler.force_reasoning_end()
    for _ in end:
        generation._sample(len(generation.tokens) - 1)
    assert generation.out[1:] == end
    assert not pair.sampler(GREEDY).force_reasoning_end()


@pytest.mark.parametrize("settings", [GREEDY, {"temp": 0.9, "seed": 4, "top_k": 10}], ids=["greedy", "seeded"])
def test_drafts_and_sampling_in_the_graph_go_together(
    settings: dict[str, Any], tiny_models: dict[str, Path], load: Load
) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models), "-bs")
    set_sampler(pair.model, 0, None)
    expected = plain(pair, {**settings, "backend_sampling": False}, 60)
    generation = Generation(pair, {**settings, "backend_sampling": True})
    set_sampler(pair.model, 0, generation.sampler)
    assert generation.run(60) == expected
    assert generation.n_accepted > 0


# tokens of a sequence


def test_a_prompt_that_shrinks_is_no_trouble(tiny_models: dict[str, Path], load: Load) -> None:
    """After a context shift, or for the next request; ngram-map would end the process."""
    kinds = "ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache,ngram-simple"
    pair = load(tiny_models["tiny-llama"], "--spec-type", kinds, *itertools.chain(*NGRAM_TYPES.values()))
    tokens = pair.model.vocab.tokenize(TEXT * 20, True, False)
    pair.spec.begin(0, tokens)
    for n in (len(tokens), 100, 101, 60, 30, 5, 2, 0, len(tokens)):
        (draft,) = pair.spec.draft([DraftRequest(0, tokens[:n], tokens[n] if n < len(tokens) else 5, n, 8)])
        assert pair.model.vocab.validate(draft)
    shifted = tokens[:4] + tokens[40:]
    pair.spec.set_tokens(0, shifted)
    (draft,) = pair.spec.draft([DraftRequest(0, shifted, tokens[0], len(shifted), 8)])
    assert pair.model.vocab.validate(draft)


def test_drafts_come_from_the_tokens_of_their_sequence(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", "ngram-simple", *NGRAM_TYPES["ngram-simple"])
    vocab = pair.model.vocab
    texts = ("one two time water long", "down the long day now")
    first, second = (vocab.tokenize(text, False, False) for text in texts)
    assert len(set(first)) == len(first) > 4
    assert len(set(second)) == len(second) > 4
    for seq, pattern in enumerate((first, second)):
        pair.spec.begin(seq, pattern * 8)
    requests = [
        DraftRequest(seq, pattern * 8, pattern[0], len(pattern) * 8, n_max)
        for seq, pattern, n_max in ((0, first, 4), (1, second, 2))
    ]
    drafts = pair.spec.draft(requests)
    assert drafts[0] == (first * 3)[1:5]
    assert drafts[1] == (second * 3)[1:3]
    assert pair.spec.draft(requests[1:]) == drafts[1:]


def test_wrong_sequences_tokens_and_counts_are_refused(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    spec, sampler = pair.spec, pair.sampler(GREEDY)
    n_vocab = pair.model.vocab.n_tokens
    for call in (
        lambda: spec.begin(2, [1]),
        lambda: spec.begin(-1, [1]),
        lambda: spec.begin(0, [n_vocab]),
        lambda: spec.begin(0, [2**31]),
        lambda: spec.accept(0, 1),
        lambda: spec.accept(7, 0),
        lambda: spec.accept(0, -1),
        lambda: spec.draft([DraftRequest(2, [1], 1, 1, 4)]),
        lambda: spec.draft([DraftRequest(0, [1], 1, 1, 4), DraftRequest(0, [1], 1, 1, 4)]),
        lambda: spec.draft([DraftRequest(1, [1, -1], 1, 2, 4)]),
        lambda: spec.draft([DraftRequest(0, [1], 1, 1, 4)] * 3),
        lambda: spec.verify([VerifyRequest(sampler, 0, 0, [])]),
        lambda: spec.verify([VerifyRequest(sampler, 9, 0, [1])]),
        lambda: spec.state_get(5),
        lambda: spec.state_set(5, b"x"),
        lambda: spec.process(Batch(1), 0, 1),
    ):
        with pytest.raises((ValueError, NativeError)):
            call()
    errors = spec.verify([VerifyRequest(sampler, 0, index, [1]) for index in (10**6, -1)])
    assert all(isinstance(error, NativeError) for error in errors)
    (error,) = spec.verify([VerifyRequest(pair.sampler(GREEDY), 0, 0, [n_vocab])])
    assert isinstance(error, NativeError)
    assert spec.draft([DraftRequest(0, [1], 1, 1, 0)]) == [[]]
    assert spec.draft([]) == [] == spec.verify([])


def test_everything_is_closed_with_the_model(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    sampler = pair.sampler(GREEDY)
    clone = sampler.clone()
    pair.model.close()
    context = pair.spec.context
    assert context is not None
    for call in (
        lambda: pair.spec.begin(0, [1]),
        lambda: context.memory.seq_pos_max(0),
        lambda: context.state_seq_size(0),
        lambda: sampler.clone(),
        lambda: clone.force_reasoning_end(),
        lambda: pair.spec.verify([VerifyRequest(sampler, 0, 0, [1])]),
    ):
        with pytest.raises(ClosedError):
            call()


# two contexts


def test_the_draft_context_follows_the_models(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models), "--kv-unified")
    context = pair.spec.context
    assert context is not None
    target, draft = pair.model.context.memory, context.memory
    Generation(pair, GREEDY).start(TEXT)

    def ends(seq: int) -> set[tuple[int, int]]:
        return {(memory.seq_pos_min(seq), memory.seq_pos_max(seq)) for memory in (target, draft)}

    n = target.seq_pos_max(0) + 1
    assert ends(0) == {(0, n - 1)}
    pair.memory.seq_cp(0, 1, 0, 6)
    assert ends(1) == {(0, 5)}
    assert pair.memory.seq_rm(1)
    assert ends(1) == {(-1, -1)}
    assert pair.memory.seq_rm(0, 2, 4)
    pair.memory.seq_add(0, 4, -1, -2)
    assert ends(0) == {(0, n - 3)}
    pair.memory.clear()
    assert ends(0) == ends(1) == {(-1, -1)}


def test_a_recurrent_draft_context_is_emptied_where_it_cannot_follow(tiny_models: dict[str, Path], load: Load) -> None:
    args = ["--spec-type", "draft-simple", "-md", str(tiny_models["tiny-mamba"]), "--kv-unified"]
    pair = load(tiny_models["tiny-llama"], *args)
    context = pair.spec.context
    assert context is not None
    Generation(pair, GREEDY).start(TEXT)
    pair.memory.seq_cp(0, 1, 0, 4)
    assert pair.memory.seq_pos_max(1) == 3
    assert context.memory.seq_pos_max(1) == -1
    assert pair.memory.seq_rm(0, 3, -1)
    assert pair.memory.seq_pos_max(0) == 2
    assert context.memory.seq_pos_max(0) == -1


@pytest.mark.parametrize("flags", [0, STATE_PARTIAL_ONLY])
@pytest.mark.parametrize("draft", ["tiny-draft", "tiny-mamba"])
def test_a_draft_contexts_state_can_be_put_back(
    draft: str, flags: int, tiny_models: dict[str, Path], load: Load
) -> None:
    pair = load(tiny_models["tiny-llama"], "--spec-type", "draft-simple", "-md", str(tiny_models[draft]))
    context = pair.spec.context
    assert context is not None
    generation = Generation(pair, GREEDY)
    generation.start(TEXT)
    request = DraftRequest(0, generation.tokens, generation.out[-1], len(generation.tokens), 8)
    state = context.state_seq_get(0, flags)
    assert len(state) == context.state_seq_size(0, flags) > 0
    before = pair.spec.draft([request])
    if flags == 0:
        context.memory.seq_rm(0)
    assert context.state_seq_set(0, state, flags) == len(state)
    context.memory.seq_rm(0, len(generation.tokens), -1)
    assert context.memory.seq_pos_max(0) == len(generation.tokens) - 1
    assert pair.spec.draft([request]) == before != [[]]


def test_a_draft_context_that_fell_behind_catches_up(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    assert pair.spec.context is not None
    generation = Generation(pair, GREEDY)
    generation.run(20)
    pair.spec.context.memory.seq_rm(0, 8, -1)
    assert generation.run(60) == plain(pair, GREEDY, 60)
    assert generation.n_drafted > 0


def test_a_drafters_own_state_is_bytes(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    Generation(pair, GREEDY).start(TEXT)
    assert pair.spec.state_get(0) == b""
    pair.spec.state_set(0, b"of another drafter")


def test_a_stop_ends_drafting_and_processing(tiny_models: dict[str, Path], load: Load) -> None:
    pair = load(tiny_models["tiny-llama"], *draft_args(tiny_models))
    generation = Generation(pair, GREEDY)
    generation.start(TEXT)
    request = DraftRequest(0, generation.tokens, generation.out[-1], len(generation.tokens), 8)
    batch = Batch(1)
    batch.add(generation.out[-1], len(generation.tokens), 0, True)
    pair.model.context.stop()
    assert pair.spec.draft([request], serial=5) == [[]]
    assert not pair.spec.process(batch, 0, 1, serial=6)
    pair.model.context.abort(0)
    pair.model.context.abort(7)
    (draft,) = pair.spec.draft([request], serial=8)
    assert draft
    assert pair.spec.draft([request], serial=7) == [[]]
    pair.model.context.abort(0)
    assert generation.run(40) == plain(pair, GREEDY, 40)


# loading


def test_loading_the_draft_model_reports_progress(tiny_models: dict[str, Path]) -> None:
    seen: list[float] = []

    def report(progress: float) -> bool:
        seen.append(progress)
        return True

    with make_params(tiny_models["tiny-llama"], *draft_args(tiny_models)) as params, Model.load(params) as model:
        with Speculative.load(model, params, report) or pytest.fail("not loaded"):
            assert seen == sorted(seen)
            assert seen[0] == 0.0
            assert seen[-1] == 1.0
        with pytest.raises(NativeError, match="stopped"):
            Speculative.load(model, params, lambda progress: progress < 0.5)
        with pytest.raises(KeyboardInterrupt):
            Speculative.load(model, params, lambda progress: (_ for _ in ()).throw(KeyboardInterrupt))


def test_nothing_asked_for_is_nothing(tiny_models: dict[str, Path]) -> None:
    for args in ([], ["-md", str(tiny_models["tiny-draft"])]):
        with make_params(tiny_models["tiny-llama"], *args) as params, Model.load(params) as model:
            assert Speculative.load(model, params) is None


def assert_not_loaded(path: Path, args: list[str], reason: str) -> None:
    with make_params(path, *args) as params, Model.load(params) as model, pytest.raises(NativeError, match=reason):
        Speculative.load(model, params)


def test_a_missing_draft_model_is_an_error_with_the_reason(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    args = ["--spec-type", "draft-simple", "-md", str(tmp_path / "none.gguf")]
    assert_not_loaded(tiny_models["tiny-llama"], args, r"none\.gguf(?s:.*)No such file")


def test_a_model_without_prediction_heads_is_an_error(tiny_models: dict[str, Path]) -> None:
    assert_not_loaded(tiny_models["tiny-llama"], ["--spec-type", "draft-mtp"], "draft context")


@pytest.mark.parametrize(
    ("kind", "draft"),
    [
        ("draft-simple", ""),
        ("draft-simple", "tiny-bpe"),
        ("draft-eagle3", "tiny-draft"),
        ("draft-dflash", "tiny-draft"),
        ("draft-dspark", "tiny-draft"),
        ("ngram-cache", "-lcs"),
    ],
)
def test_what_does_not_fit_the_model_is_left_out(
    kind: str, draft: str, tiny_models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["--spec-type", kind, "-lv", "1"]
    if draft == "-lcs":
        args += ["-lcs", str(tmp_path / "none.bin")]
    elif draft:
        args += ["-md", str(tiny_models[draft])]
    with make_params(tiny_models["tiny-llama"], *args) as params, Model.load(params) as model:
        assert Speculative.load(model, params) is None
    log.flush()
    assert "failed to initialize speculative decoding context: " in capfd.readouterr().err
    assert_not_loaded(tiny_models["tiny-llama"], [*args, "--spec-synth-len", "2"], ".")


def test_synthetic_acceptance_needs_a_type(tiny_models: dict[str, Path]) -> None:
    assert_not_loaded(tiny_models["tiny-llama"], ["--spec-synth-len", "2"], "synthetic acceptance")


def test_types_and_limits_are_the_librarys() -> None:
    assert {"none", "draft-simple", "draft-mtp", *NGRAM_TYPES} <= set(speculative_types())
    assert output_limits(2048, 4, 0) == (4, 1)
    assert output_limits(2048, 4, 16) == (68, 17)
    assert output_limits(32, 4, 16) == (32, 17)
