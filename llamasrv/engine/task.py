"""What an HTTP thread asks of the main loop."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

#: Value of ``seed`` that stands for "draw one"; LLAMA_DEFAULT_SEED of llama.h.
RANDOM_SEED = 0xFFFFFFFF


class TaskType(enum.Enum):
    """The kinds of work that travel through :class:`~llamasrv.engine.queue.ServerQueue`."""

    COMPLETION = enum.auto()
    EMBEDDING = enum.auto()
    RERANK = enum.auto()
    DECISION = enum.auto()
    INFILL = enum.auto()
    CANCEL = enum.auto()
    CONTROL = enum.auto()
    NEXT_RESPONSE = enum.auto()
    METRICS = enum.auto()
    SLOT_GET = enum.auto()
    SLOT_SAVE = enum.auto()
    SLOT_RESTORE = enum.auto()
    SLOT_ERASE = enum.auto()
    GET_LORA = enum.auto()
    SET_LORA = enum.auto()


#: Tasks whose result is text sampled from logits.
GENERATING = frozenset({TaskType.COMPLETION, TaskType.INFILL})
#: Tasks that may run while the main loop is inside a native call, since they only read.
READ_ONLY = frozenset({TaskType.METRICS, TaskType.SLOT_GET})
#: Tasks that need a named slot to be free, but do not occupy it.
SLOT_ACTIONS = frozenset({TaskType.SLOT_SAVE, TaskType.SLOT_RESTORE, TaskType.SLOT_ERASE})
#: Tasks that occupy a slot.
NEEDS_SLOT = frozenset({TaskType.COMPLETION, TaskType.EMBEDDING, TaskType.RERANK, TaskType.DECISION, TaskType.INFILL})


@dataclass(slots=True)
class SamplingParams:
    """Settings of one sampler; names and defaults of ``common_params_sampling``.

    Floats hold float32 values: what is echoed to the client is what the sampler uses.
    """

    seed: int = RANDOM_SEED
    n_prev: int = 64
    n_probs: int = 0
    min_keep: int = 0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typ_p: float = 1.0
    temp: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    penalty_last_n: int = 64
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    top_n_sigma: float = -1.0
    ignore_eos: bool = False
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    samplers: tuple[str, ...] = ()
    #: ``(kind, GBNF)``; kind is "none", "user", "output_format" or "tool_calls".
    grammar: tuple[str, str] = ("none", "")
    grammar_lazy: bool = False
    #: ``(type, value, token)`` per trigger; type as in the original's JSON.
    grammar_triggers: tuple[tuple[int, str, int], ...] = ()
    preserved_tokens: frozenset[int] = frozenset()
    #: ``(token, bias)``; ``-inf`` bans a token.
    logit_bias: tuple[tuple[int, float], ...] = ()
    generation_prompt: str = ""
    reasoning_budget_tokens: int = -1
    reasoning_budget_start: tuple[int, ...] = ()
    reasoning_budget_end: tuple[tuple[int, ...], ...] = ()
    reasoning_budget_forced: tuple[int, ...] = ()
    reasoning_budget_message: str = ""
    reasoning_control: bool = False
    backend_sampling: bool = False


@dataclass(slots=True)
class TaskParams:
    """Settings of one request. Nobody changes them once the task is posted."""

    stream: bool = False
    include_usage: bool = False
    cache_prompt: bool = True
    return_tokens: bool = False
    return_progress: bool = False
    sse_ping_interval: int = 30
    n_keep: int = 0
    n_discard: int = 0
    n_predict: int = -1
    n_indent: int = 0
    n_cmpl: int = 1
    n_cache_reuse: int = 0
    t_max_predict_ms: int = -1
    #: Adapter index -> scale; None: the server's own settings; adapters left out are off.
    lora: dict[int, float] | None = None
    antiprompt: tuple[str, ...] = ()
    response_fields: tuple[str, ...] = ()
    timings_per_token: bool = False
    post_sampling_probs: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculative_types: str = "none"
    verbose: bool = False
    chat_format: str = "Content-only"
    reasoning_format: str = "none"
    embd_normalize: int = 2


@dataclass(slots=True)
class SlotAction:
    """Payload of SLOT_SAVE, SLOT_RESTORE and SLOT_ERASE."""

    id_slot: int
    filename: str = ""
    filepath: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Payload of DECISION: where the model's output of each option is read.

    One of three is given. ``labels``: logits of these tokens at the end of the prompt; with ``label_groups`` (number of
    labels per option) the best of a group counts. ``markers``: value ``column`` of the embeddings at these prompt
    positions; with a ``pointer`` position the embeddings are [q | k], and the output is the scaled dot product of its q
    with each marker's k. ``order``: for a joint head, the role of every prompt token (``enum llama_decision_order``);
    the outputs are the first values of the first ``n_scores`` embeddings.
    """

    labels: tuple[int, ...] = ()
    label_groups: tuple[int, ...] = ()
    markers: tuple[int, ...] = ()
    column: int = 0
    pointer: int = -1
    order: tuple[int, ...] = ()
    n_scores: int = 0

    @property
    def first_read(self) -> int:
        """First prompt position whose embedding is read; -1: none by position. From there on one batch has them all."""
        if not self.markers:
            return self.pointer
        first = min(self.markers)
        return first if self.pointer < 0 else min(first, self.pointer)


@dataclass(slots=True)
class Posting:
    """What the tasks that were posted together share: they are one request."""

    #: Whether one of them has got a slot.
    is_started: bool = False


@dataclass(slots=True)
class Task:
    """One unit of work.

    ``id`` comes from :meth:`ServerQueue.get_new_id`; results are routed by it. ``index`` is the place of the
    task's result among those of its request.
    """

    id: int
    type: TaskType
    index: int = 0
    id_target: int = -1
    id_slot: int = -1
    id_parent: int = -1
    child_tasks: list[Task] = field(default_factory=list)
    #: On a parent whose children have prompts of their own: so many tokens at the beginning are the same. 0: all are.
    n_tokens_shared: int = 0
    tokens: list[int] = field(default_factory=list)
    #: Numbers of tokens before which a user message begins (chat), ascending.
    user_starts: tuple[int, ...] = ()
    params: TaskParams = field(default_factory=TaskParams)
    #: Ask for the log-probability of every prompt token, with so many of the most likely ones; -1: do not.
    prompt_logprobs: int = -1
    decision: Decision | None = None
    slot_action: SlotAction | None = None
    metrics_reset_bucket: bool = False
    set_lora: dict[int, float] | None = None
    control_action: str = ""
    control_cmpl_id: str = ""
    #: Name by which CONTROL tasks and logs refer to the request.
    cmpl_id: str = ""
    #: Place in the order of arrival, and time of it (microseconds of the monotonic clock), given by the queue.
    arrival: int = -1
    t_posted: int = 0
    was_deferred: bool = False
    posting: Posting = field(default_factory=Posting)
    #: How many younger tasks started before this one because they named their slot.
    n_passed: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_parent(self) -> bool:
        return bool(self.child_tasks)

    @property
    def is_child(self) -> bool:
        return self.id_parent != -1

    @property
    def need_sampling(self) -> bool:
        return self.type in GENERATING

    @property
    def need_logits(self) -> bool:
        if self.decision is not None:
            return bool(self.decision.labels)
        return self.type in GENERATING

    @property
    def need_embd(self) -> bool:
        if self.decision is not None:
            return bool(self.decision.markers or self.decision.order)
        return self.type in (TaskType.EMBEDDING, TaskType.RERANK)

    @property
    def is_joint(self) -> bool:
        """Whether the model looks at all of a batch at once, so that nothing else may be in it."""
        return self.decision is not None and bool(self.decision.order)

    @property
    def is_stateless(self) -> bool:
        """Whether the task neither reads nor leaves a reusable prompt (embedding, rerank)."""
        return self.type in (TaskType.EMBEDDING, TaskType.RERANK)

    @property
    def reuses_prompt(self) -> bool:
        """Whether the prompt's beginning may be taken from what is computed already."""
        return self.params.cache_prompt and not self.is_stateless and self.prompt_logprobs < 0

    def add_child(self, id_child: int) -> None:
        """Add one more completion of the same prompt; a fixed seed moves on by one per child."""
        sampling = self.params.sampling
        if sampling.seed != RANDOM_SEED:
            sampling = replace(sampling, seed=(sampling.seed + len(self.child_tasks) + 1) & 0xFFFFFFFF)
        self.child_tasks.append(
            Task(
                id=id_child,
                type=self.type,
                id_parent=self.id,
                tokens=self.tokens,
                user_starts=self.user_starts,
                params=replace(self.params, sampling=sampling),
                prompt_logprobs=self.prompt_logprobs,
                cmpl_id=self.cmpl_id,
            )
        )

    def ids(self) -> list[int]:
        """Ids of the task and its children."""
        return [self.id, *(child.id for child in self.child_tasks)]
