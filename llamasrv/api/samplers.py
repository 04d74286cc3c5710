"""Names of the steps of a sampler chain."""

from __future__ import annotations

from collections.abc import Iterable

#: Name -> letter.
SAMPLERS = {
    "dry": "d",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "top_n_sigma": "s",
    "min_p": "m",
    "temperature": "t",
    "xtc": "x",
    "infill": "i",
    "penalties": "e",
    "adaptive_p": "a",
}

_BY_CHAR = {char: name for name, char in SAMPLERS.items()}
_BY_NAME = {
    **{name.replace("_", "-"): name for name in SAMPLERS},
    **{name.replace("_", ""): name for name in SAMPLERS},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    **{name: name for name in SAMPLERS},
}


def samplers_from_names(names: Iterable[str]) -> tuple[str, ...]:
    """Samplers by name, in any of its spellings; unknown names are passed over."""
    found = (_BY_NAME.get(name.lower()) for name in names)
    return tuple(name for name in found if name is not None)


def samplers_from_chars(chars: str) -> tuple[str, ...]:
    """Samplers by letter; unknown letters are passed over."""
    return tuple(_BY_CHAR[char] for char in chars if char in _BY_CHAR)
