"""Which tests send which request field: writes docs/api-coverage.md.

    python scripts/api_coverage.py [--check]

The fields of completions come from their declarations (``llamasrv.api.schema.FIELDS``); those of each dialect are the
names that its module reads from a request by a literal. A test file counts for a name when a string or keyword
argument in it is that name. ``--check`` writes nothing and exits with 1 if the fields are out of date (not the tests
beside them) or a field has no test.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llamasrv.api.schema import FIELDS  # noqa: E402

TARGET = ROOT / "docs" / "api-coverage.md"
#: Dialect -> modules that read its requests, and the part of a test file's name that speaks of it.
DIALECTS = {
    "Chat: what is read beside the fields of completions": (
        ("chat_*.py",),
        ("chat", "dialect", "openai", "client", "responses", "anthropic"),
    ),
    "Completions of OpenAI": (("openai/*.py",), ("openai", "completions", "dialect", "client")),
    "Responses": (("responses/request.py",), ("responses", "dialect", "client", "openai_sdk")),
    "Anthropic messages": (("anthropic/request.py",), ("anthropic", "dialect", "client")),
    "Embeddings": (("embeddings.py",), ("embed", "vectors", "task", "dialect", "openai")),
    "Rerank": (("rerank.py",), ("rerank", "task")),
    "Infill": (("infill.py",), ("infill", "task")),
}
#: Python names of a request in the modules that read them.
BODIES = {"body", "data", "request", "message", "block", "item", "part", "tool", "choice", "source", "config"}


def names_read(path: Path) -> Iterator[str]:
    """Names that a module takes from a request: ``body.get("x")``, ``body["x"]``, ``"x" in body``, ``f(body, "x")``."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr="get"), args=[ast.Constant(value=str(name)), *_]
            ) if owner in BODIES:
                yield name
            case ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=str(name)), ctx=ast.Load()) if (
                owner in BODIES
            ):
                yield name
            case ast.Compare(
                left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=owner)]
            ) if owner in BODIES:
                yield name
            case ast.Call(args=[ast.Name(id=owner), ast.Constant(value=str(name)), *_]) if (
                owner in BODIES and name.isidentifier()
            ):
                yield name


def names_sent(path: Path) -> set[str]:
    """Strings, their words where they hold JSON, and keyword arguments of a test file."""
    out: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Constant(value=str(text)):
                out.add(text)
                out.update(piece for index, piece in enumerate(text.split('"')) if index % 2)
            case ast.keyword(arg=str(name)):
                out.add(name)
    return out


def tests() -> dict[str, set[str]]:
    """Test file -> names that occur in it."""
    return {path.stem: names_sent(path) for path in sorted((ROOT / "tests").glob("test_*.py"))}


def row(name: str, about: str, files: list[str]) -> str:
    shown = ", ".join(f"`{file}`" for file in files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return f"| `{name}` | {about} | {shown or 'none'} |"


def build() -> tuple[str, list[str]]:
    """Text of the document, and the fields without a test."""
    sent = tests()
    missing: list[str] = []
    lines = [
        "# Request fields and their tests",
        "",
        "Written by `python scripts/api_coverage.py` from the declarations; `tests/test_api_coverage.py` fails when a",
        "field is missing here or has no test.",
        "",
        "## Completions",
        "",
        "Every generating endpoint takes these. The tables after this one hold what each dialect's module reads by a",
        "literal name.",
        "",
        "| field | meaning | tests |",
        "|---|---|---|",
    ]
    for field in FIELDS:
        for name in field.names:
            files = [file for file, names in sent.items() if name in names]
            about = field.description if name == field.name else f"Another name of `{field.name}`."
            shown = f"{field.group}.{name}" if field.group else name
            lines.append(row(shown, about, files))
            if not files:
                missing.append(shown)
    for title, (patterns, parts) in DIALECTS.items():
        paths = sorted({path for pattern in patterns for path in (ROOT / "llamasrv" / "api").glob(pattern)})
        found = sorted({name for path in paths for name in names_read(path)})
        lines += ["", f"## {title}", "", "| name | tests |", "|---|---|"]
        for name in found:
            files = [file for file, names in sent.items() if name in names and any(part in file for part in parts)]
            lines.append(row(name, "", files).replace("|  |", "|"))
            if not files:
                missing.append(f"{title}: {name}")
    return "\n".join(lines) + "\n", missing


def fields_of(text: str) -> list[str]:
    """Lines of the document without the column of tests."""
    return [line.rsplit(" | ", 1)[0] for line in text.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text, missing = build()
    for name in missing:
        print(f"no test sends {name}", file=sys.stderr)
    if not check:
        TARGET.write_text(text)
        print(f"{TARGET.relative_to(ROOT)}: {text.count(chr(10) + '| `')} fields")
        return 0
    if not TARGET.exists() or fields_of(TARGET.read_text()) != fields_of(text):
        print(f"{TARGET.relative_to(ROOT)} is out of date: python scripts/api_coverage.py", file=sys.stderr)
        return 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
