"""Numbers, durations and lists as people read them, the same on every page; a dash for None."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

NOTHING = "–"
NOT_SHOWN = {"loss_curve", "ssim_curve", "schema", "version", "fingerprint"}  # of a restorer's card
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
OURS = "ours"
"""How the place of a question begins that no paper answers."""


def is_ours(where: str) -> bool:
    """Whether a claim made there is a question of our own."""
    return where.startswith(OURS)


def number(value: Any) -> str:
    """A number as short as it can be said exactly enough, a text as it is."""
    if value is None:
        return NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(number(item) for item in value) or NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    mantissa, e, power = text.partition("e")
    return (f"{mantissa}e{int(power)}" if e else mantissa).replace("-", "−")


def fixed(value: float | None, decimals: int) -> str:
    """So many decimals, with a true minus sign: `0.41`."""
    return NOTHING if value is None else f"{value:.{decimals}f}".replace("-", "−")


score = partial(fixed, decimals=3)
"""`0.412`."""
decibels = partial(fixed, decimals=1)
"""`33.0`."""


def count(value: float | None) -> str:
    """A count per network: `12`, `4.3`."""
    return NOTHING if value is None else f"{value:.1f}".removesuffix(".0")


def short(value: float | None) -> str:
    """Two significant digits, for losses: `0.0031`, `4.1e−6`."""
    return NOTHING if value is None else number(float(f"{value:.2g}"))


def power(value: float) -> str:
    """A level or a threshold: `10⁻⁸`, `5·10⁻⁴`."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, _e, exponent = f"{value:.2e}".partition("e")
    digits, raised = f"{float(mantissa):g}", "10" + str(int(exponent)).translate(SUPERSCRIPT)
    return raised if digits == "1" else f"{digits}·{raised}"


def percent(fraction: float | None) -> str:
    """`1.3 %`."""
    return NOTHING if fraction is None else f"{100 * fraction:.1f} %"


def whole(fraction: float | None) -> str:
    """A share in percent without its sign, to be set between brackets: `7.3`."""
    return NOTHING if fraction is None else f"{100 * fraction:.1f}".removesuffix(".0")


def interval(limits: Sequence[float] | None) -> str:
    """`[0.401, 0.423]`; nothing for None."""
    return "" if limits is None else f"[{score(limits[0])}, {score(limits[1])}]"


def with_interval(show: Callable[[float | None], str], found: Sequence[float | None]) -> str:
    """A value and the ends of its interval, the percent sign once: `66 % [60, 72]`."""
    value, low, high = found
    return f"{show(value)} {brackets(show, low, high)}".rstrip()


def brackets(show: Callable[[float | None], str], low: float | None, high: float | None) -> str:
    """The ends of an interval alone, without the sign of percents: `[21.0, 30.1]`; or nothing."""
    if low is None or high is None:
        return ""
    return f"[{show(low).removesuffix(' %')}, {show(high).removesuffix(' %')}]"


def duration(seconds: float | None) -> str:
    """`0.4 s`, `41 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def plural(n: int, one: str, many: str) -> str:
    """`1 network`, `3 networks`."""
    return f"{n} {one if n == 1 else many}"


def names(titles: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = titles or [NOTHING]
    return f"{', '.join(most)} and {last}" if most else last


def runs(outcomes: Mapping[str, int]) -> str:
    """The outcomes that occurred: `24 ok, 3 unfitted`."""
    return ", ".join(f"{n} {name}" for name, n in outcomes.items() if n) or NOTHING


def cut(text: str, most: int) -> str:
    """`text`, or its beginning and an ellipsis if it is longer than `most`."""
    return text if len(text) <= most else text[: most - 1] + "…"


def tail(text: str, most: int) -> str:
    """`text`, or its end after an ellipsis if it is longer than `most`."""
    return text if len(text) <= most else "…" + text[1 - most :]


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of every value of nested mappings and lists; names are dotted, as `--set` has
    them, and list items count from 0."""
    for key, value in values.items():
        name = f"{above}.{key}" if above else key
        if key in NOT_SHOWN:
            continue
        if isinstance(value, Mapping):
            yield from leaves(value, name)
        elif isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
            yield from leaves({str(k): v for k, v in enumerate(value)}, name)
        elif isinstance(value, list | tuple):
            yield name, ", ".join(str(item) for item in value) or "none"
        else:
            yield name, f"{value:.6g}" if isinstance(value, float) else str(value)
