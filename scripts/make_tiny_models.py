"""Makes the tiny GGUF models of the tests: random but fixed weights, a few hundred KB each.

    python scripts/make_tiny_models.py DIR

The weights are scaled so that greedy text varies with the whole context and rarely comes to an end of its own.
The bytes depend on nothing but this file (numpy's legacy generator promises a frozen stream) and the gguf package.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

#: Context the models claim to be trained for, in tokens.
N_CTX_TRAIN = 16384
#: Positions a BERT-like model knows; each costs a row of weights.
N_CTX_BERT = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: What the vocabularies know as whole words.
WORDS = """
    the and of to in is it you that he was for on are with as his they at be this from have or one had by but not what
    all were we when your can said there use each she do how their if will up other about out many then them these so
    some her would make like him into time look two more write go see no way could my than first water been call who
    now find long down day did get come made may part over new sound Tom Nora Once He She It And But
"""
OTHER_CHARACTERS = "éèüöäñçßøλπя中文日本한—–“”…€→✓😀"

CONTROL = int(gguf.TokenType.CONTROL)
NORMAL = int(gguf.TokenType.NORMAL)
BYTE = int(gguf.TokenType.BYTE)
UNKNOWN = int(gguf.TokenType.UNKNOWN)
UNUSED = int(gguf.TokenType.UNUSED)
USER_DEFINED = int(gguf.TokenType.USER_DEFINED)


def train_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent pair first, until each word is one piece."""
    pieces = [list(word) for word in words]
    merges: list[tuple[str, str]] = []
    while True:
        pairs = Counter(pair for word in pieces for pair in itertools.pairwise(word))
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in pieces:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1


class Vocabulary:
    """Tokens of one model. ``weight`` scales a token's row of the output matrix (0: practically never sampled)."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.tokens: list[str] = []
        self.types: list[int] = []
        self.weight: list[float] = []
        self.merges: list[tuple[str, str]] = []
        #: Role ("bos", "fim_pre", ...) -> token id.
        self.special: dict[str, int] = {}
        self.flags: dict[str, bool] = {}

    def add(self, token: str, kind: int = NORMAL, weight: float = 1.0, role: str = "") -> None:
        if token not in self.tokens:
            self.tokens.append(token)
            self.types.append(kind)
            self.weight.append(weight)
        if role:
            self.special[role] = self.tokens.index(token)

    def pad(self, multiple: int = 32) -> None:
        """Quantized matrices need whole blocks."""
        while len(self.tokens) % multiple:
            self.add(f"<unused{len(self.tokens)}>", UNUSED, 0.0)

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.model == "llama":
            # a merge is tried the sooner the higher its score
            writer.add_token_scores([-float(i) if kind == NORMAL else 0.0 for i, kind in enumerate(self.types)])
        if self.merges:
            writer.add_token_merges([" ".join(merge) for merge in self.merges])
        for role, token in self.special.items():
            name = "seperator" if role == "sep" else {"pad": "padding", "unk": "unknown"}.get(role, role)
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        for name, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)


def spm_vocabulary() -> Vocabulary:
    """SentencePiece-like, unknown characters fall back to bytes."""
    vocab = Vocabulary("llama")
    vocab.add("<unk>", UNKNOWN, 0.0, "unk")
    vocab.add("<s>", CONTROL, 0.0, "bos")
    vocab.add("</s>", CONTROL, 0.7, "eos")
    for byte in range(256):
        vocab.add(f"<0x{byte:02X}>", BYTE, 1.0 if byte == 10 else 0.6)
    vocab.add("<|im_start|>", CONTROL, 0.0)
    vocab.add("<|im_end|>", CONTROL, 0.6, "eot")
    for left, right in train_merges(["▁" + word for word in WORDS.split()]):
        vocab.add(left + right)
    vocab.add("▁", weight=0.5)
    for character in string.ascii_letters + string.digits + string.punctuation:
        vocab.add(character, weight=0.8)
    for character in OTHER_CHARACTERS:
        vocab.add(character, weight=0.7)
    vocab.pad()
    vocab.flags = {"add_bos_token": True, "add_eos_token": False, "add_space_prefix": True}
    return vocab


def gpt2_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (256 + n for n in range(256))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def bpe_vocabulary() -> Vocabulary:
    """Byte-level BPE with the tokens of fill-in-the-middle."""
    vocab = Vocabulary("gpt2")
    for byte, character in enumerate(gpt2_alphabet()):
        vocab.add(character, weight=1.0 if byte == 10 or 32 < byte < 127 else 0.6)
    vocab.merges = train_merges(["Ġ" + word for word in WORDS.split()])
    for left, right in vocab.merges:
        vocab.add(left + right)
    vocab.add("<|endoftext|>", CONTROL, 0.7, "eos")
    vocab.special["bos"] = vocab.special["eos"]
    for role in ("pre", "suf", "mid", "pad", "rep", "sep"):
        vocab.add(f"<|test_fim_{role}|>", CONTROL, 0.0, f"fim_{role}")
    vocab.pad()
    vocab.flags = {"add_bos_token": True, "add_eos_token": False}
    return vocab


def wordpiece_vocabulary() -> Vocabulary:
    """Lower-case WordPiece as BERT has it; "▁" marks the start of a word."""
    vocab = Vocabulary("bert")
    vocab.add("[PAD]", CONTROL, role="pad")
    vocab.add("[UNK]", UNKNOWN, role="unk")
    vocab.add("[CLS]", CONTROL, role="bos")
    vocab.add("[SEP]", CONTROL, role="sep")
    vocab.add("[MASK]", CONTROL, role="mask")
    for character in string.ascii_lowercase + string.digits + string.punctuation:
        vocab.add("▁" + character)
        vocab.add(character)
    for word in WORDS.split():
        vocab.add("▁" + word.lower())
    vocab.special["eos"] = vocab.special["sep"]
    vocab.pad()
    return vocab


class Builder:
    """One GGUF file in the making: metadata, and tensors drawn from a generator with a fixed seed."""

    def __init__(self, path: Path, arch: str, name: str, seed: int) -> None:
        self.path = path
        self.arch = arch
        self.partial = path.with_name(f".{path.name}.{os.getpid()}")
        self.writer = gguf.GGUFWriter(self.partial, arch)
        self.writer.add_name(name)
        self.random = np.random.RandomState(seed)

    def keys(self, values: Mapping[str, int | float | bool]) -> None:
        """Metadata under the architecture's own prefix; the type follows from the value's."""
        for name, value in values.items():
            key = f"{self.arch}.{name}"
            if isinstance(value, bool):
                self.writer.add_bool(key, value)
            elif isinstance(value, int):
                self.writer.add_uint32(key, value)
            else:
                self.writer.add_float32(key, value)

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        return (self.random.standard_normal(shape) * scale).astype(np.float32)

    def put(self, name: str, data: Array) -> Array:
        self.writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))
        return data

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> Array:
        """A random map that keeps the size of its input, times ``gain``."""
        return self.put(f"{name}.weight", self.normal(n_out, n_in, scale=gain * n_in**-0.5))

    def ones(self, name: str, n: int, value: float = 1.0) -> None:
        self.put(f"{name}.weight", np.full(n, value, dtype=np.float32))

    def layer_norm(self, name: str, n: int) -> None:
        self.ones(name, n)
        self.put(f"{name}.bias", self.normal(n, scale=0.02))

    def finish(self) -> None:
        self.writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        self.close()

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        os.replace(self.partial, self.path)


def embedding_tables(build: Builder, vocab: Vocabulary, n_embd: int, spread: float) -> None:
    """Input embeddings of unit size per element, and output rows that give logits a deviation of ``spread``."""
    build.put("token_embd.weight", build.normal(len(vocab.tokens), n_embd))
    rows = build.normal(len(vocab.tokens), n_embd, scale=spread * n_embd**-0.5)
    build.put("output.weight", rows * np.array(vocab.weight, dtype=np.float32)[:, None])
    build.ones("output_norm", n_embd)


def attention(build: Builder, block: str, n_embd: int, n_head: int, n_head_kv: int, gain: float = 2.0) -> None:
    head = n_embd // n_head
    build.ones(f"{block}.attn_norm", n_embd)
    # sharp attention: what stands far back counts as well
    build.matrix(f"{block}.attn_q", n_embd, n_embd, 2.0)
    build.matrix(f"{block}.attn_k", n_head_kv * head, n_embd, 2.0)
    build.matrix(f"{block}.attn_v", n_head_kv * head, n_embd)
    build.matrix(f"{block}.attn_output", n_embd, n_embd, gain)


def feed_forward(build: Builder, block: str, n_embd: int, n_ff: int, gain: float = 2.0) -> None:
    build.ones(f"{block}.ffn_norm", n_embd)
    build.matrix(f"{block}.ffn_gate", n_ff, n_embd)
    build.matrix(f"{block}.ffn_up", n_ff, n_embd)
    build.matrix(f"{block}.ffn_down", n_embd, n_ff, gain)


def decoder_keys(n_embd: int, n_layer: int, n_head: int, n_head_kv: int, n_ff: int) -> dict[str, int | float | bool]:
    return {
        "context_length": N_CTX_TRAIN,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def llama(
    path: Path,
    name: str,
    vocab: Vocabulary,
    seed: int,
    n_layer: int = 2,
    template: str = "",
    extra: Callable[[Builder], None] = lambda build: None,
) -> None:
    n_embd, n_head, n_head_kv, n_ff = 64, 2, 1, 96
    build = Builder(path, "llama", name, seed)
    extra(build)
    build.keys(decoder_keys(n_embd, n_layer, n_head, n_head_kv, n_ff))
    build.keys({"rope.dimension_count": n_embd // n_head, "vocab_size": len(vocab.tokens)})
    vocab.write(build.writer)
    if template:
        build.writer.add_chat_template(template)
    embedding_tables(build, vocab, n_embd, spread=3.0)
    for layer in range(n_layer):
        attention(build, f"blk.{layer}", n_embd, n_head, n_head_kv)
        feed_forward(build, f"blk.{layer}", n_embd, n_ff)
    build.finish()


def tiny_llama(path: Path) -> None:
    llama(path, "tiny-llama", spm_vocabulary(), seed=11, template=CHAT_TEMPLATE)


def tiny_draft(path: Path) -> None:
    """The first layer of tiny-llama alone: the same seed draws the same tables and the same first block."""
    llama(path, "tiny-draft", spm_vocabulary(), seed=11, n_layer=1)


def tiny_bpe(path: Path) -> None:
    vocab = bpe_vocabulary()
    llama(path, "tiny-bpe", vocab, seed=13)


def tiny_moe(path: Path) -> None:
    n_embd, n_head, n_head_kv, n_ff, n_layer, n_expert = 64, 2, 1, 48, 2, 4
    vocab = spm_vocabulary()
    build = Builder(path, "llama", "tiny-moe", seed=17)
    build.keys(decoder_keys(n_embd, n_layer, n_head, n_head_kv, n_ff))
    build.keys({"rope.dimension_count": n_embd // n_head, "expert_count": n_expert, "expert_used_count": 2})
    vocab.write(build.writer)
    build.writer.add_chat_template(CHAT_TEMPLATE)
    embedding_tables(build, vocab, n_embd, spread=3.0)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        attention(build, block, n_embd, n_head, n_head_kv)
        build.ones(f"{block}.ffn_norm", n_embd)
        build.matrix(f"{block}.ffn_gate_inp", n_expert, n_embd, 2.0)
        build.put(f"{block}.ffn_gate_exps.weight", build.normal(n_expert, n_ff, n_embd, scale=n_embd**-0.5))
        build.put(f"{block}.ffn_up_exps.weight", build.normal(n_expert, n_ff, n_embd, scale=n_embd**-0.5))
        build.put(f"{block}.ffn_down_exps.weight", build.normal(n_expert, n_embd, n_ff, scale=2.0 * n_ff**-0.5))
    build.finish()


def tiny_swa(path: Path) -> None:
    """Window of 32 tokens in every second layer, as olmo2 can have it."""
    n_embd, n_head, n_head_kv, n_ff, n_layer = 64, 2, 1, 96, 2
    head = n_embd // n_head
    vocab = spm_vocabulary()
    build = Builder(path, "olmo2", "tiny-swa", seed=19)
    build.keys(decoder_keys(n_embd, n_layer, n_head, n_head_kv, n_ff))
    build.keys({"attention.sliding_window": 32, "attention.sliding_window_pattern": 2})
    vocab.write(build.writer)
    build.writer.add_chat_template(CHAT_TEMPLATE)
    embedding_tables(build, vocab, n_embd, spread=3.0)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        build.matrix(f"{block}.attn_q", n_embd, n_embd)
        build.matrix(f"{block}.attn_k", n_head_kv * head, n_embd)
        build.matrix(f"{block}.attn_v", n_head_kv * head, n_embd)
        build.matrix(f"{block}.attn_output", n_embd, n_embd)
        build.ones(f"{block}.attn_q_norm", n_embd, 0.8)
        build.ones(f"{block}.attn_k_norm", n_head_kv * head, 0.8)
        build.ones(f"{block}.post_attention_norm", n_embd, 1.5)
        build.matrix(f"{block}.ffn_gate", n_ff, n_embd)
        build.matrix(f"{block}.ffn_up", n_ff, n_embd)
        build.matrix(f"{block}.ffn_down", n_embd, n_ff)
        build.ones(f"{block}.post_ffw_norm", n_embd, 1.5)
    build.finish()


def tiny_mamba(path: Path) -> None:
    """A recurrent state instead of a KV cache: no removal of single positions, no shift."""
    n_embd, n_layer, d_conv, d_state, dt_rank = 48, 2, 4, 8, 4
    d_inner = 2 * n_embd
    vocab = spm_vocabulary()
    build = Builder(path, "mamba", "tiny-mamba", seed=23)
    build.keys(
        {
            "context_length": N_CTX_TRAIN,
            "embedding_length": n_embd,
            "block_count": n_layer,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "ssm.conv_kernel": d_conv,
            "ssm.inner_size": d_inner,
            "ssm.state_size": d_state,
            "ssm.time_step_rank": dt_rank,
        }
    )
    vocab.write(build.writer)
    embedding_tables(build, vocab, n_embd, spread=3.0)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        build.ones(f"{block}.attn_norm", n_embd)
        build.matrix(f"{block}.ssm_in", 2 * d_inner, n_embd, 2.0)
        build.put(f"{block}.ssm_conv1d.weight", build.normal(d_inner, d_conv, scale=0.7))
        build.put(f"{block}.ssm_conv1d.bias", build.normal(d_inner, scale=0.1))
        build.matrix(f"{block}.ssm_x", dt_rank + 2 * d_state, d_inner, 1.5)
        build.matrix(f"{block}.ssm_dt", d_inner, dt_rank)
        build.put(f"{block}.ssm_dt.bias", build.normal(d_inner, scale=0.5))
        decay = np.tile(np.linspace(0.05, 2.0, d_state, dtype=np.float32), (d_inner, 1))
        build.put(f"{block}.ssm_a", -decay)
        build.put(f"{block}.ssm_d", np.ones(d_inner, dtype=np.float32))
        build.matrix(f"{block}.ssm_out", n_embd, d_inner, 2.0)
    build.finish()


def bert(
    path: Path, name: str, seed: int, pooling: gguf.PoolingType, extra: Callable[[Builder], None] = lambda build: None
) -> None:
    n_embd, n_head, n_ff, n_layer = 48, 2, 96, 2
    vocab = wordpiece_vocabulary()
    build = Builder(path, "bert", name, seed)
    extra(build)
    build.keys(
        {
            "context_length": N_CTX_BERT,
            "embedding_length": n_embd,
            "block_count": n_layer,
            "feed_forward_length": n_ff,
            "attention.head_count": n_head,
            "attention.layer_norm_epsilon": 1e-12,
            "attention.causal": False,
        }
    )
    build.writer.add_pooling_type(pooling)
    build.writer.add_token_type_count(2)
    vocab.write(build.writer)
    build.put("token_embd.weight", build.normal(len(vocab.tokens), n_embd))
    build.put("token_types.weight", build.normal(2, n_embd, scale=0.1))
    build.put("position_embd.weight", build.normal(N_CTX_BERT, n_embd, scale=0.2))
    build.layer_norm("token_embd_norm", n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            build.matrix(f"{block}.{part}", n_embd, n_embd, 1.5)
            build.put(f"{block}.{part}.bias", build.normal(n_embd, scale=0.02))
        build.layer_norm(f"{block}.attn_output_norm", n_embd)
        build.matrix(f"{block}.ffn_up", n_ff, n_embd)
        build.put(f"{block}.ffn_up.bias", build.normal(n_ff, scale=0.02))
        build.matrix(f"{block}.ffn_down", n_embd, n_ff)
        build.put(f"{block}.ffn_down.bias", build.normal(n_embd, scale=0.02))
        build.layer_norm(f"{block}.layer_output_norm", n_embd)
    if pooling == gguf.PoolingType.RANK:
        build.matrix("cls.output", 1, n_embd, 2.0)
        build.put("cls.output.bias", np.zeros(1, dtype=np.float32))
    build.finish()


def tiny_embed(path: Path) -> None:
    bert(path, "tiny-embed", seed=29, pooling=gguf.PoolingType.MEAN)


def tiny_rerank(path: Path) -> None:
    bert(path, "tiny-rerank", seed=31, pooling=gguf.PoolingType.RANK)


#: How the templates of decision models show a value and an option.
_SHOW = (
    "{% macro show(v) %}{{ v if v is string else v | tojson }}{% endmacro %}"
    "{% macro option(o) %}{{ o.key }}{% if o.description %}: {{ show(o.description) }}{% endif %}{% endmacro %}"
)
_LABELLED = (
    _SHOW + "Look at this: {{ show(state) }}\n{{ type }} {{ show(instructions) }}\n"
    "{% for o in options %}{{ o.label }} {{ option(o) }}\n{% endfor %}"
)
#: Kind of decision model -> template. The prompts have what the server looks for, nothing more.
DECISION_TEMPLATES = {
    "openjev": _LABELLED.replace("o.label", "'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz'[loop.index0]"),
    "lev": _LABELLED,
    "nimble": _LABELLED + "{% for q in questions %}{{ q.id }}: {{ q.options | length }}\n{% endfor %}",
    "pplx-decider": _LABELLED,
    "lfm2-d1": _LABELLED,
    "kev": _SHOW
    + "{{ state }}\n{{ type }} {{ instructions }}\n{% for o in options %}{{ option(o) }}<|box_end|>{% endfor %}?",
    "laya": _SHOW + "[CLS]{{ type }}: {{ show(instructions) }}[SEP]"
    "{% for o in options %}[MASK] {{ option(o) }}{% endfor %}[SEP]{{ show(state) }}[SEP]",
    "lfm2-d1-omni": _SHOW + "{{ sep }}{{ type }}{{ sep }}{{ mark_question }} {{ show(instructions) }}"
    "{% for o in options %}{{ sep }}[MASK]{{ sep }}{{ mark_option }} {{ option(o) }}{% endfor %}"
    "{{ sep }}\n{{ sep }}{{ mark_state }} {{ show(state) if state is not none }}{{ sep }}.",
    "clef": _SHOW + "[CLS]{{ sep }}{{ show(state) }}"
    "{% for q in questions %}{{ sep }}{{ q.type }}{{ sep }}{{ mark_question }}{{ show(q.instructions) }}"
    "{% for o in q.options %}{{ sep }} or {{ sep }}{{ mark_option }}{{ option(o) }}{% endfor %}{% endfor %}"
    "{{ sep }}[SEP]",
}
#: Those whose prompt is read in one piece, in both directions.
DECISION_ENCODERS = frozenset({"laya", "lfm2-d1-omni", "clef"})


def decision_vocabulary() -> Vocabulary:
    """Labels, and the marks of options."""
    vocab = bpe_vocabulary()
    vocab.add("<|box_end|>", CONTROL, 0.0)
    for word in ("yes", "No", "AA", "AB"):
        vocab.add(word, USER_DEFINED)
    vocab.pad()
    return vocab


def decision(path: Path, kind: str) -> None:
    """Random answers: the metadata say which outputs are read, and the weights are those of no decision model."""

    def extra(build: Builder) -> None:
        build.writer.add_chat_template([{"name": "systemone", "template": DECISION_TEMPLATES[kind]}])
        build.writer.add_string(f"{build.arch}.decision.type", kind)
        temperatures = {"choice": 3.0, "choice.3_5": 2.5, "choice.mid": 5.0, "score": 4.0, "noul": 2.25}
        build.keys({f"decision.temperature.{name}": value for name, value in temperatures.items()})
        if kind == "laya":
            build.writer.add_string(f"{build.arch}.decision.max_head_tokens", "96")

    name = f"tiny-{kind}"
    seed = 47 + list(DECISION_TEMPLATES).index(kind)
    if kind in DECISION_ENCODERS:
        bert(path, name, seed, gguf.PoolingType.NONE, extra)
    else:
        llama(path, name, decision_vocabulary(), seed, extra=extra)


def lora(path: Path, name: str, seed: int, invocation: Sequence[int] = ()) -> None:
    """A strong adapter for tiny-llama. With ``invocation`` it applies from those tokens on (aLoRA)."""
    n_embd, n_ff, n_layer, rank = 64, 96, 2, 4
    build = Builder(path, "llama", name, seed)
    build.writer.add_type("adapter")
    build.writer.add_string("adapter.type", "lora")
    build.writer.add_float32("adapter.lora.alpha", float(rank))
    if invocation:
        key = "adapter.alora.invocation_tokens"
        build.writer.add_key_value(key, list(invocation), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
    shapes = {"attn_q": (n_embd, n_embd), "attn_output": (n_embd, n_embd), "ffn_down": (n_embd, n_ff)}
    for layer in range(n_layer):
        for part, (n_out, n_in) in shapes.items():
            tensor = f"blk.{layer}.{part}.weight"
            build.put(f"{tensor}.lora_a", build.normal(rank, n_in, scale=n_in**-0.5))
            build.put(f"{tensor}.lora_b", build.normal(n_out, rank, scale=2.0))
    build.close()


def tiny_lora_a(path: Path) -> None:
    lora(path, "tiny-lora-a", seed=37)


def tiny_lora_b(path: Path) -> None:
    lora(path, "tiny-lora-b", seed=41)


def tiny_alora(path: Path) -> None:
    vocab = spm_vocabulary()
    lora(path, "tiny-alora", seed=43, invocation=[vocab.tokens.index(token) for token in ("▁Once", "▁Tom")])


MAKERS: dict[str, Callable[[Path], None]] = {
    "tiny-llama": tiny_llama,
    "tiny-bpe": tiny_bpe,
    "tiny-embed": tiny_embed,
    "tiny-rerank": tiny_rerank,
    "tiny-swa": tiny_swa,
    "tiny-mamba": tiny_mamba,
    "tiny-moe": tiny_moe,
    "tiny-draft": tiny_draft,
    "tiny-lora-a": tiny_lora_a,
    "tiny-lora-b": tiny_lora_b,
    "tiny-alora": tiny_alora,
    **{f"tiny-{kind}": functools.partial(decision, kind=kind) for kind in DECISION_TEMPLATES},
}


def make_all(directory: Path) -> dict[str, Path]:
    """Make every model that ``directory`` does not have yet; returns name -> file."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {name: directory / f"{name}.gguf" for name in MAKERS}
    for name, path in paths.items():
        if not path.exists():
            MAKERS[name](path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny GGUF models of the tests.")
    parser.add_argument("directory", type=Path)
    for name, path in make_all(parser.parse_args().directory).items():
        print(f"{name:12} {path.stat().st_size / 1024:6.0f} KiB  {path}")


if __name__ == "__main__":
    main()
