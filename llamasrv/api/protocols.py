"""What this layer uses of the layers below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from llamasrv.binding import ChatTemplates
from llamasrv.engine.meta import ServerMeta


class Vocab(Protocol):
    """The tokenizer of the model; any thread may use it. Special tokens are -1 where the model has none."""

    bos: int
    eos: int
    sep: int
    mask: int
    fim_pre: int
    fim_suf: int
    fim_mid: int
    fim_rep: int
    fim_sep: int
    add_bos: bool
    add_eos: bool
    add_sep: bool

    @property
    def n_tokens(self) -> int: ...
    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...
    def piece(self, token: int, special: bool) -> bytes:
        """Text of one token; ``special``: control tokens too."""

    def detokenize(self, tokens: Sequence[int], special: bool) -> bytes: ...
    def text(self, tokens: Sequence[int], special: bool) -> bytes: ...


class GrammarTools(Protocol):
    """Grammar functions of the native library. Both raise an exception with the library's text."""

    def json_schema_to_grammar(self, schema: str) -> str: ...
    def check_grammar(self, vocab: Any, gbnf: str) -> None: ...


class Server(Protocol):
    """Facts of a loaded server, see ServerContext."""

    @property
    def meta(self) -> ServerMeta: ...
    @property
    def vocab(self) -> Vocab: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def chat_templates(self) -> ChatTemplates: ...


class TaskIds(Protocol):
    """Source of task ids, see ResponseReader."""

    def new_id(self) -> int: ...
