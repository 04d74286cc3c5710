"""Facts about the loaded model that HTTP threads may read at any time, asleep or not."""

from __future__ import annotations

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
    #: Output modalities for GET /models.
    output_modalities: tuple[str, ...] = ("text",)
