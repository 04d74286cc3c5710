"""Tiny models of kinds that only the tests of speculation, decisions and adapters need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from make_tiny_models import Builder, decoder_keys, embedding_tables, spm_vocabulary

N_EMBD, N_HEAD, N_HEAD_KV, N_FF = 64, 2, 1, 96
N_EMBD_HEAD = N_EMBD // N_HEAD
#: Of the gated delta net: state per head, heads of keys, heads of values.
D_STATE, N_GROUP, N_VALUE_HEADS = 16, 2, 4


def gated_attention(build: Builder, block: str) -> None:
    build.ones(f"{block}.attn_norm", N_EMBD)
    build.ones(f"{block}.post_attention_norm", N_EMBD)
    build.matrix(f"{block}.attn_q", 2 * N_EMBD, N_EMBD, 2.0)
    build.matrix(f"{block}.attn_k", N_HEAD_KV * N_EMBD_HEAD, N_EMBD, 2.0)
    build.matrix(f"{block}.attn_v", N_HEAD_KV * N_EMBD_HEAD, N_EMBD)
    build.matrix(f"{block}.attn_output", N_EMBD, N_EMBD, 2.0)
    for part in ("attn_q_norm", "attn_k_norm"):
        build.ones(f"{block}.{part}", N_EMBD_HEAD)


def delta_net(build: Builder, block: str) -> None:
    n_key, n_value = D_STATE * N_GROUP, D_STATE * N_VALUE_HEADS
    build.ones(f"{block}.attn_norm", N_EMBD)
    build.ones(f"{block}.post_attention_norm", N_EMBD)
    build.matrix(f"{block}.attn_qkv", 2 * n_key + n_value, N_EMBD)
    build.matrix(f"{block}.attn_gate", n_value, N_EMBD)
    build.put(f"{block}.ssm_conv1d.weight", build.normal(2 * n_key + n_value, 4, scale=0.7))
    build.put(f"{block}.ssm_dt.bias", build.normal(N_VALUE_HEADS, scale=0.5))
    build.put(f"{block}.ssm_a", -np.linspace(0.05, 1.0, N_VALUE_HEADS, dtype=np.float32))
    build.matrix(f"{block}.ssm_beta", N_VALUE_HEADS, N_EMBD)
    build.matrix(f"{block}.ssm_alpha", N_VALUE_HEADS, N_EMBD)
    build.ones(f"{block}.ssm_norm", D_STATE)
    build.matrix(f"{block}.ssm_out", N_EMBD, n_value, 2.0)


def qwen35_keys(build: Builder, n_layer: int) -> None:
    build.keys(decoder_keys(N_EMBD, n_layer, N_HEAD, N_HEAD_KV, N_FF))
    build.keys(
        {
            "attention.key_length": N_EMBD_HEAD,
            "attention.value_length": N_EMBD_HEAD,
            "rope.dimension_count": N_EMBD_HEAD,
            "rope.freq_base": 10000.0,
            "full_attention_interval": 2,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": D_STATE * N_VALUE_HEADS,
            "ssm.state_size": D_STATE,
            "ssm.time_step_rank": N_VALUE_HEADS,
            "ssm.group_count": N_GROUP,
        }
    )
    build.writer.add_array(f"{build.arch}.rope.dimension_sections", [6, 5, 5, 0])


def backbone(build: Builder) -> None:
    """A recurrent layer below one of attention."""
    delta_net(build, "blk.0")
    feed_forward(build, "blk.0")
    gated_attention(build, "blk.1")
    feed_forward(build, "blk.1")


def feed_forward(build: Builder, block: str) -> None:
    build.matrix(f"{block}.ffn_gate", N_FF, N_EMBD)
    build.matrix(f"{block}.ffn_up", N_FF, N_EMBD)
    build.matrix(f"{block}.ffn_down", N_EMBD, N_FF, 2.0)


def make_mtp(path: Path) -> Path:
    """Half recurrent, with a head of its own that predicts one token further (draft-mtp)."""
    build = Builder(path, "qwen35", "tiny-mtp", seed=101)
    vocab = spm_vocabulary()
    qwen35_keys(build, 3)
    build.keys({"nextn_predict_layers": 1, "vocab_size": len(vocab.tokens)})
    vocab.write(build.writer)
    embedding_tables(build, vocab, N_EMBD, spread=3.0)
    backbone(build)
    gated_attention(build, "blk.2")
    feed_forward(build, "blk.2")
    build.matrix("blk.2.nextn.eh_proj", N_EMBD, 2 * N_EMBD)
    build.ones("blk.2.nextn.enorm", N_EMBD)
    build.ones("blk.2.nextn.hnorm", N_EMBD)
    build.finish()
    return path


def make_clef(path: Path) -> Path:
    """A decision model whose joint head scores every option of a batch."""
    build = Builder(path, "clef", "tiny-clef", seed=103)
    vocab = spm_vocabulary()
    qwen35_keys(build, 2)
    build.keys(
        {
            "vocab_size": len(vocab.tokens),
            "attention.layer_norm_epsilon": 1e-5,
            "decision.block_count": 1,
            "decision.routing_block_count": 1,
            "decision.head_count": 2,
        }
    )
    build.writer.add_string("clef.decision.type", "clef")
    vocab.write(build.writer)
    build.writer.add_chat_template([{"name": "systemone", "template": "{{ state }}"}])
    embedding_tables(build, vocab, N_EMBD, spread=3.0)
    backbone(build)
    _joint_head(build, 32)
    build.finish()
    return path


def _joint_head(build: Builder, n: int) -> None:
    def linear(name: str, n_out: int, n_in: int) -> None:
        build.matrix(name, n_out, n_in)
        build.put(f"{name}.bias", build.normal(n_out, scale=0.1))

    def attention(name: str) -> None:
        for part in "qkvo":
            linear(f"{name}_{part}", n, n)

    for layer, parts in enumerate((("cross_attn_norm_kv",), ("attn_norm",))):
        block = f"dec.blk.{layer}"
        for part in (*parts, "cross_attn_norm", "ffn_norm"):
            build.layer_norm(f"{block}.{part}", n)
        if layer == 1:
            attention(f"{block}.attn")
        attention(f"{block}.cross_attn")
        linear(f"{block}.ffn_up", 2 * n, n)
        linear(f"{block}.ffn_down", n, 2 * n)
    build.layer_norm("decision.hidden_norm", N_EMBD)
    for part in ("option_summary_norm", "field_norm", "option_norm"):
        build.layer_norm(f"decision.{part}", n)
    for part in ("memory", "question", "option_question", "global", "option_context", "option_lexical"):
        build.matrix(f"decision.proj_{part}", n, N_EMBD)
    build.put("decision.scales", np.array([1.0, 2.0, 3.0], dtype=np.float32))
    build.put("token_types.weight", build.normal(3, n))
    linear("decision.scorer", n, 4 * n)
    linear("decision.scorer_out", 1, n)


def make_adapter(path: Path, seed: int, strings: Mapping[str, str]) -> Path:
    """A LoRA adapter for tiny-llama with these texts in its metadata."""
    rank = 4
    build = Builder(path, "llama", path.stem, seed)
    build.writer.add_type("adapter")
    build.writer.add_string("adapter.type", "lora")
    build.writer.add_float32("adapter.lora.alpha", float(rank))
    for key, value in strings.items():
        build.writer.add_string(key, value)
    build.put("blk.0.attn_output.weight.lora_a", build.normal(rank, N_EMBD, scale=N_EMBD**-0.5))
    build.put("blk.0.attn_output.weight.lora_b", build.normal(N_EMBD, rank, scale=2.0))
    build.close()
    return path


def make_control_vector(path: Path, n_embd: int, name: str = "direction.1") -> Path:
    """A push in the hidden state after the first layer."""
    build = Builder(path, "controlvector", path.stem, seed=107)
    build.put(name, build.normal(n_embd, scale=2.0))
    build.close()
    return path
