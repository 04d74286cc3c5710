"""The chat templates that come with the source of the pinned llama.cpp."""

from __future__ import annotations

import os

from nativebuild.source import find_source

FOLDER = find_source(os.environ).path / "models" / "templates"


def names() -> list[str]:
    """Names of all templates, without suffix; empty where the source is not at hand."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
