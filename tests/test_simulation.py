"""The engine under random schedules: whatever comes, the invariants hold after every step."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
from fake_backend import BOS, N_VOCAB, FakeBackend, FakeSpec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation import Action, Outcome, Request, Simulation, prompt_numbers, run_alone, schedules

from llamasrv.engine.adapters import Adapters
from llamasrv.engine.backend import Backend
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.result import ErrorResult, StopType
from llamasrv.engine.server_context import ServerContext
from llamasrv.engine.task import SamplingParams

N_SLOTS = 4

#: A token that many prompts have, some of them several times.
INVOCATION = (3 + 52 % (N_VOCAB - 3),)

SPECS = {
    "unified": FakeSpec(invocation=INVOCATION, n_ctx=400, unified=True),
    "unified-small": FakeSpec(invocation=INVOCATION, n_ctx=150, unified=True),
    "split": FakeSpec(invocation=INVOCATION, n_ctx=4 * 96, unified=False),
    "window": FakeSpec(invocation=INVOCATION, n_ctx=4 * 96, unified=False, n_swa=8),
    "window-unified": FakeSpec(invocation=INVOCATION, n_ctx=400, unified=True, n_swa=8),
    "recurrent": FakeSpec(invocation=INVOCATION, n_ctx=4 * 96, unified=False, recurrent=True),
    "no-shift": FakeSpec(invocation=INVOCATION, n_ctx=4 * 80, unified=False, can_shift=False),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of the configuration that the schedules vary."""

    ctx_shift: bool = False
    cont_batching: bool = True
    cache_ram_mib: int = -1
    cache_idle_slots: bool = True
    similarity: float = 0.1
    n_ctx_checkpoints: int = 4
    checkpoint_min_step: int = 0
    n_batch: int = 64
    n_ubatch: int = 16

    def config(self, spec: FakeSpec, n_parallel: int) -> EngineConfig:
        return EngineConfig(
            n_parallel=n_parallel,
            kv_unified=spec.unified,
            cont_batching=self.cont_batching,
            ctx_shift=self.ctx_shift and spec.can_shift and not spec.recurrent,
            cache_ram_mib=self.cache_ram_mib,
            cache_idle_slots=self.cache_idle_slots and self.cache_ram_mib != 0,
            slot_prompt_similarity=self.similarity,
            n_ctx_checkpoints=self.n_ctx_checkpoints,
            checkpoint_min_step=self.checkpoint_min_step,
            lora=[0.0, 0.0, 0.0],
        )


SETTINGS = st.builds(
    Settings,
    ctx_shift=st.booleans(),
    cont_batching=st.sampled_from([True, True, False]),
    cache_ram_mib=st.sampled_from([-1, 0, 1]),
    cache_idle_slots=st.booleans(),
    similarity=st.sampled_from([0.0, 0.1, 0.5]),
    n_ctx_checkpoints=st.sampled_from([0, 1, 4]),
    checkpoint_min_step=st.sampled_from([0, 20]),
    n_batch=st.sampled_from([16, 64]),
    n_ubatch=st.sampled_from([4, 16]),
)


def alone_spec(name: str, chosen: Settings) -> FakeSpec:
    """One slot of the same size."""
    spec = SPECS[name]
    n_ctx = spec.n_ctx if spec.unified else spec.n_ctx // spec.n_seq_max
    return replace(spec, n_ctx=n_ctx, n_seq_max=1, n_batch=chosen.n_batch, n_ubatch=chosen.n_ubatch)


def ends_inside_character(text: bytes) -> bool:
    """Whether a lead byte at the end still waits for its continuation bytes."""
    wanted = {0b110: 2, 0b1110: 3, 0b11110: 4}
    for length in (1, 2, 3):
        tail = text[-length:]
        size = next((size for lead, size in wanted.items() if tail and tail[0] >> (7 - size) == lead), 0)
        if size > length == len(tail) and all(byte >> 6 == 0b10 for byte in tail[1:]):
            return True
    return False


def by_hand(spec: FakeSpec, request: Request, adapters: Adapters) -> Outcome | None:
    """What a request gives, by the plainest possible loop over the backend. None: an error, or a matter of shifting."""
    backend = FakeBackend(spec)
    tokens = [BOS] + [3 + number % (N_VOCAB - 3) for number in prompt_numbers(request)]
    if request.broken_grammar or len(tokens) >= backend.n_ctx_seq:
        return None
    sampler = backend.new_sampler(SamplingParams(temp=request.temp, seed=request.seed))
    batch = backend.new_batch(1)
    for position, token in enumerate(tokens):
        backend.set_lora(list(enumerate(adapters.at(position))))
        batch.clear()
        batch.add(token, position, 0, True)
        assert backend.decode(batch, 0, 1, True, 1) == 0
    text = b""
    n_decoded = 0
    n_held = len(tokens)
    if request.n_predict == 0:
        return Outcome(b"", 0, StopType.LIMIT, "", False, len(tokens))
    while True:
        [token] = backend.sample_many([sampler], [0])
        assert isinstance(token, int)
        n_decoded += 1
        text += backend.piece(token, False)
        stop, word = StopType.NONE, ""
        if not ends_inside_character(text):
            found = [(text.find(word.encode()), word) for word in request.stop if word.encode() in text]
            if found:
                position, word = min(found)
                text, stop = text[:position], StopType.WORD
        truncated = n_held + 1 >= backend.n_ctx_seq
        if truncated or (stop is StopType.NONE and n_decoded >= request.n_predict):
            stop = StopType.LIMIT
        if backend.is_eog(token):
            stop = StopType.EOS
        if stop is not StopType.NONE:
            return Outcome(text, n_decoded, stop, word, truncated, len(tokens))
        batch.clear()
        batch.add(token, n_held, 0, True)
        assert backend.decode(batch, 0, 1, True, 1) == 0
        n_held += 1


@lru_cache(maxsize=100_000)
def cold(
    name: str, chosen: Settings, request: Request, adapters: Adapters
) -> tuple[Outcome | None, ErrorResult | None]:
    """The request alone on a fresh engine with one slot of the same size, without any cache."""
    spec = alone_spec(name, chosen)
    expected = by_hand(spec, request, adapters)
    config = replace(chosen, cache_ram_mib=0).config(spec, n_parallel=1)
    if expected is not None and not (config.ctx_shift and expected.truncated):
        return expected, None
    # cut short by the context, or shifted: the engine's own way of that
    backend = FakeBackend(spec)
    context = ServerContext.with_backend(backend, config)
    client = run_alone(context, backend, replace(request, lora=tuple(enumerate(adapters.scales))))
    outcomes = Simulation.outcomes(client)
    return outcomes.get(0), client.error


def play(name: str, chosen: Settings, schedule: list[Action]) -> Simulation:
    with tempfile.TemporaryDirectory() as folder:
        return _play(name, chosen, schedule, Path(folder))


def _play(name: str, chosen: Settings, schedule: list[Action], folder: Path) -> Simulation:
    spec = SPECS[name]
    backend = FakeBackend(replace(spec, n_batch=chosen.n_batch, n_ubatch=chosen.n_ubatch))
    context = ServerContext.with_backend(backend, chosen.config(spec, N_SLOTS))
    simulation = Simulation(context, backend, folder)
    simulation.play(schedule)
    simulation.check_texts(lambda request, adapters: cold(name, chosen, request, adapters))
    context.close()
    return simulation


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(chosen=SETTINGS, schedule=schedules(N_SLOTS))
def test_invariants_hold_under_random_schedules(name: str, chosen: Settings, schedule: list[Action]) -> None:
    play(name, chosen, schedule)


def as_protocol(backend: FakeBackend) -> Backend:
    """For the type checker: the fake is a backend."""
    return backend
