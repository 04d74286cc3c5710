"""A model without numbers: the backend protocol over a plain map of (sequence, position) to token.

Every cell remembers what it was computed from, and the next token is a hash of all cells that the sequence sees: a
cell lost, mixed up, computed under other adapters or shifted wrongly changes the text. What libllama would abort on,
or silently get wrong, is a :class:`Violation` here.
"""

from __future__ import annotations

import io
import pickle
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamasrv.engine.backend import AdapterInfo, BackendError, Batch, DecodeStatus, Sampler, SeqRm
from llamasrv.engine.drafting import Drafter
from llamasrv.engine.task import SamplingParams

BOS = 0
EOS = 1
EOT = 2

#: Token texts: control tokens, ASCII, words, and the bytes of two characters ("é" and the euro sign) one by one.
PIECES: tuple[bytes, ...] = (
    b"",
    b"",
    b"",
    *(bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz .,\n"),
    *(word.encode() for word in (" the", " river", " stone", " stop", "STOP", " one", " two", "\n\n", "é", "日")),
    *(bytes([byte]) for byte in "é€".encode()),
)
N_VOCAB = len(PIECES)
CONTROL = frozenset({BOS, EOS, EOT})
EOG = frozenset({EOS, EOT})

POOLING_NONE = 0
POOLING_MEAN = 1
POOLING_RANK = 4

#: The decoder's state before the first token.
ROOT = 0x9E3779B97F4A7C15


#: Head of a state file: LLAMA_STATE_SEQ_MAGIC, LLAMA_STATE_SEQ_VERSION, number of words.
STATE_HEADER = struct.Struct("<III")
STATE_KIND = (0x67677371, 4)


class Violation(AssertionError):
    """The engine did what no correct user of libllama does."""


@dataclass(slots=True)
class Cell:
    pos: int
    token: int
    #: Hash of everything this cell was computed from.
    value: int
    #: ``(index, scale)`` of the adapters under which it was computed.
    adapters: tuple[tuple[int, float], ...]
    seqs: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Fault:
    """What the next decode does instead of succeeding, after ``n_done`` of its physical batches."""

    status: int
    n_done: int = 0


@dataclass(slots=True)
class Decoded:
    """One successfully computed entry, for the checks of the tests."""

    serial: int
    seq_id: int
    pos: int
    token: int


class FakeBatch:
    def __init__(self, n_alloc: int) -> None:
        self.n_alloc = n_alloc
        self.entries: list[tuple[int, int, int, bool]] = []
        #: Entry -> role for a joint decision head.
        self.orders: dict[int, int] = {}

    @property
    def n_tokens(self) -> int:
        return len(self.entries)

    def clear(self) -> None:
        self.entries.clear()
        self.orders.clear()

    def add(self, token: int, pos: int, seq_id: int, output: bool) -> int:
        if len(self.entries) >= self.n_alloc:
            raise ValueError("the batch is full")
        self.entries.append((token, pos, seq_id, output))
        return len(self.entries) - 1

    def extend(self, tokens: Sequence[int], pos0: int, seq_id: int, output: bool) -> int:
        first = len(self.entries)
        for offset, token in enumerate(tokens):
            self.add(token, pos0 + offset, seq_id, output)
        return first

    def set_decision_order(self, index: int, order: int) -> None:
        self.orders[index] = order

    def set_output(self, index: int, output: bool) -> None:
        token, pos, seq_id, _ = self.entries[index]
        self.entries[index] = (token, pos, seq_id, output)


class FakeSampler:
    """Greedy at temperature 0, otherwise a function of seed and number of tokens accepted. Refuses nothing but bans."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.history: list[int] = []
        self.n_generated = 0
        self.closed = False
        self.banned = {token for token, bias in params.logit_bias if bias == float("-inf")}

    def accept(self, tokens: Sequence[int], is_generated: bool) -> None:
        self._check_open()
        self.history.extend(tokens)
        self.n_generated += len(tokens) if is_generated else 0

    def reset(self) -> None:
        self._check_open()
        self.history.clear()
        self.n_generated = 0

    def force_reasoning_end(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def pick(self, logits: int) -> int:
        self._check_open()
        key = logits if self.params.temp <= 0 else hash((logits, self.params.seed, self.n_generated))
        for attempt in range(1000):
            token = candidate(key, attempt)
            if token not in self.banned:
                return token
        raise BackendError("every token is banned")

    def _check_open(self) -> None:
        if self.closed:
            raise Violation("use of a closed sampler")


def candidate(logits: int, rank: int) -> int:
    """The token of this rank. An end of generation comes once in 40 tokens or so, BOS never."""
    draw = hash((logits, rank, 17)) & 0xFFFFFFFF
    if draw % 41 == 0:
        return EOS if draw % 2 else EOT
    return len(CONTROL) + (draw >> 8) % (N_VOCAB - len(CONTROL))


def logprob(logits: int, token: int) -> float:
    """Logarithm of the token's probability; any number will do that follows from all that was computed."""
    return -(hash((logits, token, 23)) & 0xFFFF) / 1000.0


@dataclass(slots=True)
class FakeSpec:
    """What kind of model and context to imitate. ``n_ctx`` counts the cells of the whole context."""

    n_ctx: int = 256
    n_seq_max: int = 4
    unified: bool = True
    n_batch: int = 64
    n_ubatch: int = 16
    n_swa: int = 0
    recurrent: bool = False
    #: An encoder: nothing is kept from one decode to the next.
    has_memory: bool = True
    can_shift: bool = True
    add_bos: bool = True
    pooling_type: int = POOLING_NONE
    n_embd_out: int = 4
    n_adapters: int = 2
    #: Tokens that switch on one more adapter, the last; empty: there is none.
    invocation: tuple[int, ...] = ()


class FakeBackend:
    """See :class:`llamasrv.engine.backend.Backend`; everything not of the protocol is for the tests."""

    def __init__(self, spec: FakeSpec | None = None) -> None:
        self.spec = spec = spec or FakeSpec()
        self.n_ctx = spec.n_ctx
        self.n_ctx_seq = spec.n_ctx if spec.unified else spec.n_ctx // spec.n_seq_max
        self.n_ctx_train = 1 << 20
        self.n_batch = spec.n_batch
        self.n_ubatch = spec.n_ubatch
        self.n_seq_max = spec.n_seq_max
        self.n_swa = spec.n_swa
        self.add_bos = spec.add_bos
        self.has_memory = spec.has_memory
        self.can_shift = spec.can_shift and spec.has_memory and not spec.recurrent
        self.pooling_type = spec.pooling_type
        self.n_embd_out = 1 if spec.pooling_type == POOLING_RANK else spec.n_embd_out
        self.n_vocab = N_VOCAB
        self.causal_attn = spec.has_memory
        if not spec.has_memory:
            self.seq_rm_type = SeqRm.NO
        else:
            self.seq_rm_type = SeqRm.FULL if spec.recurrent else SeqRm.PART
        self.n_rs_seq = 0
        self.drafter: Drafter | None = None

        #: Sequence -> position -> cell; in the unified buffer sequences may share cells.
        self.content: list[dict[int, Cell]] = [{} for _ in range(spec.n_seq_max)]
        #: Sequence -> position -> value: what the sliding window still holds.
        self.window: list[dict[int, int]] = [{} for _ in range(spec.n_seq_max)]
        self.adapters: tuple[tuple[int, float], ...] = ()
        self.embeddings = False

        self.faults: deque[Fault | None] = deque()
        #: Called inside decode before each physical batch, with the number of those done: other threads act meanwhile.
        self.during_decode: Callable[[int], None] = lambda n_done: None
        #: Token ids for which sampling fails once.
        self.sample_errors = 0
        self.log: list[Decoded] = []
        self.violations: list[str] = []
        self.samplers: list[FakeSampler] = []
        self.stopped = False
        self.closed = False
        self._aborted = 0
        self._logits: dict[int, int] = {}
        #: Most outputs that one decode asked for.
        self.n_outputs_most = 0
        self._pooled: dict[int, int] = {}
        self._n_decoded = 0

    # -- for the tests

    def tokens_of(self, seq_id: int) -> list[int]:
        """Tokens of a sequence in order of position. Raises Violation when there is a gap."""
        cells = self.content[seq_id]
        if sorted(cells) != list(range(len(cells))):
            self.violate(f"sequence {seq_id} has the positions {sorted(cells)}")
        return [cells[pos].token for pos in range(len(cells))]

    def adapters_of(self, seq_id: int) -> list[tuple[tuple[int, float], ...]]:
        """What each cell of a sequence was computed under, in order of position."""
        return [cell.adapters for _, cell in sorted(self.content[seq_id].items())]

    def n_cells_used(self, seq_id: int) -> int:
        """Cells taken in the buffer of this sequence."""
        if not self.spec.unified:
            return len(self.content[seq_id])
        return len({id(cell) for cells in self.content for cell in cells.values()})

    def n_open_samplers(self) -> int:
        return sum(not sampler.closed for sampler in self.samplers)

    def violate(self, text: str) -> None:
        self.violations.append(text)
        raise Violation(text)

    # -- batch and decode

    def new_batch(self, n_alloc: int) -> FakeBatch:
        return FakeBatch(n_alloc)

    def decode(self, batch: Batch, offset: int, n_tokens: int, sync: bool, serial: int) -> int:
        assert isinstance(batch, FakeBatch)
        entries = batch.entries[offset : offset + n_tokens]
        self._check(entries, n_tokens)
        self.n_outputs_most = max(self.n_outputs_most, sum(entry[3] for entry in entries))
        self._logits.clear()
        self._pooled.clear()
        fault = self.faults.popleft() if self.faults else None
        if self.has_memory and not self._fits(entries):
            return DecodeStatus.NO_KV_SPACE
        size = self.n_ubatch if self.has_memory else max(1, n_tokens)
        for n_done, start in enumerate(range(0, n_tokens, size)):
            self.during_decode(n_done)
            if self.stopped or self._aborted == serial:
                return DecodeStatus.ABORTED
            if fault is not None and n_done >= fault.n_done:
                return fault.status
            for index in range(start, min(start + size, n_tokens)):
                self._compute(index, entries[index], serial)
        if fault is not None:
            return fault.status
        self._n_decoded += 1
        return DecodeStatus.OK

    def _check(self, entries: Sequence[tuple[int, int, int, bool]], n_tokens: int) -> None:
        if self.closed:
            self.violate("decode after close")
        if not 0 < n_tokens == len(entries):
            self.violate(f"decode of {n_tokens} tokens, the batch has {len(entries)}")
        if n_tokens > self.n_batch:
            self.violate(f"decode of {n_tokens} tokens, n_batch is {self.n_batch}")
        if not self.has_memory and n_tokens > self.n_ubatch:
            self.violate(f"an encoder takes at most {self.n_ubatch} tokens, not {n_tokens}")
        following: dict[int, int] = {}
        for token, pos, seq_id, output in entries:
            if not 0 <= seq_id < self.n_seq_max:
                self.violate(f"sequence {seq_id} of {self.n_seq_max}")
            if not 0 <= token < N_VOCAB:
                self.violate(f"token {token} of {N_VOCAB}")
            if self.embeddings and not output:
                self.violate("embeddings are wanted, but an entry has no output")
            expected = following.get(seq_id, self.seq_pos_max(seq_id) + 1)
            if pos != expected:
                self.violate(f"sequence {seq_id}: position {pos} after {expected - 1}")
            following[seq_id] = pos + 1
            if (
                self.has_memory
                and not self.spec.recurrent
                and pos > 0
                and not self._window_covers(seq_id, pos, entries)
            ):
                self.violate(f"sequence {seq_id}: the window before position {pos} is lost")

    def _window_covers(self, seq_id: int, pos: int, entries: Iterable[tuple[int, int, int, bool]]) -> bool:
        if not self.n_swa:
            return True
        new = {entry[1] for entry in entries if entry[2] == seq_id}
        needed = range(max(0, pos - self.n_swa + 1), pos)
        return all(at in self.window[seq_id] or at in new for at in needed)

    def _fits(self, entries: Sequence[tuple[int, int, int, bool]]) -> bool:
        if self.spec.recurrent:
            return True
        if self.spec.unified:
            return self.n_cells_used(0) + len(entries) <= self.n_ctx
        return all(
            len(self.content[seq_id]) + sum(entry[2] == seq_id for entry in entries) <= self.n_ctx_seq
            for seq_id in {entry[2] for entry in entries}
        )

    def _compute(self, index: int, entry: tuple[int, int, int, bool], serial: int) -> None:
        token, pos, seq_id, output = entry
        if not self.has_memory:
            before = self._pooled.get(seq_id, ROOT)
            self._pooled[seq_id] = value = hash((before, token, pos, self.adapters))
            if output:
                self._logits[index] = value
            return
        cells = self.content[seq_id]
        before = cells[pos - 1].value if pos > 0 else ROOT
        cell = Cell(pos, token, hash((before, token, self.adapters)), self.adapters, {seq_id})
        cells[pos] = cell
        if self.n_swa:
            window = self.window[seq_id]
            window[pos] = cell.value
            for lost in [at for at in window if at <= pos - self.n_swa]:
                del window[lost]
        self._pooled[seq_id] = cell.value
        self.log.append(Decoded(serial, seq_id, pos, token))
        if output:
            self._logits[index] = self._hash_of(seq_id, pos)

    def _hash_of(self, seq_id: int, last: int) -> int:
        cells = self.content[seq_id]
        seen = tuple((pos, cells[pos].value) for pos in sorted(cells) if pos <= last)
        window = self.window[seq_id]
        near = (
            tuple(window.get(pos, -1) for pos in range(max(0, last - self.n_swa + 1), last + 1)) if self.n_swa else ()
        )
        return hash((seen, near, self.adapters))

    def synchronize(self) -> None:
        pass

    def abort(self, serial: int) -> None:
        self._aborted = serial

    def stop(self) -> None:
        self.stopped = True

    def set_embeddings(self, value: bool) -> None:
        self.embeddings = value

    def set_lora(self, adapters: Sequence[tuple[int, float]]) -> None:
        n_adapters = len(self.adapter_infos())
        for index, _scale in adapters:
            if not 0 <= index < n_adapters:
                self.violate(f"adapter {index} of {n_adapters}")
        self.adapters = tuple(sorted((index, scale) for index, scale in adapters if scale != 0.0))

    def adapter_infos(self) -> list[AdapterInfo]:
        infos = [AdapterInfo(f"adapter-{index}.gguf") for index in range(self.spec.n_adapters)]
        if self.spec.invocation:
            infos.append(AdapterInfo("alora.gguf", "task", "prefix", self.spec.invocation))
        return infos

    # -- memory

    def _seq(self, seq_id: int) -> dict[int, Cell]:
        if not 0 <= seq_id < self.n_seq_max:
            self.violate(f"sequence {seq_id} of {self.n_seq_max}")
        if not self.has_memory:
            self.violate("the context has no memory")
        return self.content[seq_id]

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        if not self.has_memory:
            return True
        cells = self._seq(seq_id)
        gone = [pos for pos in cells if pos >= p0 and (p1 < 0 or pos < p1)]
        if self.spec.recurrent and gone and len(gone) < len(cells):
            return False
        for pos in gone:
            cells.pop(pos).seqs.discard(seq_id)
        # a restored window may reach beyond the cells: libllama cuts both parts of such a memory
        for pos in [pos for pos in self.window[seq_id] if pos >= p0 and (p1 < 0 or pos < p1)]:
            del self.window[seq_id][pos]
        return True

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        source, target = self._seq(src), self._seq(dst)
        if src == dst:
            return
        whole = p0 <= 0 and (p1 < 0 or p1 > max(source, default=-1))
        if (self.spec.recurrent or not self.spec.unified) and not whole:
            self.violate("between buffers only whole sequences can be copied")
        if not self.spec.unified or self.spec.recurrent:
            for cell in target.values():
                cell.seqs.discard(dst)
            target.clear()
            self.window[dst].clear()
        for pos, cell in source.items():
            if pos < p0 or 0 <= p1 <= pos:
                continue
            if pos in target:
                if target[pos] is cell:
                    continue
                self.violate(f"copy onto sequence {dst}, which has position {pos} already")
            if self.spec.unified and not self.spec.recurrent:
                cell.seqs.add(dst)
                target[pos] = cell
            else:
                target[pos] = Cell(pos, cell.token, cell.value, cell.adapters, {dst})
            if pos in self.window[src]:
                self.window[dst][pos] = self.window[src][pos]

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        cells = self._seq(seq_id)
        if not self.can_shift:
            self.violate("this memory cannot shift")
        moved = {pos: cells[pos] for pos in cells if pos >= p0 and (p1 < 0 or pos < p1)}
        if any(len(cell.seqs) > 1 for cell in moved.values()):
            self.violate("shift of cells that several sequences share")
        windowed = {pos: self.window[seq_id].pop(pos) for pos in moved if pos in self.window[seq_id]}
        for pos in moved:
            del cells[pos]
        for pos, cell in moved.items():
            if pos + delta in cells or pos + delta < 0:
                self.violate(f"sequence {seq_id}: shift of position {pos} by {delta} hits another cell")
            cell.pos = pos + delta
            cells[pos + delta] = cell
            if pos in windowed:
                self.window[seq_id][pos + delta] = windowed[pos]

    def seq_pos_min(self, seq_id: int) -> int:
        if not self.has_memory:
            return -1
        if self.spec.recurrent:
            return self.seq_pos_max(seq_id)
        return min(self.window[seq_id] if self.n_swa else self.content[seq_id], default=-1)

    def seq_pos_max(self, seq_id: int) -> int:
        if not self.has_memory:
            return -1
        return max(self.window[seq_id] if self.n_swa else self.content[seq_id], default=-1)

    # -- state

    def _state(self, seq_id: int, partial: bool) -> bytes:
        cells = self._seq(seq_id)
        full = [(cell.pos, cell.token, cell.value, cell.adapters) for _, cell in sorted(cells.items())]
        window = sorted(self.window[seq_id].items())
        if partial and not self.spec.recurrent:
            return pickle.dumps(("partial", [], window))
        return pickle.dumps(("full", full, window))

    def state_size(self, seq_id: int, partial: bool = False) -> int:
        return len(self._state(seq_id, partial))

    def state_get(self, seq_id: int, partial: bool = False) -> bytes:
        return self._state(seq_id, partial)

    def state_set(self, seq_id: int, data: bytes, partial: bool = False) -> bool:
        cells = self._seq(seq_id)
        kind, full, window = pickle.loads(data)
        if (kind == "partial") != (partial and not self.spec.recurrent):
            self.violate("a partial state is not a whole one")
        if kind == "partial":
            self.window[seq_id] = dict(window)
            return True
        if not full:
            # as libllama does: nothing to do, what was there stays
            return True
        self.seq_rm(seq_id, -1, -1)
        budget = self.n_ctx if self.spec.unified else self.n_ctx_seq
        if not self.spec.recurrent and self.n_cells_used(seq_id) + len(full) > budget:
            return False
        for pos, token, value, adapters in full:
            cells[pos] = Cell(pos, token, value, adapters, {seq_id})
        self.window[seq_id] = dict(window)
        return True

    def state_save_file(self, path: str, seq_id: int, tokens: Sequence[int]) -> int:
        """In libllama's layout: magic, version, number of words, the words, the state."""
        words = array("i", tokens)
        data = STATE_HEADER.pack(*STATE_KIND, len(words)) + words.tobytes() + self._state(seq_id, False)
        Path(path).write_bytes(data)
        return len(data)

    def state_load_file(self, path: str, seq_id: int, capacity: int) -> tuple[int, list[int]]:
        data = Path(path).read_bytes()
        *kind, n_words = STATE_HEADER.unpack_from(data)
        start = STATE_HEADER.size + 4 * n_words
        if tuple(kind) != STATE_KIND or n_words > capacity:
            return 0, []
        stream = io.BytesIO(data[start:])
        try:
            pickle.load(stream)
        except (pickle.UnpicklingError, EOFError):
            self.seq_rm(seq_id, -1, -1)
            return 0, []
        end = start + stream.tell()
        if not self.state_set(seq_id, data[start:end]):
            return 0, []
        return end, list(array("i", data[STATE_HEADER.size : start]))

    # -- sampling

    def new_sampler(self, params: SamplingParams) -> FakeSampler:
        if params.grammar[1] == "broken":
            raise BackendError("failed to parse grammar")
        sampler = FakeSampler(params)
        self.samplers.append(sampler)
        return sampler

    def sample_many(self, samplers: Sequence[Sampler], indices: Sequence[int]) -> list[int | BackendError]:
        if len(samplers) != len(indices):
            self.violate("as many samplers as indices")
        if len({id(sampler) for sampler in samplers}) != len(samplers):
            self.violate("one sampler twice in a call")
        out: list[int | BackendError] = []
        for sampler, index in zip(samplers, indices, strict=True):
            if index not in self._logits:
                self.violate(f"no logits at index {index}; there are some at {sorted(self._logits)}")
            assert isinstance(sampler, FakeSampler)
            if self.sample_errors:
                self.sample_errors -= 1
                out.append(BackendError("the grammar refuses every token"))
                continue
            token = sampler.pick(self._logits[index])
            sampler.accept([token], True)
            out.append(token)
        return out

    def token_probs(
        self, sampler: Sampler, index: int, token: int, n_top: int, post: bool
    ) -> tuple[float, list[tuple[int, float]]]:
        if index not in self._logits:
            self.violate(f"no logits at index {index}; there are some at {sorted(self._logits)}")
        return 0.5, [(candidate(self._logits[index], rank), 0.5 / (rank + 1)) for rank in range(n_top)]

    def logprobs(
        self, indices: Sequence[int], tokens: Sequence[int], n_top: int
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        for index in indices:
            if index not in self._logits:
                self.violate(f"no logits at index {index}; there are some at {sorted(self._logits)}")
        return [
            (
                logprob(self._logits[index], token),
                [(candidate(self._logits[index], rank), -1.0 - rank) for rank in range(n_top)],
            )
            for index, token in zip(indices, tokens, strict=True)
        ]

    # -- vocabulary

    def piece(self, token: int, special: bool) -> bytes:
        if token in CONTROL:
            return (b"<bos>", b"<eos>", b"<eot>")[token] if special else b""
        return PIECES[token]

    def is_eog(self, token: int) -> bool:
        return token in EOG

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        tokens = [BOS] if add_special and self.add_bos else []
        known = {piece: token for token, piece in enumerate(PIECES) if piece}
        for character in text:
            data = character.encode()
            if data in known:
                tokens.append(known[data])
            else:
                tokens.append(len(CONTROL) + sum(data) % (N_VOCAB - len(CONTROL)))
        return tokens

    # -- embeddings

    def _vector(self, value: int) -> list[float]:
        return [1.0 + hash((value, axis)) % 1000 / 1000.0 for axis in range(self.n_embd_out)]

    def logits_at(self, index: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        value = self._logits.get(index)
        if value is None:
            raise BackendError("no logits")
        return np.array([hash((value, token)) % 1000 / 100.0 for token in tokens], dtype=np.float32)

    def embeddings_at(self, indices: Sequence[int]) -> npt.NDArray[np.float32]:
        rows = [self.embeddings_ith(index) for index in indices]
        if None in rows:
            raise BackendError("no embeddings")
        return np.array(rows, dtype=np.float32)

    def embeddings_ith(self, index: int) -> list[float] | None:
        value = self._logits.get(index)
        return None if value is None or not self.embeddings else self._vector(value)

    def embeddings_seq(self, seq_id: int) -> list[float] | None:
        value = self._pooled.get(seq_id)
        return None if value is None or self.pooling_type == POOLING_NONE else self._vector(value)

    def split_state(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        return data, b"", b""

    def join_state(self, target: bytes, draft: bytes, spec: bytes) -> bytes:
        return target

    def set_sampler(self, seq_id: int, sampler: Sampler | None) -> None:
        pass

    def clone_sampler(self, sampler: Sampler) -> Sampler:
        assert isinstance(sampler, FakeSampler)
        copy = FakeSampler(sampler.params)
        self.copy_sampler(sampler, copy)
        return copy

    def copy_sampler(self, source: Sampler, target: Sampler) -> None:
        assert isinstance(source, FakeSampler)
        assert isinstance(target, FakeSampler)
        target.history = list(source.history)
        target.n_generated = source.n_generated

    def identity(self) -> dict[str, str]:
        return {"model": "fake", "cache type": "f16/f16"}

    def n_reused(self) -> int:
        return self._n_decoded

    def close(self) -> None:
        self.closed = True
