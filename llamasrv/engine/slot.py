"""A slot: one sequence of the context, and who is talking in it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from llamasrv.engine.adapters import Adapters
from llamasrv.engine.backend import Sampler
from llamasrv.engine.prompt import Prompt
from llamasrv.engine.result import PromptTokenProb, SlotSnapshot, StopType, TokenProb
from llamasrv.engine.stats import SlotStats
from llamasrv.engine.task import Task
from llamasrv.engine.text import GeneratedText


class SlotState(enum.Enum):
    """Life of a task in a slot. A task that waits for nobody skips WAIT_OTHER."""

    IDLE = enum.auto()
    #: Assigned; waits until another slot has computed the prompt it will share.
    WAIT_OTHER = enum.auto()
    #: Assigned; nothing of the prompt is in a batch yet.
    STARTED = enum.auto()
    PROCESSING_PROMPT = enum.auto()
    #: The whole prompt is in the batch; the first token can be sampled once it is decoded.
    DONE_PROMPT = enum.auto()
    GENERATING = enum.auto()


@dataclass(slots=True)
class WaitFor:
    """``slot``, busy with task ``id_task``, is computing the first ``n_tokens`` tokens that the waiting slot needs."""

    slot: Slot
    id_task: int
    n_tokens: int


@dataclass(slots=True)
class DraftCheckpoint:
    """The slot before a draft: ``n_tokens`` tokens; states of the memories that cannot drop single tokens."""

    n_tokens: int
    target: bytes = b""
    draft: bytes = b""


class Slot:
    """Owner of one sequence's KV cells, tokens, checkpoints, sampler, adapters and statistics.

    ``prompt`` mirrors the cells: its tokens are what is in them plus what the batch under way will add. It outlives
    the task, for the next one that begins alike.
    """

    __slots__ = (
        "adapters",
        "draft",
        "draft_checkpoint",
        "draft_is_replay",
        "generated_tokens",
        "has_new_line",
        "has_next_token",
        "i_batch",
        "id",
        "last_nl_pos",
        "n_accepted_per_pos",
        "n_ctx",
        "n_gen_printed",
        "n_predict_max",
        "probs",
        "prompt",
        "prompt_scores",
        "sampled",
        "sampler",
        "state",
        "stats",
        "stop",
        "stopping_word",
        "t_last_used",
        "t_print_last",
        "task",
        "task_prev",
        "text",
        "truncated",
        "wait",
    )

    def __init__(self, id_slot: int, n_ctx: int, adapters: Adapters | None = None) -> None:
        self.id = id_slot
        self.n_ctx = n_ctx
        self.state = SlotState.IDLE
        self.task: Task | None = None
        self.task_prev: Task | None = None
        #: Microseconds of the monotonic clock; -1: never used.
        self.t_last_used = -1
        self.prompt = Prompt()
        #: Adapters under which the cells were computed.
        self.adapters = adapters or Adapters()
        self.sampler: Sampler | None = None
        #: Stays as it was when a task ends.
        self.has_next_token = True
        self.reset()

    def reset(self) -> None:
        """Forget the task and what it produced; the prompt stays."""
        if self.task is not None:
            self.task_prev = self.task
        self.task = None
        if self.sampler is not None:
            self.sampler.close()
        self.sampler = None
        self.sampled = -1
        #: Batch index whose logits give the next token; -1: none in this batch.
        self.i_batch = -1
        self.n_predict_max = -1
        self.stats = SlotStats()
        self.text = GeneratedText()
        self.generated_tokens: list[int] = []
        self.probs: list[TokenProb] = []
        #: By position, as far as computed; the children of a task share their parent's.
        self.prompt_scores: dict[int, PromptTokenProb] = {}
        self.has_new_line = False
        self.last_nl_pos = 0
        self.truncated = False
        self.stop = StopType.NONE
        self.stopping_word = ""
        self.t_print_last = 0
        self.n_gen_printed = 0
        #: Tokens proposed after ``sampled``, in the batch if ``i_batch`` is set.
        self.draft: list[int] = []
        #: The draft was accepted before and only has to be computed again.
        self.draft_is_replay = False
        self.draft_checkpoint: DraftCheckpoint | None = None
        self.n_accepted_per_pos: list[int] = []
        #: Set in state WAIT_OTHER.
        self.wait: WaitFor | None = None

    def waits_for(self, other: Slot) -> bool:
        """Whether another slot is computing what this one will begin with."""
        return self.wait is not None and self.wait.slot is other

    @property
    def is_processing(self) -> bool:
        return self.state is not SlotState.IDLE

    @property
    def n_remaining(self) -> int:
        """Tokens still to be generated; -1: no limit."""
        return -1 if self.n_predict_max == -1 else self.n_predict_max - self.stats.n_gen

    @property
    def has_budget(self) -> bool:
        return self.n_predict_max == -1 or self.n_remaining > 0

    def snapshot(self, debug: bool, speculative: bool = False) -> SlotSnapshot:
        """State for GET /slots. ``debug``: with the prompt's tokens and the text."""
        out = SlotSnapshot(id=self.id, n_ctx=self.n_ctx, is_processing=self.is_processing, speculative=speculative)
        task = self.task or self.task_prev
        if task is not None:
            out.id_task = task.id
            out.params = task.params
            out.n_prompt_tokens = self.prompt.n_tokens
            out.n_prompt_tokens_processed = self.stats.n_prompt_processed
            out.n_prompt_tokens_cache = self.stats.n_prompt_cached
            out.has_next_token = self.has_next_token
            out.has_new_line = self.has_new_line
            out.n_remain = self.n_remaining
            out.n_decoded = self.stats.n_gen
            if debug:
                out.prompt = task.tokens
                out.generated = bytes(self.text.data)
        return out
