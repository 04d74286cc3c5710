"""Flags of llamasrv itself, beside those of llama-server, which the native parser knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Longest duration that can be set.
MAX_SECONDS = 1_000_000


class FlagError(ValueError):
    """A flag without its value or with a bad one; the text names flag and reason."""


@dataclass(frozen=True, slots=True)
class Flag:
    """``parse`` turns the text into the value and raises ValueError with the reason; ``dest`` names the value.

    A flag without ``metavar`` takes no value: naming it gives the opposite of its boolean ``default``.
    """

    name: str
    metavar: str
    dest: str
    parse: Callable[[str], Any]
    default: Any
    env: str
    help: str


def at_least(lowest: int) -> Callable[[str], int]:
    """A parser for integers that are not below ``lowest``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected an integer") from None
        if value < lowest:
            raise ValueError(f"must be at least {lowest}")
        return value

    return parse


def seconds(text: str) -> float:
    """A parser for durations, fractions too."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number of seconds") from None
    if not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"must be between 0 and {MAX_SECONDS}")
    return value


def boolean(text: str) -> bool:
    """A parser for the words that the native parser takes for a boolean, too."""
    value = text.strip().lower()
    if value in {"1", "on", "true", "enabled"}:
        return True
    if value in {"0", "off", "false", "disabled"}:
        return False
    raise ValueError("expected on or off")


FLAGS: tuple[Flag, ...] = (
    Flag(
        "--max-body-mib",
        "N",
        "max_body_mib",
        at_least(1),
        100,
        "LLAMASRV_MAX_BODY_MIB",
        "largest request body accepted, in MiB",
    ),
    Flag(
        "--queue-max",
        "N",
        "queue_max",
        at_least(-1),
        -1,
        "LLAMASRV_QUEUE_MAX",
        "requests that may wait for a slot before more are refused with status 503, -1 = no bound",
    ),
    Flag(
        "--stream-gap",
        "MS",
        "stream_gap_ms",
        at_least(0),
        1000,
        "LLAMASRV_STREAM_GAP",
        "milliseconds that a running stream may wait while another prompt is processed, 0 = no bound",
    ),
    Flag(
        "--no-share-prefix",
        "",
        "share_prefix",
        boolean,
        True,
        "LLAMASRV_SHARE_PREFIX",
        "do not take the beginning of a prompt from other slots",
    ),
    Flag(
        "--drain-seconds",
        "N",
        "drain_seconds",
        seconds,
        5,
        "LLAMASRV_DRAIN_SECONDS",
        "seconds that running requests get to end by themselves when the server is told to stop, 0 = none",
    ),
)


def split(
    args: Sequence[str], environ: Mapping[str, str], flags: Sequence[Flag] = FLAGS
) -> tuple[dict[str, Any], list[str]]:
    """Values of our own flags by ``dest``, and the arguments left for the native parser.

    The command line wins over the environment. Raises :class:`FlagError`.
    """
    values = {flag.dest: flag.default for flag in flags}
    for flag in flags:
        if environ.get(flag.env):
            values[flag.dest] = _value(flag, environ[flag.env], flag.env)
    by_name = {flag.name: flag for flag in flags}
    rest: list[str] = []
    waiting = iter(args)
    for arg in waiting:
        name, equals, text = arg.partition("=")
        # the native parser takes underscores for dashes, too
        known = by_name.get(name.replace("_", "-"))
        if known is None:
            rest.append(arg)
            continue
        if not known.metavar:
            if equals:
                raise FlagError(f"{known.name} takes no value")
            values[known.dest] = not known.default
            continue
        if not equals:
            try:
                text = next(waiting)
            except StopIteration:
                raise FlagError(f"expected a value for {known.name}") from None
        values[known.dest] = _value(known, text, known.name)
    return values, rest


def usage(flags: Sequence[Flag] = FLAGS) -> str:
    """Help text in the form of the native one."""
    lines = ["", "", "----- llamasrv-specific params -----", ""]
    for flag in flags:
        head = f"{flag.name} {flag.metavar}".rstrip()
        default = f" (default: {flag.default})" if flag.metavar else ""
        lines.append(f"{head:<39} {flag.help}{default}")
        lines.append(f"{'':<39} (env: {flag.env})")
    return "\n".join(lines) + "\n"


def _value(flag: Flag, text: str, source: str) -> Any:
    try:
        return flag.parse(text)
    except ValueError as exc:
        raise FlagError(f"invalid value '{text}' for {source}: {exc}") from None
