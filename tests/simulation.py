"""Random schedules for the engine, run step by step, with the invariants checked after every step.

A schedule is a list of actions. :class:`Simulation` plays it against a ServerContext whose loop it turns itself, in one
thread, so that every schedule is repeatable. It works with the fake backend, whose content can be looked into, and
with the real one, for which the checks that need this are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from fake_backend import BOS, FakeBackend, Fault
from hypothesis import strategies as st

from llamasrv.engine.adapters import Adapters
from llamasrv.engine.backend import Backend, DecodeStatus
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import (
    SHUTTING_DOWN,
    EmbeddingResult,
    ErrorResult,
    FinalResult,
    PartialResult,
    RerankResult,
    Result,
    StopType,
)
from llamasrv.engine.server_context import ServerContext
from llamasrv.engine.task import READ_ONLY, SamplingParams, SlotAction, Task, TaskParams, TaskType

T = TypeVar("T")

#: Texts of errors that a correct engine gives without anything having gone wrong in the native part.
EXPECTED_ERRORS = (
    "exceeds the available context size",
    "Context size has been exceeded",
    "context shift cannot be used for shared prompt",
    "too large to process",
    "larger than the max context size",
)
#: Steps after which a drained schedule must have ended.
MAX_STEPS = 5000


# -- what can happen


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request. ``base``, ``cut`` and ``suffix`` make the prompt: requests often begin alike."""

    base: int = 0
    cut: int = 10
    suffix: tuple[int, ...] = ()
    n_predict: int = 8
    stream: bool = True
    n_cmpl: int = 1
    id_slot: int = -1
    temp: float = 0.0
    seed: int = 1
    #: Which of STOPS.
    stops: int = 0
    cache_prompt: bool = True
    n_probs: int = 0
    n_keep: int = 0
    n_discard: int = 0
    lora: tuple[tuple[int, float], ...] | None = None
    broken_grammar: bool = False
    type: TaskType = TaskType.COMPLETION


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Leave:
    """One of the open clients (modulo their number) hangs up.

    ``n_done``: not now but during the next decode, after so many physical batches.
    """

    client: int
    n_done: int | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    count: int


@dataclass(frozen=True, slots=True)
class BreakDecode:
    """The next decode ends with this status after so many physical batches."""

    status: int
    n_done: int = 0


@dataclass(frozen=True, slots=True)
class BreakSampling:
    pass


@dataclass(frozen=True, slots=True)
class SetLora:
    scales: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """METRICS or SLOT_GET, at rest or while the next decode runs."""

    type: TaskType
    n_done: int | None = None


@dataclass(frozen=True, slots=True)
class SlotFile:
    """SLOT_SAVE, SLOT_RESTORE or SLOT_ERASE of a slot, with one of a few files."""

    type: TaskType
    id_slot: int
    file: int


@dataclass(frozen=True, slots=True)
class Terminate:
    pass


@dataclass(frozen=True, slots=True)
class Drain:
    """The queue begins to end; what runs goes on."""


Action = Submit | Leave | Steps | BreakDecode | BreakSampling | SetLora | Ask | SlotFile | Terminate | Drain


def prompt_numbers(request: Request) -> list[int]:
    """Token numbers from 0 on, before they are mapped to a vocabulary."""
    forks = (0, 0, 12, 25)
    base = [
        (position * 7 + position // 5 + (0 if position < forks[request.base] else request.base * 13))
        for position in range(80)
    ]
    return base[: request.cut] + [50 + number for number in request.suffix]


LETTERS = "abcdefghijklmnopqrstuvwxyz"
#: None; whole pieces; words of several pieces, so many that they come; beginnings that come, ends that do not.
STOPS: list[tuple[str, ...]] = [
    (),
    (" stop", "STOP", "é"),
    ("\n\n", "e"),
    tuple("a" + letter for letter in LETTERS),
    tuple(letter + end for letter in LETTERS for end in (" the", "\n", " one t", ",.")),
    (*(letter + "#" for letter in LETTERS), " the river!", " stone", "日本"),
]
#: Number 2 is an aLoRA.
SCALES = st.sampled_from([((0, 1.0),), ((1, 1.0),), ((0, 0.5), (1, 0.5)), (), ((2, 1.0),), ((1, 0.5), (2, 1.0))])


@dataclass(frozen=True, slots=True)
class Kinds:
    """What a schedule may contain. ``faults``: what goes wrong in the native part."""

    n_slots: int
    faults: bool = True
    lora: bool = True
    files: bool = True
    types: tuple[TaskType, ...] = (TaskType.COMPLETION,)
    temperatures: tuple[float, ...] = (0.0, 0.8)
    n_predict: tuple[int, ...] = (0, 1, 2, 3, 8, 20, 60)
    several: bool = True
    #: Tokens of a prompt's part that others may share.
    cuts: tuple[int, int] = (0, 70)


def requests(kinds: Kinds, faults: bool) -> st.SearchStrategy[Request]:
    n_slots, lora = kinds.n_slots, kinds.lora
    return st.builds(
        Request,
        type=st.sampled_from(kinds.types),
        base=st.integers(0, 3),
        cut=st.integers(*kinds.cuts),
        suffix=st.lists(st.integers(0, 9), max_size=4).map(tuple),
        n_predict=st.sampled_from(kinds.n_predict),
        stream=st.booleans(),
        n_cmpl=st.sampled_from([1, 1, 1, 1, 2, 3, n_slots] if kinds.several else [1]),
        id_slot=st.sampled_from([-1, -1, -1, -1, *range(n_slots)]),
        temp=st.sampled_from(kinds.temperatures),
        seed=st.integers(1, 5),
        stops=st.integers(-4, len(STOPS) - 1).map(lambda index: max(0, index)),
        cache_prompt=st.sampled_from([True, True, True, False]),
        n_probs=st.sampled_from([0, 0, 0, 2]),
        n_keep=st.sampled_from([0, 0, 5, -1]),
        n_discard=st.sampled_from([0, 0, 3]),
        lora=st.sampled_from([None, None, ((0, 1.0),), ((1, 0.5),), (), ((2, 1.0),)]) if lora else st.none(),
        broken_grammar=st.integers(0, 30).map(lambda draw: draw == 30) if faults else st.just(False),
    )


@st.composite
def schedules(draw: st.DrawFn, kinds: Kinds) -> list[Action]:
    """Lists of actions. Faults are in one of four only: they end much of what runs."""
    faults = kinds.faults and draw(st.sampled_from([False, False, False, True]))
    leaving = draw(st.booleans())
    submit: st.SearchStrategy[Action] = requests(kinds, faults).map(Submit)
    steps: st.SearchStrategy[Action] = st.builds(Steps, st.sampled_from([1, 2, 5, 20, 40]))
    moment = st.sampled_from([None, None, 0, 1, 2])
    asking = st.sampled_from(sorted(READ_ONLY, key=lambda kind: kind.value))
    rare: list[st.SearchStrategy[Action]] = [st.builds(Ask, asking, moment)]
    if kinds.files:
        actions = st.sampled_from([TaskType.SLOT_SAVE, TaskType.SLOT_RESTORE, TaskType.SLOT_ERASE])
        rare.append(st.builds(SlotFile, actions, st.integers(0, kinds.n_slots - 1), st.integers(0, 1)))
    if leaving:
        rare.append(st.builds(Leave, st.integers(0, 7), moment))
        rare.append(st.builds(Leave, st.integers(0, 7), moment))
    if kinds.lora:
        rare.append(st.builds(SetLora, SCALES))
    if faults:
        statuses = st.sampled_from([int(DecodeStatus.ABORTED), int(DecodeStatus.INVALID_BATCH), -2, -3])
        rare.append(st.builds(BreakDecode, statuses, st.integers(0, 2)) | st.just(BreakSampling()))
    action = st.one_of(submit, submit, submit, steps, steps, steps, st.one_of(rare))
    # lists are short by themselves, and short schedules find little; sizes in rising order, so that failures shrink
    size = draw(st.sampled_from([1, 5, 15, 30, 50]))
    ending: list[list[Action]] = [[], [], [], [], [Terminate()], [Drain()]]
    return draw(st.lists(action, min_size=size, max_size=60)) + draw(st.sampled_from(ending))


# -- the one who plays it


@dataclass(slots=True)
class Outcome:
    """What one completion gave: the same for every run of the same request, whatever else went on."""

    text: bytes
    n_decoded: int
    stop: StopType
    stopping_word: str
    truncated: bool
    n_prompt_tokens: int


@dataclass(slots=True)
class Client:
    request: Request
    reader: ResponseReader
    task: Task
    arrival: int
    departed: bool = False
    text: dict[int, bytearray] = field(default_factory=dict)
    finals: dict[int, FinalResult] = field(default_factory=dict)
    error: ErrorResult | None = None
    vector: EmbeddingResult | RerankResult | None = None
    #: What its prompt is computed under; known once it has a slot.
    adapters: Adapters | None = None

    @property
    def ended(self) -> bool:
        return self.error is not None or self.vector is not None or len(self.finals) == len(self.task.ids())

    @property
    def is_open(self) -> bool:
        return not self.departed and not self.ended


def never() -> bool:
    return False


class Simulation:
    """One engine, its clients and the checks. ``token`` maps a number from 0 on to a token of the vocabulary."""

    def __init__(
        self,
        context: ServerContext,
        backend: Backend,
        folder: Path,
        token: Callable[[int], int] | None = None,
        n_cache_reuse: int = 0,
    ) -> None:
        self.context = context
        self.backend = backend
        self.fake = backend if isinstance(backend, FakeBackend) else None
        self.token = token or (lambda number: 3 + number % (backend.n_vocab - 3))
        self.first = [BOS] if self.fake is not None else [1]
        self.folder = folder
        self.n_cache_reuse = n_cache_reuse
        self.clients: list[Client] = []
        self.answers: list[Result] = []
        self.n_asked = 0
        self.terminated = False
        self._plain_readers: list[ResponseReader] = []
        self._owner: dict[int, Client] = {}
        #: Ids of departed tasks that the engine has had the time to notice.
        self._noticed: set[int] = set()
        self._ends: dict[int, int] = {}
        self._started: list[Client] = []
        self._in_decode: list[tuple[int, Callable[[], None]]] = []
        self._leavers: list[Client] = []
        self._n_log = 0
        context.step._yield = self._yield
        if self.fake is not None:
            self.fake.during_decode = self._during_decode
        send = context.response.send

        def counted(result: Result) -> None:
            if result.is_stop:
                self._ends[result.id] = self._ends.get(result.id, 0) + 1
            send(result)

        context.response.send = counted  # type: ignore[method-assign]

    # -- actions

    def play(self, schedule: Sequence[Action]) -> None:
        for action in schedule:
            self.act(action)
        self.drain()

    def check_errors(self, schedule: Sequence[Action]) -> None:
        """Errors have a reason outside the engine."""
        faults = any(isinstance(action, BreakDecode | BreakSampling) for action in schedule)
        for client in self.clients:
            if client.error is not None and not faults and not client.request.broken_grammar:
                message = client.error.message
                if message == SHUTTING_DOWN and Drain() in schedule:
                    assert client.adapters is None, f"request {client.arrival} had started"
                    continue
                assert any(text in message for text in EXPECTED_ERRORS), f"request {client.arrival}: {message}"

    def act(self, action: Action) -> None:
        match action:
            case Submit(request):
                self.submit(request)
            case Leave(number, n_done):
                candidates = [client for client in self.clients if client.is_open]
                if candidates:
                    client = candidates[number % len(candidates)]
                    self._at(n_done, lambda: self.leave(client))
            case Steps(count):
                for _ in range(count):
                    self.step()
            case BreakDecode(status, n_done):
                if self.fake is not None:
                    self.fake.faults.append(Fault(status, n_done))
            case BreakSampling():
                if self.fake is not None:
                    self.fake.sample_errors += 1
            case SetLora(scales):
                task = Task(id=self.context.queue.get_new_id(), type=TaskType.SET_LORA, set_lora=dict(scales))
                self._post_plain(task)
            case Ask(type_, n_done):
                task = Task(id=self.context.queue.get_new_id(), type=type_)
                self._at(n_done, lambda: self._post_plain(task))
            case SlotFile(type_, id_slot, number):
                path = self.folder / f"slot-{number}"
                payload = SlotAction(id_slot, path.name, str(path))
                task = Task(id=self.context.queue.get_new_id(), type=type_, slot_action=payload)
                self._post_plain(task)
            case Drain():
                self._observe()
                self.context.queue.drain()
                self.collect()
                for client in self.clients:
                    assert not client.is_open or client.adapters is not None, "it has not started and was not told"
            case Terminate():
                self.terminated = True
                self.context.terminate()

    def _at(self, n_done: int | None, event: Callable[[], None]) -> None:
        if n_done is None:
            event()
        else:
            self._in_decode.append((n_done, event))

    def _during_decode(self, n_done: int) -> None:
        """What the queue's worker thread does during a native call, and other threads, at a moment of our choosing."""
        due = [event for after, event in self._in_decode if after <= n_done]
        self._in_decode = [(after, event) for after, event in self._in_decode if after > n_done]
        for event in due:
            event()
        queue = self.context.queue
        refused = []
        while queue.tasks:
            task = queue.tasks.popleft()
            if not self.context.process_task(task, is_yielding=True):
                assert task.type not in READ_ONLY
                refused.append(task)
        queue.tasks.extend(refused)

    def submit(self, request: Request) -> Client:
        tokens = self.first + [self.token(number) for number in prompt_numbers(request)]
        params = TaskParams(
            stream=request.stream,
            cache_prompt=request.cache_prompt,
            n_predict=request.n_predict,
            n_keep=request.n_keep,
            n_discard=request.n_discard,
            n_cmpl=request.n_cmpl,
            n_cache_reuse=self.n_cache_reuse,
            lora=None if request.lora is None else dict(request.lora),
            antiprompt=STOPS[request.stops],
            return_tokens=True,
            sampling=SamplingParams(
                # without it the real library draws from all tokens, whatever the temperature
                samplers=("temperature",),
                temp=request.temp,
                seed=request.seed,
                n_probs=request.n_probs,
                grammar=("user", "broken") if request.broken_grammar else ("none", ""),
            ),
        )
        queue = self.context.queue
        task = Task(id=queue.get_new_id(), type=request.type, tokens=tokens, params=params, id_slot=request.id_slot)
        if task.need_sampling:
            for _ in range(request.n_cmpl - 1):
                task.add_child(queue.get_new_id())
        client = Client(request, self.context.reader(), task, arrival=len(self.clients))
        client.reader.post_task(task)
        self.clients.append(client)
        for id_task in task.ids():
            self._owner[id_task] = client
        return client

    def leave(self, client: Client) -> None:
        if client.is_open:
            client.departed = True
            self._leavers.append(client)
            client.reader.stop()

    def _post_plain(self, task: Task) -> None:
        reader = self.context.reader()
        self._plain_readers.append(reader)
        self.n_asked += 1
        reader.post_task(task)

    # -- one turn of the loop

    def step(self) -> None:
        if self.terminated:
            return
        # whoever left before this step is known to the engine from here on
        self._noticed.update(id_task for client in self._leavers for id_task in client.task.ids())
        self._leavers.clear()
        queue = self.context.queue
        while queue.tasks:
            assert self.context.process_task(queue.tasks.popleft()), "refused although no native call was running"
            self._observe()
        self.context.update_slots()
        self._observe()
        self.collect()
        self.check()

    # -- during a native call

    def _yield(self, work: Callable[[], T]) -> T:
        self._observe()
        self._check_owners()
        if self.fake is None:
            self._during_decode(MAX_STEPS)
        value = work()
        if self.fake is not None:
            for entry in self.fake.log[self._n_log :]:
                slot = self.context.pool.slots[entry.seq_id]
                assert slot.task is not None, f"a token was computed for the idle slot {slot.id}"
                assert slot.task.id not in self._noticed, f"a token was computed for the departed task {slot.task.id}"
            self._n_log = len(self.fake.log)
        return value

    def _check_owners(self) -> None:
        for slot in self.context.pool.slots:
            if slot.task is not None:
                assert slot.task.id not in self._noticed, f"slot {slot.id} still works on the departed {slot.task.id}"

    def _observe(self) -> None:
        """Note who got a slot, and in which order."""
        fresh: list[Client] = []
        for slot in self.context.pool.slots:
            if slot.task is None:
                continue
            client = self._owner[slot.task.id]
            if client.adapters is None:
                client.adapters = slot.adapters
                fresh.append(client)
            assert client.adapters.scales == slot.adapters.scales, "a request's adapters changed while it ran"
        self._started += fresh
        for client in fresh:
            self._check_order(client, fresh)

    def _check_order(self, client: Client, fresh: list[Client]) -> None:
        """Property 4: nobody who came earlier still waits, unless one of the two names a slot."""
        waiting = {task.id for task in self.context.queue.deferred}
        for other in self.clients[: client.arrival]:
            if other.task.id in waiting and other.is_open and other not in fresh:
                same_slot = other.request.id_slot == client.request.id_slot
                assert not same_slot, f"request {client.arrival} started before request {other.arrival}"

    # -- results

    def collect(self) -> None:
        for client in self.clients:
            while client.is_open:
                result = client.reader.next(never, timeout=0)
                if result is None:
                    break
                self._take(client, result)
        for reader in self._plain_readers:
            while reader.has_next():
                result = reader.next(never, timeout=0)
                if result is None:
                    break
                assert not isinstance(result, PartialResult | FinalResult)
                self.answers.append(result)

    @staticmethod
    def _take(client: Client, result: Result) -> None:
        assert result.id in client.task.ids()
        index = client.task.ids().index(result.id)
        assert result.index == index
        match result:
            case ErrorResult():
                client.error = result
            case PartialResult():
                assert index not in client.finals, "a piece after the end"
                assert client.request.stream, "a piece for a client that does not stream"
                client.text.setdefault(index, bytearray()).extend(result.content)
            case FinalResult():
                assert index not in client.finals, "two ends"
                assert not (client.request.stream and result.content)
                client.text.setdefault(index, bytearray()).extend(result.content)
                client.finals[index] = result
            case EmbeddingResult() | RerankResult():
                client.vector = result
            case _:
                raise AssertionError(f"unexpected {result}")

    # -- invariants

    def check(self) -> None:
        for id_task, count in self._ends.items():
            assert count == 1, f"task {id_task} ended {count} times"
        if self.fake is not None:
            self._check_content(self.fake)
        elif self.backend.has_memory:
            for slot in self.context.pool.slots:
                last = self.backend.seq_pos_max(slot.id)
                assert last == slot.prompt.n_tokens - 1, f"slot {slot.id}: {last} is the last of {slot.prompt.n_tokens}"

    def _check_content(self, fake: FakeBackend) -> None:
        assert not fake.violations, fake.violations
        for slot in self.context.pool.slots:
            if not fake.has_memory:
                break
            held = fake.tokens_of(slot.id)
            assert held == slot.prompt.tokens, f"slot {slot.id}: cells hold {held}, the slot says {slot.prompt.tokens}"
            for position, used in enumerate(fake.adapters_of(slot.id)):
                wanted = tuple((i, scale) for i, scale in enumerate(slot.adapters.at(position)) if scale != 0.0)
                assert used == wanted, f"slot {slot.id}, position {position}: computed under {used}, not {wanted}"

    def drain(self) -> None:
        """Let everything come to its end, then check that nothing is left behind."""
        for _ in range(MAX_STEPS):
            if self.terminated or not (any(client.is_open for client in self.clients) or self._busy):
                break
            self.step()
        else:
            waiting = [client.arrival for client in self.clients if client.is_open]
            raise AssertionError(f"requests {waiting} never ended")
        self.collect()
        if self.terminated:
            for client in self.clients:
                client.reader.stop()
            return
        queue = self.context.queue
        assert not queue.deferred and not queue.unhandled
        assert not any(slot.is_processing for slot in self.context.pool.slots)
        assert len(self.answers) == self.n_asked
        for client in self.clients:
            assert client.departed or client.ended
        if self.fake is not None:
            assert self.fake.n_open_samplers() == 0

    @property
    def _busy(self) -> bool:
        queue = self.context.queue
        pending = [task for task in queue.tasks if task.type is not TaskType.NEXT_RESPONSE]
        return bool(pending or queue.deferred or self.context.pool.n_processing or self._leavers)

    # -- comparison with a run of its own

    @staticmethod
    def outcomes(client: Client) -> dict[int, Outcome]:
        return {
            index: Outcome(
                text=bytes(client.text[index]),
                n_decoded=final.n_decoded,
                stop=final.stop,
                stopping_word=final.stopping_word,
                truncated=final.truncated,
                n_prompt_tokens=final.n_prompt_tokens,
            )
            for index, final in client.finals.items()
        }

    def check_texts(
        self,
        cold: Callable[[Request, Adapters], tuple[Outcome | None, ErrorResult | None]],
        excused: Callable[[Request, Adapters, bytes], bool] = lambda request, adapters, text: False,
    ) -> None:
        """Property 6: each completion is what the request gives alone on a fresh engine.

        ``cold(request, adapters)`` makes that run. A request that was cut short has the beginning of its text.
        ``excused`` is asked about a text that differs.
        """
        for client in self.clients:
            if client.adapters is None or not client.task.need_sampling:
                continue
            for index in range(len(client.task.ids())):
                # further completions count the seed on
                alone = replace(client.request, n_cmpl=1, id_slot=-1, seed=client.request.seed + index)
                expected, error = cold(alone, client.adapters)
                got = self.outcomes(client).get(index)
                text = bytes(client.text.get(index, b""))
                if got != expected and excused(alone, client.adapters, text):
                    continue
                if got is not None:
                    assert got == expected, f"request {client.arrival}[{index}]: {got}, alone {expected} {error}"
                elif expected is not None:
                    assert expected.text.startswith(text), f"request {client.arrival}[{index}]: {text!r} of {expected}"


def run_alone(
    context: ServerContext, backend: Backend, request: Request, token: Callable[[int], int] | None = None
) -> Client:
    """One request on an engine that does nothing else."""
    simulation = Simulation(context, backend, Path(os.devnull), token)
    client = simulation.submit(replace(request, stream=False))
    simulation.drain()
    return client


# -- what to show when it fails


def minimise(
    schedule: Sequence[Action], fails: Callable[[Sequence[Action]], bool], seconds: float = 20
) -> list[Action]:
    """A short schedule that still fails, by leaving out parts and then simplifying requests while time lasts."""
    deadline = time.monotonic() + seconds
    best = list(schedule)
    size = len(best)
    while size >= 1:
        start = 0
        while start < len(best) and time.monotonic() < deadline:
            shorter = best[:start] + best[start + size :]
            if fails(shorter):
                best = shorter
            else:
                start += size
        size //= 2
    for position, action in enumerate(best):
        if not isinstance(action, Submit):
            continue
        for name in fields(Request):
            current = best[position]
            assert isinstance(current, Submit)
            simpler = replace(current.request, **{name.name: name.default})
            candidate = [*best[:position], Submit(simpler), *best[position + 1 :]]
            if simpler != current.request and time.monotonic() < deadline and fails(candidate):
                best = candidate
    return best


def describe(schedule: Sequence[Action]) -> str:
    """The schedule as an expression, without what is at its default."""

    def show(action: Action) -> str:
        if not isinstance(action, Submit):
            return str(action)
        request = action.request
        changed = [f for f in fields(request) if getattr(request, f.name) != f.default]
        return "Submit(Request(" + ", ".join(f"{f.name}={getattr(request, f.name)!r}" for f in changed) + "))"

    return "[\n" + "".join(f"    {show(action)},\n" for action in schedule) + "]"
