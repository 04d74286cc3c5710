"""libllama as Python objects. Nothing else in the product touches the native module.

Every object owns its native handle: use it as a context manager or call ``close()``; after that (or after the model it
belongs to was closed) it raises :class:`ClosedError`. The order of closing does not matter.
"""

from __future__ import annotations

from llamasrv.binding import context, log, vocab
from llamasrv.binding.batch import Batch
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
    STATE_ON_DEVICE,
    STATE_PARTIAL_ONLY,
    Context,
)
from llamasrv.binding.errors import ClosedError, NativeError
from llamasrv.binding.grammar import check_grammar, json_schema_to_grammar
from llamasrv.binding.memory import Memory
from llamasrv.binding.model import Model
from llamasrv.binding.params import Params, backend_free, backend_init, build_info, build_number, init
from llamasrv.binding.sampler import Sampler, sample_many, token_probs
from llamasrv.binding.vocab import Vocab

__all__ = [
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
    "ClosedError",
    "Context",
    "Memory",
    "Model",
    "NativeError",
    "Params",
    "Sampler",
    "Vocab",
    "backend_free",
    "backend_init",
    "build_info",
    "build_number",
    "check_grammar",
    "context",
    "init",
    "json_schema_to_grammar",
    "log",
    "sample_many",
    "token_probs",
    "vocab",
]
