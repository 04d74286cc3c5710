"""How long a request may take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import FieldError, as_float
from llamasrv.api.openapi_schema import Member

#: Seconds in a year.
MAX_TIMEOUT_S = 31_536_000

#: Taken by every request that computes something.
TIMEOUT = Member(
    "timeout_s",
    {"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_S},
    "Seconds that the request may take from its arrival, waiting included; then it ends with an error of status 408. "
    "0: no limit.",
)


def read_timeout(data: Mapping[str, Any]) -> float:
    """Seconds, 0: no limit. Raises ApiError."""
    value = data.get(TIMEOUT.name)
    if value is None:
        return 0.0
    try:
        seconds = as_float(value)
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_TIMEOUT_S):
            raise FieldError(f"Value must be between 0 <= value <= {MAX_TIMEOUT_S}, but got {seconds:g}")
    except FieldError as error:
        raise invalid_request(f"Field '{TIMEOUT.name}': {error}") from None
    return seconds
