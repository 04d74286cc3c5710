"""The engine under random schedules: whatever comes, the invariants hold after every step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
from fake_backend import BOS, N_VOCAB, POOLING_MEAN, POOLING_NONE, POOLING_RANK, FakeBackend, FakeSpec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from simulation import (
    STOPS,
    Action,
    Client,
    Kinds,
    Outcome,
    Request,
    SetLora,
    Simulation,
    Steps,
    Submit,
    Terminate,
    describe,
    minimise,
    prompt_numbers,
    run_alone,
    schedules,
)

from llamasrv.binding import Params, backend_init
from llamasrv.engine.adapters import Adapters
from llamasrv.engine.backend import Backend
from llamasrv.engine.chunk_budget import ChunkBudget
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.native import NativeBackend
from llamasrv.engine.result import EmbeddingResult, ErrorResult, RerankResult, StopType
from llamasrv.engine.server_context import ServerContext
from llamasrv.engine.task import SamplingParams, TaskType

#: Schedules per test; more make a longer search.
N_EXAMPLES = int(os.environ.get("LLAMASRV_SIMULATION_EXAMPLES", "60"))
N_SLOTS = 4

#: A token that many prompts have, some of them several times.
INVOCATION = (3 + 52 % (N_VOCAB - 3),)

TEXT_SPECS = {
    "unified": FakeSpec(invocation=INVOCATION, n_ctx=400, unified=True),
    "unified-small": FakeSpec(invocation=INVOCATION, n_ctx=150, unified=True),
    "split": FakeSpec(invocation=INVOCATION, n_ctx=4 * 96, unified=False),
    "unified-capped": FakeSpec(invocation=INVOCATION, n_ctx=400, unified=True),
    "window": FakeSpec(invocation=INVOCATION, n_ctx=4 * 96, unified=False, n_swa=8),
    "window-unified": FakeSpec(invocation=INVOCATION, n_ctx=400, unified=True, n_swa=8),
    "recurrent": FakeSpec(invocation=INVOCATION, n_ctx=4 * 96, unified=False, recurrent=True),
    "no-shift": FakeSpec(invocation=INVOCATION, n_ctx=4 * 80, unified=False, can_shift=False),
}
#: Spec -> most tokens in one slot: sequences that share cells then reach the end of their context.
CAPS = {"unified-capped": 80}
#: With vectors instead of text, or beside it.
POOLING_SPECS = {
    "encoder": FakeSpec(has_memory=False, n_batch=64, n_ubatch=64, pooling_type=POOLING_MEAN),
    "encoder, no pooling": FakeSpec(has_memory=False, n_batch=64, n_ubatch=64, pooling_type=POOLING_NONE),
    "reranker": FakeSpec(has_memory=False, n_batch=64, n_ubatch=64, pooling_type=POOLING_RANK),
    "decoder": FakeSpec(n_ctx=400, n_batch=64, n_ubatch=64, pooling_type=POOLING_MEAN),
    "decoder, no pooling": FakeSpec(n_ctx=400, n_batch=64, n_ubatch=64, pooling_type=POOLING_NONE),
}
SPECS = {**TEXT_SPECS, **POOLING_SPECS}


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
    share_prefix: bool = True
    n_batch: int = 64
    n_ubatch: int = 16
    #: Prompt tokens in a step that also generates; None: as many as fit.
    chunk: int | None = None

    def config(self, spec: FakeSpec, n_parallel: int, cap: int = 0) -> EngineConfig:
        return EngineConfig(
            n_parallel=n_parallel,
            kv_unified=spec.unified,
            kv_unified_per_slot=cap,
            cont_batching=self.cont_batching,
            ctx_shift=self.ctx_shift and spec.can_shift and not spec.recurrent and spec.has_memory,
            cache_ram_mib=self.cache_ram_mib,
            cache_idle_slots=self.cache_idle_slots and self.cache_ram_mib != 0,
            slot_prompt_similarity=self.similarity,
            n_ctx_checkpoints=self.n_ctx_checkpoints,
            checkpoint_min_step=self.checkpoint_min_step,
            share_prefix=self.share_prefix,
            stream_gap_ms=0,
            lora=[0.0] * (spec.n_adapters + bool(spec.invocation)),
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
    share_prefix=st.sampled_from([True, True, False]),
    n_batch=st.sampled_from([16, 64]),
    n_ubatch=st.sampled_from([4, 16]),
    chunk=st.sampled_from([None, None, 1, 5]),
)


class FixedBudget(ChunkBudget):
    """Chunks that depend on no clock."""

    def __init__(self, chunk: int) -> None:
        super().__init__(0)
        self.chunk = chunk

    def limit(self, n_batch: int) -> int:
        return min(self.chunk, n_batch)


# -- what a request gives alone


def alone_spec(name: str, chosen: Settings) -> FakeSpec:
    """One slot of the same size."""
    spec = SPECS[name]
    n_ctx = CAPS.get(name) or (spec.n_ctx if spec.unified else spec.n_ctx // spec.n_seq_max)
    return replace(spec, n_ctx=n_ctx, n_seq_max=1, n_batch=chosen.n_batch, n_ubatch=chosen.n_ubatch)


def prompt_of(request: Request) -> list[int]:
    return [BOS] + [3 + number % (N_VOCAB - 3) for number in prompt_numbers(request)]


def by_hand(spec: FakeSpec, request: Request, adapters: Adapters) -> Outcome | None:
    """What a request gives, by the plainest possible loop over the backend. None: an error, or a matter of shifting."""
    backend = FakeBackend(spec)
    tokens = prompt_of(request)
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
        found = [(text.find(word.encode()), word) for word in STOPS[request.stops] if word.encode() in text]
        if found:
            position, word = min(found)
            text, stop = text[:position], StopType.WORD
        truncated = stop is StopType.NONE and n_held + 1 >= backend.n_ctx_seq
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


def vector_by_hand(spec: FakeSpec, request: Request, adapters: Adapters) -> list[list[float]] | None:
    """What an embedding or rerank request gives; None: its prompt is too long."""
    backend = FakeBackend(spec)
    tokens = prompt_of(request)
    if len(tokens) > min(spec.n_ubatch, backend.n_ctx_seq - 1):
        return None
    backend.set_lora(list(enumerate(adapters.scales)))
    backend.set_embeddings(True)
    batch = backend.new_batch(len(tokens))
    batch.extend(tokens, 0, 0, True)
    assert backend.decode(batch, 0, len(tokens), True, 1) == 0
    if spec.pooling_type == POOLING_NONE:
        vectors = [backend.embeddings_ith(index) for index in range(len(tokens))]
    else:
        vectors = [backend.embeddings_seq(0)]
    return [vector for vector in vectors if vector is not None]


@lru_cache(maxsize=100_000)
def cold(
    name: str, chosen: Settings, request: Request, adapters: Adapters
) -> tuple[Outcome | None, ErrorResult | None]:
    """The request alone on a fresh engine with one slot of the same size, without any cache."""
    alone = alone_spec(name, chosen)
    expected = by_hand(alone, request, adapters)
    config = replace(chosen, cache_ram_mib=0).config(alone, n_parallel=1)
    if expected is not None and not (config.ctx_shift and expected.truncated):
        return expected, None
    # cut short by the context, or shifted: the engine's own way of that
    backend = FakeBackend(alone)
    context = ServerContext.with_backend(backend, config)
    client = run_alone(context, backend, replace(request, lora=tuple(enumerate(adapters.scales))))
    return Simulation.outcomes(client).get(0), client.error


def check_vectors(simulation: Simulation, name: str, chosen: Settings) -> None:
    for client in simulation.clients:
        if client.vector is None or client.adapters is None:
            continue
        expected = vector_by_hand(alone_spec(name, chosen), client.request, client.adapters)
        assert expected is not None, f"request {client.arrival} should have been refused"
        if isinstance(client.vector, RerankResult):
            assert client.vector.score == expected[0][0]
        else:
            assert isinstance(client.vector, EmbeddingResult)
            assert client.vector.embedding == expected


# -- playing a schedule against the fake


def play(name: str, chosen: Settings, schedule: Sequence[Action], compare: bool = True, n_reuse: int = 0) -> None:
    """``n_reuse``: smallest chunk that is shifted to where a new prompt has it."""
    spec = SPECS[name]
    backend = FakeBackend(replace(spec, n_batch=chosen.n_batch, n_ubatch=chosen.n_ubatch))
    context = ServerContext.with_backend(backend, chosen.config(spec, N_SLOTS, CAPS.get(name, 0)))
    if chosen.chunk is not None:
        context.step.builder.budget = FixedBudget(chosen.chunk)
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(context, backend, Path(folder), n_cache_reuse=n_reuse)
        simulation.play(schedule)
    simulation.check_errors(schedule)
    if compare:
        simulation.check_texts(lambda request, adapters: cold(name, chosen, request, adapters))
    check_vectors(simulation, name, chosen)
    context.close()


def search(run: Callable[[Sequence[Action]], None], schedule: Sequence[Action], chosen: Settings) -> None:
    """Run; when that fails, say so with the shortest schedule that fails at the same place."""
    try:
        run(schedule)
    except Exception as error:
        place = where(error)

        def fails(candidate: Sequence[Action]) -> bool:
            try:
                run(candidate)
            except Exception as other:
                return where(other) == place
            return False

        smallest = minimise(schedule, fails)
        try:
            run(smallest)
        except Exception as last:
            raise AssertionError(f"{last}\n{describe(smallest)}\n{chosen}") from last
        raise


def where(error: BaseException) -> tuple[type, int]:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(error), trace.tb_lineno if trace is not None else 0


#: The schedules are made shorter by :func:`minimise`, in bounded time.
randomly = settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.parametrize("name", TEXT_SPECS)
@randomly
@given(chosen=SETTINGS, schedule=schedules(Kinds(N_SLOTS)))
def test_invariants_hold_under_random_schedules(name: str, chosen: Settings, schedule: list[Action]) -> None:
    search(lambda actions: play(name, chosen, actions), schedule, chosen)


@randomly
@given(chosen=SETTINGS, data=st.data())
def test_sequences_that_share_cells_reach_the_end_of_their_context(chosen: Settings, data: st.DataObject) -> None:
    kinds = Kinds(N_SLOTS, lora=False, files=False, n_predict=(5, 60), several=False, cuts=(40, 60))
    schedule = data.draw(schedules(kinds))
    sharing = replace(chosen, ctx_shift=True, share_prefix=True)
    search(lambda actions: play("unified-capped", sharing, actions), schedule, chosen)


@pytest.mark.parametrize("cache_prompt", [True, False])
@pytest.mark.parametrize("name", ["window", "window-unified", "recurrent"])
def test_checkpoints_of_an_earlier_prompt_are_not_used(name: str, cache_prompt: bool) -> None:
    """The second prompt leaves the first after 25 tokens; the third goes back to where only the first had one."""
    prompts = [
        Request(cut=60, id_slot=0),
        Request(base=3, cut=66, id_slot=0, cache_prompt=cache_prompt),
        Request(base=3, cut=45, suffix=(9,), id_slot=0),
    ]
    schedule: list[Action] = [action for request in prompts for action in (Submit(request), Steps(40))]
    play(name, Settings(cache_ram_mib=0, n_ctx_checkpoints=8), schedule)


def test_children_start_only_when_the_whole_prompt_is_computed() -> None:
    """Where cells are short a batch is decoded in parts, and a part may end within the parent's prompt."""
    schedule: list[Action] = [
        Submit(Request(cut=12, suffix=(7, 6, 1, 5))),
        Steps(count=5),
        Submit(Request(base=1, cut=34)),
        Submit(Request(cut=57, n_cmpl=3)),
        Submit(Request(cut=28, suffix=(8, 1, 8, 1), id_slot=1)),
    ]
    chosen = Settings(
        cache_ram_mib=-1, cache_idle_slots=False, similarity=0.0, n_ctx_checkpoints=0, n_batch=64, n_ubatch=4
    )
    play("unified-small", chosen, schedule)


def test_a_checkpoint_is_gone_back_to_where_its_window_ends() -> None:
    """What is left of the window when the prompt comes back from RAM is the checkpoint's own, not one token more."""
    under_a = ((0, 1.0),)
    schedule: list[Action] = [
        Submit(Request(base=1, cut=41, lora=under_a)),
        Steps(40),
        Submit(Request(base=1, cut=39, n_cmpl=2, lora=under_a)),
        Submit(Request(base=1, cut=41, id_slot=0)),
        Submit(Request(n_cmpl=4)),
        SetLora(under_a),
    ]
    chosen = Settings(
        cache_ram_mib=1, cache_idle_slots=False, n_ctx_checkpoints=1, share_prefix=False, n_batch=64, n_ubatch=4
    )
    play("window-unified", chosen, schedule)


@pytest.mark.parametrize("name", ["unified", "split"])
@randomly
@given(chosen=SETTINGS, schedule=schedules(Kinds(N_SLOTS)))
def test_invariants_hold_with_shifted_chunks(name: str, chosen: Settings, schedule: list[Action]) -> None:
    """Chunks behind a gap are reused although computed in another context: the texts are not compared."""
    search(lambda actions: play(name, chosen, actions, compare=False, n_reuse=4), schedule, chosen)


@pytest.mark.parametrize("name", POOLING_SPECS)
@randomly
@given(chosen=SETTINGS, data=st.data())
def test_vectors_are_those_of_the_request_alone(name: str, chosen: Settings, data: st.DataObject) -> None:
    spec = SPECS[name]
    types = [TaskType.RERANK if spec.pooling_type == POOLING_RANK else TaskType.EMBEDDING]
    if spec.has_memory:
        types.append(TaskType.COMPLETION)
    schedule = data.draw(schedules(Kinds(N_SLOTS, types=tuple(types), files=False)))
    fitting = replace(chosen, n_batch=spec.n_batch, n_ubatch=spec.n_ubatch)
    search(lambda actions: play(name, fitting, actions), schedule, chosen)


# -- against the real library


@dataclass(frozen=True, slots=True)
class Real:
    """A loaded model that many engines use one after the other."""

    params: Params
    backend: NativeBackend

    def engine(self, n_parallel: int, cache_ram_mib: int) -> ServerContext:
        # the engine before may have asked to abort a call whose number comes again
        self.backend.abort(0)
        for id_seq in range(self.backend.n_seq_max):
            self.backend.seq_rm(id_seq, -1, -1)
        config = EngineConfig.from_params({**self.params.to_dict(), "n_parallel": n_parallel})
        config.cache_ram_mib = cache_ram_mib
        config.cache_idle_slots = config.cache_idle_slots and cache_ram_mib != 0
        config.stream_gap_ms = 0
        config.checkpoint_min_step = 0
        config.lora = [0.0] * len(config.lora)
        return ServerContext.with_backend(self.backend, config)


REAL = {
    "unified": ("tiny-llama", ["-c", "256", "--kv-unified"]),
    "split": ("tiny-llama", ["-c", "1024"]),
    "window": ("tiny-swa", ["-c", "1024"]),
    "recurrent": ("tiny-mamba", ["-c", "1024"]),
}


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Iterator[Real]:
    model, flags = REAL[request.param]
    flags = [*flags, "-np", str(N_SLOTS), "-b", "64", "-ub", "32", "-t", "1", "--no-warmup", "-lv", "0"]
    # without flash attention and rounded cells, batches of other sizes give the same greedy text
    flags += ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    if model == "tiny-llama":
        names = ("tiny-lora-a", "tiny-lora-b", "tiny-alora")
        flags += ["--lora", ",".join(str(tiny_models[name]) for name in names)]
    with Params.parse(["llamasrv", "-m", str(tiny_models[model]), *flags]) as params:
        backend_init(params)
        backend = NativeBackend(params)
        yield Real(params, backend)
        backend.close()


def real_token(number: int) -> int:
    """Words of the tiny models' common vocabulary."""
    return 265 + number * 3 % 180


@settings(parent=randomly, max_examples=max(5, N_EXAMPLES // 5))
@given(cache_ram_mib=st.sampled_from([-1, 0]), data=st.data())
def test_invariants_hold_over_the_real_library(real: Real, cache_ram_mib: int, data: st.DataObject) -> None:
    kinds = Kinds(N_SLOTS, faults=False, lora=bool(real.backend.adapter_infos()), temperatures=(0.0,))
    schedule = data.draw(schedules(kinds))

    def alone(request: Request, adapters: Adapters) -> tuple[Outcome | None, ErrorResult | None]:
        context = real.engine(n_parallel=1, cache_ram_mib=0)
        lora = tuple(enumerate(adapters.scales))
        client: Client = run_alone(context, real.backend, replace(request, lora=lora), real_token)
        return Simulation.outcomes(client).get(0), client.error

    def near_tie(request: Request, adapters: Adapters, text: bytes) -> bool:
        """Whether the run alone nearly took another token where the text leaves it: a matter of rounding."""
        context = real.engine(n_parallel=1, cache_ram_mib=0)
        asked = replace(request, lora=tuple(enumerate(adapters.scales)), n_probs=2, n_cmpl=1)
        final = run_alone(context, real.backend, asked, real_token).finals.get(0)
        said = b""
        for prob in final.probs if final is not None else []:
            said += prob.piece
            (_, _, best), (_, _, second) = prob.top
            if second > best * 0.999:
                return True
            if not text.startswith(said):
                return False
        return False

    def run(actions: Sequence[Action]) -> None:
        context = real.engine(N_SLOTS, cache_ram_mib)
        with tempfile.TemporaryDirectory() as folder:
            simulation = Simulation(context, real.backend, Path(folder), real_token)
            # the end of the process would be the end of the backend
            simulation.play([action for action in actions if not isinstance(action, Terminate)])
        simulation.check_errors(actions)
        simulation.check_texts(alone, near_tie)

    search(run, schedule, Settings(cache_ram_mib=cache_ram_mib))


def as_protocol(backend: FakeBackend) -> Backend:
    """For the type checker: the fake is a backend."""
    return backend
