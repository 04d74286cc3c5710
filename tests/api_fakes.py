"""A byte vocabulary, grammar functions and a server's facts for tests of the API layer without a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llamasrv.api.context import ApiContext
from llamasrv.engine.meta import ServerMeta

BOS, EOS, HELLO, SEP, MASK, PRE, SUF, MID, REP, FILE = range(256, 266)
_SPECIAL = {"<s>": BOS, "</s>": EOS, "[sep]": SEP, "[mask]": MASK}
_PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *(b"<s>", b"</s>", b"hello", b"[sep]", b"[mask]", b"<pre>", b"<suf>", b"<mid>", b"<rep>", b"<file>"),
]
_CONTROL = frozenset(range(BOS, len(_PIECES))) - {HELLO}


class FakeVocab:
    """Token 0..255: that byte; then ``<s>``, ``</s>``, ``hello``, ``[sep]``, ``[mask]``, those of fill-in-the-middle.

    The plain attributes can be changed to imitate other vocabularies.
    """

    n_tokens = len(_PIECES)

    def __init__(self, **changed: Any) -> None:
        self.bos, self.eos, self.sep, self.mask = BOS, EOS, SEP, MASK
        self.fim_pre, self.fim_suf, self.fim_mid, self.fim_rep, self.fim_sep = PRE, SUF, MID, REP, FILE
        self.add_bos, self.add_eos, self.add_sep = True, False, False
        for name, value in changed.items():
            setattr(self, name, value)

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        tokens = [BOS] if add_special and self.add_bos else []
        while text:
            special = next((name for name in _SPECIAL if parse_special and text.startswith(name)), None)
            if special is not None:
                tokens.append(_SPECIAL[special])
                text = text[len(special) :]
            elif text.startswith("hello"):
                tokens.append(HELLO)
                text = text[5:]
            else:
                tokens += text[0].encode()
                text = text[1:]
        return tokens

    def piece(self, token: int, special: bool) -> bytes:
        return _PIECES[token] if special or token not in _CONTROL else b""

    def detokenize(self, tokens: Sequence[int], special: bool) -> bytes:
        return b"".join(self.piece(token, special) for token in tokens)

    def text(self, tokens: Sequence[int], special: bool) -> bytes:
        return self.detokenize(tokens, special)


@dataclass
class FakeTools:
    """Remembers what it was asked; a schema becomes a grammar that allows only ``x``."""

    schemas: list[str] = field(default_factory=list)
    grammars: list[str] = field(default_factory=list)
    error: str = ""

    def json_schema_to_grammar(self, schema: str) -> str:
        self.schemas.append(schema)
        return 'root ::= "x"\n'

    def check_grammar(self, vocab: Any, gbnf: str) -> None:
        self.grammars.append(gbnf)
        if self.error:
            raise RuntimeError(self.error)


def server_params(**changed: Any) -> dict[str, Any]:
    """As ``Params.to_dict()`` gives it for a server with four slots."""
    sampling: dict[str, Any] = {
        "seed": 4294967295,
        "top_k": 40,
        "top_p": 0.949999988079071,
        "temp": 0.800000011920929,
        "dry_base": 1.75,
        "ignore_eos": False,
        "dry_sequence_breakers": ["\n", ":"],
        "samplers": ["top_k", "temperature"],
        "grammar": {"type": "none", "value": ""},
        "grammar_triggers": [],
        "preserved_tokens": [],
        "logit_bias": [],
        **changed.pop("sampling", {}),
    }
    return {
        "n_parallel": 4,
        "n_batch": 2048,
        "embedding": False,
        "pooling_type": "unspecified",
        "embd_normalize": 2,
        "spm_infill": False,
        "n_keep": 0,
        "n_predict": -1,
        "n_cache_reuse": 0,
        "cache_prompt": True,
        "antiprompt": [],
        "sse_ping_interval": 30,
        "reasoning_format": "auto",
        "verbosity": 3,
        "path_prompts_log_dir": "",
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "ui": False,
        "ui_config_json": "",
        "ui_mcp_proxy": False,
        "use_jinja": True,
        "speculative": {"types": ["none"]},
        "sampling": sampling,
        **changed,
    }


def server_meta(**changed: Any) -> ServerMeta:
    values: dict[str, Any] = {
        "build_info": "b1-test",
        "model_name": "tiny",
        "model_aliases": ("tiny",),
        "model_tags": (),
        "model_path": "/models/tiny.gguf",
        "model_ftype": "F32",
        "model_n_params": 1000,
        "model_size": 4000,
        "vocab_type": 1,
        "n_vocab": FakeVocab.n_tokens,
        "n_ctx_train": 2048,
        "n_embd": 64,
        "slot_n_ctx": 512,
        "pooling_type": 0,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
        "chat_template_tool_use": "",
        "chat_template_caps": {"supports_tools": False},
        "logit_bias_eog": ((EOS, float("-inf")),),
        **changed,
    }
    return ServerMeta(**values)


@dataclass
class FakeServer:
    params: dict[str, Any] = field(default_factory=server_params)
    meta: ServerMeta = field(default_factory=server_meta)
    vocab: FakeVocab = field(default_factory=FakeVocab)


class FakeIds:
    """Task ids 10, 11, ..."""

    def __init__(self) -> None:
        self._ids = itertools.count(10)

    def new_id(self) -> int:
        return next(self._ids)


def api_context(tools: FakeTools | None = None, **params: Any) -> ApiContext:
    """A context over a server with these parameters."""
    return ApiContext(FakeServer(params=server_params(**params)), tools or FakeTools())
