"""What the main loop hands back to an HTTP thread."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llamasrv.engine.metrics import ServerMetrics
from llamasrv.engine.stats import SlotStats
from llamasrv.engine.task import TaskParams

#: What requests are told that cannot be served to their end.
SHUTTING_DOWN = "The server is shutting down"


class StopType(enum.Enum):
    """Why generation ended; the value is the name clients see."""

    NONE = "none"
    EOS = "eos"
    WORD = "word"
    LIMIT = "limit"


class ErrorType(enum.Enum):
    """Class of an error: ``(name in the JSON, HTTP status)``."""

    INVALID_REQUEST = ("invalid_request_error", 400)
    AUTHENTICATION = ("authentication_error", 401)
    SERVER = ("server_error", 500)
    NOT_FOUND = ("not_found_error", 404)
    PERMISSION = ("permission_error", 403)
    UNAVAILABLE = ("unavailable_error", 503)
    TIMEOUT = ("timeout_error", 408)
    NOT_SUPPORTED = ("not_supported_error", 501)
    EXCEED_CONTEXT_SIZE = ("exceed_context_size_error", 400)

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def status(self) -> int:
        return self.value[1]


@dataclass(slots=True)
class Result:
    """Base of all results. ``id``: the task answered; ``index``: its place in the request."""

    id: int
    index: int = 0

    @property
    def is_error(self) -> bool:
        return False

    @property
    def is_stop(self) -> bool:
        """Whether this is the last result of its task."""
        return True


@dataclass(slots=True)
class TokenProb:
    """A sampled token with its probability and the most likely candidates.

    ``piece`` and the candidates' pieces are raw bytes; probabilities are in 0..1.
    """

    token: int
    piece: bytes
    prob: float
    top: list[tuple[int, bytes, float]] = field(default_factory=list)


@dataclass(slots=True)
class PromptTokenProb:
    """A token of the prompt, the natural logarithm of its probability, and the most likely ``(token, logarithm)``."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class PromptProgress:
    """How far prompt processing has come, in tokens."""

    total: int
    cache: int
    processed: int
    time_ms: int


@dataclass(slots=True)
class PartialResult(Result):
    """A piece of a streamed completion.

    ``content`` ends on a whole UTF-8 character unless the model itself produced broken bytes. ``is_begin`` marks
    the result that only says that work on the prompt has started: nothing is wrong with the request.
    """

    content: bytes = b""
    tokens: list[int] = field(default_factory=list)
    n_decoded: int = 0
    n_prompt_tokens: int = 0
    n_prompt_tokens_cache: int = 0
    is_begin: bool = False
    progress: PromptProgress | None = None
    prob: TokenProb | None = None
    #: Sent once, before the first token, if the task asked for it; from the second prompt token on.
    prompt_probs: list[PromptTokenProb] | None = None
    stats: SlotStats | None = None
    post_sampling_probs: bool = False

    @property
    def is_stop(self) -> bool:
        return False


@dataclass(slots=True)
class FinalResult(Result):
    """The end of a completion. When streaming, ``content`` and ``tokens`` are empty: they went out before."""

    id_slot: int = -1
    content: bytes = b""
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    params: TaskParams = field(default_factory=TaskParams)
    stats: SlotStats = field(default_factory=SlotStats)
    truncated: bool = False
    has_new_line: bool = False
    stop: StopType = StopType.NONE
    stopping_word: str = ""
    n_decoded: int = 0
    n_prompt_tokens: int = 0
    n_prompt_tokens_cache: int = 0
    n_tokens_cached: int = 0
    probs: list[TokenProb] = field(default_factory=list)
    #: From the second prompt token on, if the task asked for it and does not stream.
    prompt_probs: list[PromptTokenProb] = field(default_factory=list)


@dataclass(slots=True)
class ErrorResult(Result):
    """A failure. The two counts are given for EXCEED_CONTEXT_SIZE."""

    type: ErrorType = ErrorType.SERVER
    message: str = ""
    n_prompt_tokens: int = 0
    n_ctx: int = 0

    @property
    def is_error(self) -> bool:
        return True


@dataclass(slots=True)
class MetricsResult(Result):
    """State of the counters at one moment."""

    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    n_processing_slots: int = 0
    n_tasks_deferred: int = 0


@dataclass(slots=True)
class SlotSnapshot:
    """One slot as GET /slots shows it. ``params`` is None if the slot never had a task."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False
    id_task: int = -1
    params: TaskParams | None = None
    n_prompt_tokens: int = 0
    n_prompt_tokens_processed: int = 0
    n_prompt_tokens_cache: int = 0
    has_next_token: bool = True
    has_new_line: bool = False
    n_remain: int = -1
    n_decoded: int = 0
    #: Only with LLAMA_SERVER_SLOTS_DEBUG: token ids of the prompt and the text so far.
    prompt: list[int] | None = None
    generated: bytes | None = None


@dataclass(slots=True)
class SlotsResult(Result):
    slots: list[SlotSnapshot] = field(default_factory=list)
    n_idle_slots: int = 0


@dataclass(slots=True)
class SlotSaveLoadResult(Result):
    """Outcome of SLOT_SAVE and SLOT_RESTORE; sizes in bytes, time in milliseconds."""

    id_slot: int = -1
    filename: str = ""
    is_save: bool = True
    n_tokens: int = 0
    n_bytes: int = 0
    t_ms: float = 0.0


@dataclass(slots=True)
class SlotEraseResult(Result):
    id_slot: int = -1
    n_erased: int = 0


@dataclass(slots=True)
class EmbeddingResult(Result):
    """One vector, or one per token when the model does not pool."""

    embedding: list[list[float]] = field(default_factory=list)
    n_tokens: int = 0


@dataclass(slots=True)
class RerankResult(Result):
    score: float = -1e6
    n_tokens: int = 0


@dataclass(slots=True)
class DecisionResult(Result):
    """Raw outputs of the model, one per option."""

    scores: list[float] = field(default_factory=list)
    n_tokens: int = 0


@dataclass(slots=True)
class ControlResult(Result):
    success: bool = False
    message: str = ""


@dataclass(slots=True)
class LoraInfo:
    id: int
    path: str
    scale: float
    task_name: str = ""
    prompt_prefix: str = ""
    alora_invocation_string: bytes = b""
    alora_invocation_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class GetLoraResult(Result):
    loras: list[LoraInfo] = field(default_factory=list)


@dataclass(slots=True)
class SetLoraResult(Result):
    pass
