"""How much memory the C library's heap keeps for itself."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8

#: Heaps that threads share. glibc's own choice is eight per processor, each of which keeps what its largest request
#: needed; Python threads allocate one at a time and gain nothing from so many.
MAX_ARENAS = 4
#: Blocks from this size on go back to the system when they are freed, bytes. glibc's own choice grows up to 32 MiB.
#: More than the candidates of a token take, 12 bytes for each of a vocabulary.
MMAP_BYTES = 4 << 20
#: Free memory at the end of a heap that is kept, bytes.
KEPT_BYTES = 4 << 20

#: Variables with which glibc's own settings are made.
VARIABLES = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def limit(environment: Mapping[str, str] = os.environ) -> bool:
    """Bound it; False if somebody has set it up already, or the C library is another. Call before threads are made."""
    if any(environment.get(name) for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    values = ((_ARENA_MAX, MAX_ARENAS), (_MMAP_THRESHOLD, MMAP_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES))
    # each is tried, whatever became of the others
    return {mallopt(*each) for each in values} == {1}
