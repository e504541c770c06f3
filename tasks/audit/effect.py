"""What a defence does to the leak, in words that are decided by intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recon_core.leakage import paired_difference
from tasks.audit.tables import rate_text, share

Shares = Mapping[str, Any]
LITTLE = 0.05
"""Share of the images up to which a network leaks little."""
SIGNIFICANT = 0.05


def is_told(attack: Mapping[str, Any], found: Shares, n_victims: int) -> bool:
    """True where members score above decoys beyond chance, or every interval of several networks
    that the share has lies above 0."""
    above: bool = attack["p_value"] <= SIGNIFICANT or (n_victims > 1 and found["interval"][0] > 0)
    return above


def effect_of(leak: Shares, before: Shares) -> dict[str, Any]:
    """The change of the leak against the network as it is, its interval of 95 %, and a word.

    The interval is over networks that share their images; of one network, that of the worst case
    of both shares' own. Words: "none found" where no image came back, with the most that the
    interval allows; "leaves at most 5 %" where the interval ends below; "raises it" and "at least
    halves it" where the whole interval does; "reduces it" where the interval lies below 0 and
    reaches half of the leak; "reduces it little" where it does not reach that; else "no effect
    measured".
    """
    change = leak["mean"] - before["mean"]
    low, high = (leak["interval"][k] - before["interval"][1 - k] for k in (0, 1))
    if len(leak["each"]) == len(before["each"]) > 1:
        change, (low, high) = paired_difference(leak["each"], before["each"])
    return {"word": _word(leak, before["mean"], low, high), "change": change,
            "interval": [low, high]}  # fmt: skip


def _word(leak: Shares, before: float, low: float, high: float) -> str:
    most = leak["interval"][1]
    if leak["mean"] == 0:
        return f"none found, at most {share(most)}"
    if low > 0:
        return "raises it"
    if most <= LITTLE and high < 0:
        return f"leaves at most {rate_text(LITTLE)}"
    if high >= 0:
        return "no effect measured"
    if -high >= before / 2:
        return "at least halves it"
    return "reduces it" if -low >= before / 2 else "reduces it little"
