"""How long prompts may be."""

from __future__ import annotations

from collections.abc import Sequence

from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.engine.meta import ServerMeta
from llamasrv.engine.result import ErrorType


def check_prompt_sizes(meta: ServerMeta, sizes: Sequence[int]) -> None:
    """Raises ApiError (400) for the first prompt of a completion that does not fit a slot."""
    for n_tokens in sizes:
        if n_tokens >= meta.slot_n_ctx:
            message = (
                f"request ({n_tokens} tokens) exceeds the available context size ({meta.slot_n_ctx} tokens), "
                "try increasing it"
            )
            raise ApiError(ErrorType.EXCEED_CONTEXT_SIZE, message, n_prompt_tokens=n_tokens, n_ctx=meta.slot_n_ctx)


def check_sizes(meta: ServerMeta, sizes: Sequence[int], what: str) -> None:
    """Raises ApiError (400) for the first of several inputs that are only read. ``what``: name of one of them."""
    for index, n_tokens in enumerate(sizes):
        if meta.can_split_embeddings:
            if n_tokens < meta.slot_n_ctx:
                continue
            message = (
                f"{what} {index} ({n_tokens} tokens) exceeds the available context size ({meta.slot_n_ctx} tokens), "
                "try increasing it"
            )
        elif n_tokens > meta.n_ubatch:
            raise invalid_request(
                f"{what} {index} ({n_tokens} tokens) is too large to process. increase the physical batch size "
                f"(current batch size: {meta.n_ubatch})"
            )
        elif n_tokens > meta.slot_n_ctx:
            message = (
                f"{what} {index} ({n_tokens} tokens) is larger than the max context size ({meta.slot_n_ctx} tokens). "
                "skipping"
            )
        else:
            continue
        raise ApiError(ErrorType.EXCEED_CONTEXT_SIZE, message, n_prompt_tokens=n_tokens, n_ctx=meta.slot_n_ctx)
