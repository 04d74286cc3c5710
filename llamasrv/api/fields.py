"""How one field of a request is declared and read.

A declaration serves the parser, ``generation_settings``, the manual and the OpenAPI document. Reading is strict about
types, except that a whole number may be written as a float; null is the same as absent.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.grammar import GrammarUse
from llamasrv.api.jsonio import type_name
from llamasrv.api.openapi_schema import Schema
from llamasrv.api.protocols import Vocab
from llamasrv.engine.task import SamplingParams, TaskParams

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
#: Largest finite float32.
FLOAT_MAX = 3.4028234663852886e38
#: Smallest normal one.
FLOAT_MIN = 1.1754943508222875e-38

_FLOAT = struct.Struct("f")


class FieldError(ValueError):
    """A value that its field does not take; the text lacks the field's name."""


class Kind(enum.Enum):
    """Type of a field; the value is JSON's name for it ("any" where several are taken)."""

    BOOL = "boolean"
    INT = "integer"
    FLOAT = "number"
    STRING = "string"
    ARRAY = "array"
    OBJECT = "object"
    ANY = "any"


class Echo(enum.Enum):
    """Whether ``generation_settings`` has the field: never, in its full form only, or in the short form too."""

    NONE = enum.auto()
    FULL = enum.auto()
    ALWAYS = enum.auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """Inclusive bounds. ``clamp``: a value outside becomes the bound; otherwise it is an error."""

    low: float
    high: float
    clamp: bool = False


@dataclass(slots=True)
class RequestState:
    """A request while its fields are read, in the order of their declarations.

    ``params`` is this request's own copy and ``params.sampling`` too.
    """

    data: Mapping[str, Any]
    params: TaskParams
    defaults: TaskParams
    vocab: Vocab
    grammars: GrammarUse
    n_parallel: int
    #: Longest history, in tokens, that a sampler may be asked to keep.
    n_history_max: int
    logit_bias_eog: tuple[tuple[int, float], ...]

    @property
    def sampling(self) -> SamplingParams:
        return self.params.sampling


Handler = Callable[[RequestState, Any], None]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request.

    ``target``: attribute of TaskParams, or of SamplingParams after "sampling.", that holds the value. ``handler``
    stores the value itself; otherwise the value is read by ``kind`` and ``limits``. ``aliases`` are tried in order
    where ``name`` is absent. ``group``: the object within the request in which the field lies.
    """

    name: str
    kind: Kind
    target: str
    description: str
    aliases: tuple[str, ...] = ()
    limits: Limits | None = None
    #: Limits by the number of slots.
    limits_of: Callable[[int], Limits] | None = None
    handler: Handler | None = None
    echo: Echo = Echo.NONE
    #: Makes the JSON for ``generation_settings`` of the target's value.
    render: Callable[[Any], Any] | None = None
    group: str = ""
    #: JSON schema of what ``handler`` takes, where kind and limits do not say it.
    schema: Schema | None = None
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", (self.name, *self.aliases))

    def read(self, state: RequestState) -> None:
        """Take the field from ``state.data`` if it is there. Raises ApiError, text beginning ``Field '<name>':``."""
        data = state.data
        if self.group:
            inner = data.get(self.group)
            if inner is None:
                return
            if not isinstance(inner, dict):
                raise invalid_request(f"Field '{self.group}': {_mismatch('object', inner)}")
            data = inner
        for name in self.names:
            value = data.get(name)
            if value is None:
                continue
            try:
                if self.handler is not None:
                    self.handler(state, value)
                else:
                    store(state.params, self.target, self._convert(state, value))
            except ValueError as error:
                raise invalid_request(f"Field '{name}': {error}") from None
            return

    def _convert(self, state: RequestState, value: Any) -> Any:
        if self.kind is Kind.BOOL:
            return as_bool(value)
        limits = self.limits_of(state.n_parallel) if self.limits_of is not None else self.limits
        if self.kind is Kind.INT:
            return bounded_int(as_int(value), limits or Limits(-INT32_MAX - 1, INT32_MAX))
        return bounded_float(as_float(value), limits or Limits(-FLOAT_MAX, FLOAT_MAX, clamp=True))


def store(params: TaskParams, target: str, value: Any) -> None:
    """Set the attribute that ``target`` names."""
    head, _, tail = target.rpartition(".")
    setattr(params.sampling if head else params, tail, value)


def load(params: TaskParams, target: str) -> Any:
    """The attribute that ``target`` names."""
    head, _, tail = target.rpartition(".")
    return getattr(params.sampling if head else params, tail)


def as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(_mismatch("boolean", value))
    return value


def as_int(value: Any) -> int:
    """An integer; a float loses its fraction."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(_mismatch("number", value))
    return int(value)


def as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(_mismatch("number", value))
    return float(value)


def as_string(value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(_mismatch("string", value))
    return value


def as_array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(_mismatch("array", value))
    return value


def as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(_mismatch("object", value))
    return value


def as_strings(value: Any) -> list[str]:
    return [as_string(item) for item in as_array(value)]


def bounded_int(value: int, limits: Limits) -> int:
    """``value`` within ``limits``: clamped, or a FieldError."""
    if limits.low <= value <= limits.high:
        return value
    if limits.clamp:
        return int(limits.low if value < limits.low else limits.high)
    got = str(value) if abs(value) <= INT64_MAX else f"{float(value):g}"
    raise FieldError(f"Value must be between {limits.low} <= value <= {limits.high}, but got {got}")


def bounded_float(value: float, limits: Limits) -> float:
    """The float32 next to ``value`` within ``limits``: clamped, or a FieldError."""
    rounded = float32(value)
    low, high = float32(limits.low), float32(limits.high)
    if low <= rounded <= high:
        return rounded
    if limits.clamp:
        return low if rounded < low else high
    raise FieldError(f"Value must be between {limits.low:f} <= value <= {limits.high:f}, but got {rounded:f}")


def float32(value: float) -> float:
    """``value`` rounded to float32; beyond its range the largest finite one."""
    if abs(value) >= FLOAT_MAX:
        return FLOAT_MAX if value > 0 else -FLOAT_MAX
    rounded: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    return rounded


def _mismatch(expected: str, value: Any) -> str:
    return f"type must be {expected}, but is {type_name(value)}"
