"""Facts about the loaded model that HTTP threads may read at any time, asleep or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerMeta:
    build_info: str
    model_name: str
    model_aliases: tuple[str, ...]
    model_tags: tuple[str, ...]
    model_path: str
    model_ftype: str
    model_n_params: int
    #: Bytes of all tensors.
    model_size: int
    vocab_type: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    #: Context of one slot, in tokens.
    slot_n_ctx: int
    pooling_type: int
    bos_token: str
    eos_token: str
    chat_template: str
    chat_template_tool_use: str
    chat_template_caps: dict[str, bool] = field(default_factory=dict)
    #: Biases that keep end-of-generation tokens from being sampled, for ``ignore_eos``.
    logit_bias_eog: tuple[tuple[int, float], ...] = ()
    #: Values of an output embedding.
    n_embd_out: int = 0
    #: Tokens that a prompt computed in one piece may have.
    n_ubatch: int = 512
    #: Whether an embedding task's prompt may be computed in several pieces.
    can_split_embeddings: bool = False
    #: Text with {query} and {document} that the model wants to rate; empty: the two are joined by separators.
    rerank_template: str = ""
    #: Template of a decision model's prompt, and the "<arch>.decision.*" metadata by what follows; empty: it is none.
    systemone_template: str = ""
    decision: Mapping[str, str] = field(default_factory=dict)
    #: Output modalities for GET /models.
    output_modalities: tuple[str, ...] = ("text",)
