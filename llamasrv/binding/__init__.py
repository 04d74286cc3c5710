"""libllama as Python objects. Nothing else in the product touches the native module.

Every object owns its native handle: use it as a context manager or call ``close()``; after that (or after the model it
belongs to was closed) it raises :class:`ClosedError`. The order of closing does not matter.
"""

from __future__ import annotations

from llamasrv.binding import context, heap, log, vocab
from llamasrv.binding.batch import (
    ORDER_NONE,
    ORDER_OPTION,
    ORDER_QUESTION_CHOICE,
    ORDER_QUESTION_NOUL,
    ORDER_QUESTION_SCORE,
    Batch,
)
from llamasrv.binding.chat import (
    ChatDelta,
    ChatFormatError,
    ChatMessage,
    ChatRequest,
    ChatSession,
    ChatTemplates,
    GrammarTrigger,
    MessageDelimiter,
    MessageSpan,
    Role,
    ToolCall,
)
from llamasrv.binding.context import (
    POOLING_CLS,
    POOLING_LAST,
    POOLING_MEAN,
    POOLING_NONE,
    POOLING_RANK,
    POOLING_UNSPECIFIED,
    SEQ_RM_FULL,
    SEQ_RM_NO,
    SEQ_RM_PART,
    SEQ_RM_RS,
    Context,
)
from llamasrv.binding.draft_context import DraftContext, PairedMemory
from llamasrv.binding.errors import ClosedError, NativeError
from llamasrv.binding.grammar import check_grammar, json_schema_to_grammar
from llamasrv.binding.logprobs import logprobs
from llamasrv.binding.memory import Memory
from llamasrv.binding.model import Model
from llamasrv.binding.params import Params, backend_free, backend_init, build_info, build_number, init
from llamasrv.binding.sampler import Sampler, sample_many, set_sampler, token_probs
from llamasrv.binding.seq_state import STATE_ON_DEVICE, STATE_PARTIAL_ONLY
from llamasrv.binding.speculative import (
    DraftRequest,
    Speculative,
    Verified,
    VerifyRequest,
    output_limits,
    speculative_types,
)
from llamasrv.binding.template import Template
from llamasrv.binding.vocab import Vocab

__all__ = [
    "ORDER_NONE",
    "ORDER_OPTION",
    "ORDER_QUESTION_CHOICE",
    "ORDER_QUESTION_NOUL",
    "ORDER_QUESTION_SCORE",
    "POOLING_CLS",
    "POOLING_LAST",
    "POOLING_MEAN",
    "POOLING_NONE",
    "POOLING_RANK",
    "POOLING_UNSPECIFIED",
    "SEQ_RM_FULL",
    "SEQ_RM_NO",
    "SEQ_RM_PART",
    "SEQ_RM_RS",
    "STATE_ON_DEVICE",
    "STATE_PARTIAL_ONLY",
    "Batch",
    "ChatDelta",
    "ChatFormatError",
    "ChatMessage",
    "ChatRequest",
    "ChatSession",
    "ChatTemplates",
    "ClosedError",
    "Context",
    "DraftContext",
    "DraftRequest",
    "GrammarTrigger",
    "Memory",
    "MessageDelimiter",
    "MessageSpan",
    "Model",
    "NativeError",
    "PairedMemory",
    "Params",
    "Role",
    "Sampler",
    "Speculative",
    "Template",
    "ToolCall",
    "Verified",
    "VerifyRequest",
    "Vocab",
    "backend_free",
    "backend_init",
    "build_info",
    "build_number",
    "check_grammar",
    "context",
    "heap",
    "init",
    "json_schema_to_grammar",
    "log",
    "logprobs",
    "output_limits",
    "sample_many",
    "set_sampler",
    "speculative_types",
    "token_probs",
    "vocab",
]
