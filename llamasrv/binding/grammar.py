"""GBNF grammars. Thread-safe."""

from __future__ import annotations

from llamasrv.binding.native import c_text, check, lib, new_text_pointer, take_text
from llamasrv.binding.vocab import Vocab


def json_schema_to_grammar(schema: str) -> str:
    """The grammar of the JSON texts that a JSON schema (as JSON text) allows. Raises NativeError."""
    data = c_text("schema", schema)
    out, err = new_text_pointer(), new_text_pointer()
    check(lib.lsrv_json_schema_to_grammar(data, out, err), err, "converting the JSON schema")
    return take_text(out)


def check_grammar(vocab: Vocab, gbnf: str) -> None:
    """Raise NativeError("failed to parse grammar...") unless the grammar parses."""
    data = c_text("grammar", gbnf)
    err = new_text_pointer()
    with vocab._engine:
        check(lib.lsrv_grammar_check(vocab._pointer, data, err), err, "parsing the grammar")
