"""Vocabulary of a model: tokens to bytes and back. Thread-safe."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from llamasrv.binding.native import INT32_MAX, Handle, check, ffi, lib, new_text_pointer

TYPE_NONE = int(lib.LLAMA_VOCAB_TYPE_NONE)
TYPE_SPM = int(lib.LLAMA_VOCAB_TYPE_SPM)
TYPE_BPE = int(lib.LLAMA_VOCAB_TYPE_BPE)
TYPE_WPM = int(lib.LLAMA_VOCAB_TYPE_WPM)
TYPE_UGM = int(lib.LLAMA_VOCAB_TYPE_UGM)
TYPE_RWKV = int(lib.LLAMA_VOCAB_TYPE_RWKV)
TYPE_PLAMO2 = int(lib.LLAMA_VOCAB_TYPE_PLAMO2)


class Vocab:
    """Made by :class:`Model`. The special tokens are token ids, -1 where the model has none."""

    __slots__ = (
        "_engine",
        "_lock",
        "_pieces",
        "_pointer",
        "add_bos",
        "add_eos",
        "add_sep",
        "bos",
        "eog",
        "eos",
        "eot",
        "fim_mid",
        "fim_pad",
        "fim_pre",
        "fim_rep",
        "fim_sep",
        "fim_suf",
        "mask",
        "n_tokens",
        "nl",
        "pad",
        "sep",
        "type",
    )

    def __init__(self, engine: Handle, pointer: Any) -> None:
        self._engine = engine
        self._pointer = pointer
        self._lock = threading.Lock()
        self._pieces: dict[bool, list[bytes]] = {}

        self.type = int(lib.llama_vocab_type(pointer))
        self.n_tokens = int(lib.llama_vocab_n_tokens(pointer))
        self.bos = int(lib.llama_vocab_bos(pointer))
        self.eos = int(lib.llama_vocab_eos(pointer))
        self.eot = int(lib.llama_vocab_eot(pointer))
        self.sep = int(lib.llama_vocab_sep(pointer))
        self.mask = int(lib.llama_vocab_mask(pointer))
        self.nl = int(lib.llama_vocab_nl(pointer))
        self.pad = int(lib.llama_vocab_pad(pointer))
        self.fim_pre = int(lib.llama_vocab_fim_pre(pointer))
        self.fim_suf = int(lib.llama_vocab_fim_suf(pointer))
        self.fim_mid = int(lib.llama_vocab_fim_mid(pointer))
        self.fim_pad = int(lib.llama_vocab_fim_pad(pointer))
        self.fim_rep = int(lib.llama_vocab_fim_rep(pointer))
        self.fim_sep = int(lib.llama_vocab_fim_sep(pointer))
        self.add_bos = bool(lib.llama_vocab_get_add_bos(pointer))
        self.add_eos = bool(lib.llama_vocab_get_add_eos(pointer))
        self.add_sep = bool(lib.llama_vocab_get_add_sep(pointer))
        is_eog = lib.llama_vocab_is_eog
        self.eog = frozenset(token for token in range(self.n_tokens) if is_eog(pointer, token))

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation (end of sequence, of turn, ...)."""
        return token in self.eog

    def validate(self, tokens: Sequence[int]) -> bool:
        """Whether every token is one of this vocabulary."""
        return len(tokens) == 0 or (min(tokens) >= 0 and max(tokens) < self.n_tokens)

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]:
        """Tokens of a text.

        ``add_special``: add BOS and EOS as the model wants; ``parse_special``: recognise control tokens in the text.
        Raises NativeError, and ValueError for a text of 2 GiB or with lone surrogates.
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        if len(data) > INT32_MAX - 2:
            raise ValueError("the text is too long")
        tokens, n_tokens, err = ffi.new("int32_t **"), ffi.new("int32_t *"), new_text_pointer()
        with self._engine:
            status = lib.lsrv_tokenize(
                self._pointer, data, len(data), add_special, parse_special, tokens, n_tokens, err
            )
        check(status, err, "tokenizing")
        try:
            return list(ffi.unpack(tokens[0], n_tokens[0])) if n_tokens[0] > 0 else []
        finally:
            lib.lsrv_free(tokens[0])

    def pieces(self, special: bool) -> list[bytes]:
        """The bytes of every token, by token id; made once, then shared: not to be changed.

        ``special``: control tokens have their text, else they are empty.
        """
        pieces = self._pieces.get(special)
        if pieces is None:
            with self._lock:
                pieces = self._pieces.get(special)
                if pieces is None:
                    pieces = self._pieces[special] = self._read_pieces(special)
        return pieces

    def _read_pieces(self, special: bool) -> list[bytes]:
        blob, offsets, err = ffi.new("char **"), ffi.new("int32_t **"), new_text_pointer()
        with self._engine:
            check(lib.lsrv_vocab_pieces(self._pointer, special, blob, offsets, err), err, "reading the vocabulary")
        try:
            ends: list[int] = ffi.unpack(offsets[0], self.n_tokens + 1)
            text = bytes(ffi.buffer(blob[0], ends[-1]))
        finally:
            lib.lsrv_free(blob[0])
            lib.lsrv_free(offsets[0])
        return [text[start:end] for start, end in itertools.pairwise(ends)]

    def piece(self, token: int, special: bool = True) -> bytes:
        """The bytes of one token, not always whole UTF-8. Raises ValueError for a token that does not exist."""
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"token {token} is not in the vocabulary of {self.n_tokens} tokens")
        return self.pieces(special)[token]

    def detokenize(self, tokens: Sequence[int], special: bool = True) -> bytes:
        """The pieces of these tokens, one after the other. Raises ValueError for a token that does not exist."""
        if not self.validate(tokens):
            raise ValueError(f"not all tokens are in the vocabulary of {self.n_tokens} tokens")
        pieces = self.pieces(special)
        return b"".join([pieces[token] for token in tokens])

    def text(self, tokens: Sequence[int], special: bool = True) -> bytes:
        """The text that these tokens stand for as a whole: without the space that a tokenizer puts before the first.

        ``special``: control tokens have their text, else they are left out. Raises ValueError for a token that does
        not exist.
        """
        if not self.validate(tokens):
            raise ValueError(f"not all tokens are in the vocabulary of {self.n_tokens} tokens")
        if not tokens:
            return b""
        ids = ffi.new("int32_t[]", list(tokens))
        size = 8 * len(tokens)
        while True:
            buffer = ffi.new("char[]", size)
            with self._engine:
                n_bytes = lib.llama_detokenize(self._pointer, ids, len(tokens), buffer, size, False, special)
            if n_bytes >= 0:
                return bytes(ffi.buffer(buffer, n_bytes))
            size = -n_bytes
