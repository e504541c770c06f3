"""Our own claims about where the span attack works, and where the KKT attack does.

A point of the grid is two cells, one per attack, on the same victims. Whether more than half of the
images come back is decided by the exact interval (Clopper and Pearson) of the share over all images
of a cell; attacks are compared by good images per victim (`tasks.families.weights.study.claims`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from recon_core.summary import proportion_interval
from tasks.families.weights.study.results import NEXT_TO_NOTHING, Cell, Results
from tasks.page.formats import OURS
from tasks.study.statements import (
    NotTestableError,
    Statement,
    Verdict,
    above,
    every,
    share_above,
    share_at_most,
)

HALF, FEW_DECOYS = 0.5, 0.01
SPAN, KKT = "span", "KKT"


def points(r: Results, axis: str | None = None) -> list[tuple[Cell, Cell]]:
    """(span, KKT) of every point, or of the base and the points of one axis, in the axis's order.

    Raises NotTestableError if there is no point, or if one lacks an attack.
    """
    cells = r.cells()
    if axis is not None:
        cells = [cell for cell in cells if cell["panel"] in ("base", axis)]
        values = list(r.record["axes"][axis]["values"])
        cells.sort(key=lambda cell: values.index(cell["at"][axis]))
        if not any(cell["panel"] == axis for cell in cells):
            raise NotTestableError(f"no cell of the axis {axis}")
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault(name_of(cell), {})[cell["at"]["attack"]] = cell
    for name, both in found.items():
        if set(both) != {SPAN, KKT}:
            raise NotTestableError(f"{name}: only attacked by {', '.join(both)}")
    return [(both[SPAN], both[KKT]) for both in found.values()]


def name_of(cell: Cell) -> str:
    """A cell's name without its attack."""
    return str(cell["name"]).rpartition("; ")[0]


def above_half(r: Results, cell: Cell) -> bool | None:
    """True if more than half of the images came back good beyond chance; None if undecided."""
    good = np.concatenate(r.good(cell))
    return share_above(int(good.sum()), len(good), HALF)


def share_text(r: Results, cell: Cell) -> str:
    """A cell's share of good images and of good decoys, in words."""
    decoys = float(np.concatenate(r.good(cell, "decoy_ssim")).mean())
    return f"{r.share(cell):.0%} (decoys {decoys:.1%})"


def more_than_half(r: Results, axis: str) -> Verdict:
    """Decide for every point of an axis; the text names the points with less than half."""
    cells = {str(span["at"][axis]): span for span, _kkt in points(r, axis)}
    verdicts = {at: above_half(r, cell) for at, cell in cells.items()}
    text = ", ".join(f"{at}: {share_text(r, cell)}" for at, cell in cells.items())
    less = [at for at, verdict in verdicts.items() if verdict is False]
    more = f"; less than half at {', '.join(less)}" if less else ""
    return text + more, every(verdicts.values())


def few_decoys(r: Results) -> Verdict:
    """Decide by the decoys of all cells together; cells above 3 % are named."""
    by_cell = {name_of(c): np.concatenate(r.good(c, "decoy_ssim")) for c, _kkt in points(r)}
    decoys = np.concatenate(list(by_cell.values()))
    n_good, many = int(decoys.sum()), [name for name, d in by_cell.items() if d.mean() > 0.03]
    text = f"{n_good} of {len(decoys)} decoys, {float(decoys.mean()):.2%}"
    text += f"; above 3 %: {', '.join(many)}" if many else ""
    more = above(*proportion_interval(n_good, len(decoys)), FEW_DECOYS)
    return text, None if more is None else not more


def seconds(cell: Cell) -> float:
    """Seconds of one attack, including the comparison of its pictures with the training images."""
    return float(cell["seconds"]) / (len(cell["victims"]) * int(cell["n_attacks"]))


def fair(r: Results, *, more_than_half: bool) -> tuple[list[tuple[Cell, Cell]], str]:
    """Points where more (or less) than half comes back and the KKT attack had at least the span
    attack's time, and a note on the points where it had less. Raises NotTestableError without
    points."""
    both = [pair for pair in points(r) if above_half(r, pair[0]) is more_than_half]
    if not both:
        half = "more" if more_than_half else "less"
        raise NotTestableError(f"nowhere does {half} than half come back")
    kept = [pair for pair in both if seconds(pair[1]) >= seconds(pair[0])]
    short = ", ".join(name_of(pair[0]) for pair in both if pair not in kept)
    if not kept:
        raise NotTestableError(f"the KKT attack had less time: {short}")
    return kept, f"; left out, the KKT attack had less time: {short}" if short else ""


def beats_kkt(r: Results) -> Verdict:
    """Compare the attacks at the points where more than half comes back."""
    both, left_out = fair(r, more_than_half=True)
    ahead = [(name_of(a), r.more_good(a, b)) for a, b in both]
    good, time = ([sum(of(cell) for cell in cells) for cells in zip(*both, strict=True)]
                  for of in (r.count, seconds))  # fmt: skip
    least = min(ahead, key=lambda row: row[1].value)
    text = (
        f"{good[0]:.4g} against {good[1]:.4g} good per victim over {len(both)} points, in "
        f"{time[0]:.0f} against {time[1]:.0f} s; least ahead at {least[0]}: {least[1]}{left_out}"
    )
    return text, every(d.holds for _name, d in ahead)


def no_more_from_kkt(r: Results) -> Verdict:
    """Compare the attacks at the points where less than half comes back."""
    both, left_out = fair(r, more_than_half=False)
    found = [(name_of(a), r.more_good(b, a)) for a, b in both]
    verdicts = [None if d.holds is None else not d.holds for _name, d in found]
    text = "KKT minus span, " + "; ".join(f"{name}: {d}" for name, d in found)
    return text + left_out, every(verdicts)


# starts, weight decay and layers


def _start(r: Results, start: str, decay: str = "0", layers: int = 2) -> tuple[Cell, Cell]:
    """(span, KKT) of the point with a standard start."""
    cells = r.cells(start=start, decay=decay, layers=layers)
    found = {cell["at"]["attack"]: cell for cell in cells}
    if set(found) != {SPAN, KKT}:
        raise NotTestableError(f"no point: {start} start, weight decay {decay}, {layers} layers")
    return found[SPAN], found[KKT]


def nothing(r: Results, start: str) -> Verdict:
    """Decide for the span attack without weight decay."""
    cell, _kkt = _start(r, start)
    good = np.concatenate(r.good(cell))
    verdict = share_at_most(int(good.sum()), len(good), NEXT_TO_NOTHING)
    return f"{cell['name']}: {share_text(r, cell)}", verdict


def decay_helps(r: Results, start: str) -> Verdict:
    """Compare weight decay with none, for the span attack from a standard start."""
    (plain, _kkt), (decayed, _kkt) = _start(r, start), _start(r, start, decay="0.01")
    d = r.more_good(decayed, plain)
    shares = f"{share_text(r, decayed)} with decay against {share_text(r, plain)} without"
    return f"{shares}: {d}", d.holds


def layers_harder(r: Results, panel: str, attack: str) -> Verdict:
    """Compare the fewest hidden layers with the most."""
    k = (SPAN, KKT).index(attack)
    if panel == "layers":
        row = [pair[k] for pair in points(r, "layers")]
    else:
        row = [_start(r, "standard, known", layers=n)[k] for n in (1, 2, 3)]
    shares = ", ".join(f"{cell['at']['layers']}: {share_text(r, cell)}" for cell in row)
    d = r.more_good(row[0], row[-1])
    return f"hidden layers, {shares}; fewest minus most {d}", d.holds


_of_ours = partial(Statement[Results], where=OURS, theirs="not measured before")
ABOVE = (
    "the share of good images and its exact interval (Clopper and Pearson) are above one half at "
    "every point of the axis; false where the whole interval is at one half or below"
)
WHAT: dict[str, str] = {
    "images": "however many images were trained on, the first layer twice as wide",
    "ratio": "however wide the first layer is for the number of images",
    "start": "from whatever start, known or not",
    "rule": "by whatever rule the network was trained",
    "batch": "after minibatches as well",
    "decay": "after weight decay as well",
    "loss": "whatever the loss was",
    "layers": "with one, two and three hidden layers",
    "bias": "with and without biases",
    "weights": "from rounded and from noisy weights",
}
FIVE = "at most 5 % of the images are good; false if more are, with the exact interval of the share"
WITH_MINUS = (
    "good images per victim with weight decay minus without: the difference holds, of the span "
    "attack"
)
STARTS: tuple[tuple[str, str, Callable[..., Verdict], str], ...] = (
    (
        "A standard start without weight decay gives the span attack nothing either, where it is "
        "not known",
        *(FIVE, nothing, "unknown"),
    ),
    ("... nor where it is known", FIVE, nothing, "known"),
    (
        "Weight decay makes the span attack possible from a standard start that is not known",
        *(WITH_MINUS, decay_helps, "unknown"),
    ),
    ("... and more comes back with it where the start is known", WITH_MINUS, decay_helps, "known"),
)
"""Claims about standard starts: the claim, its rule and check, and whether the start is known."""
LAYERS = (
    ("Networks of more layers are harder for the KKT attack", KKT, "small", "", "layers"),
    ("... and for the span attack", SPAN, "small", " that is not known", "layers"),
    (
        "... also when the start is known",
        *(SPAN, "standard", " that is known", "layers, known start"),
    ),
)
"""Claims about layers: the claim, the attack, the start, and the panel."""

STATEMENTS: tuple[Statement[Results], ...] = (
    *(
        _of_ours(
            claim=f"The span attack gives back more than half of the images {what}",
            rule=ABOVE,
            check=partial(more_than_half, axis=axis),
        )
        for axis, what in WHAT.items()
    ),
    _of_ours(
        claim="At most one decoy of a hundred passes for a training image of the span attack",
        rule="the exact interval (Clopper and Pearson) of the share of good decoys, over all "
        "points, ends at .01 or below",
        check=few_decoys,
    ),
    _of_ours(
        claim="Where the span attack gives back more than half, the KKT attack gives back less in "
        "at least its time",
        rule="good images per victim, span minus KKT: the difference holds at every such point; "
        "points at which the KKT attack had less time are left out and named",
        check=beats_kkt,
    ),
    _of_ours(
        claim="Where the span attack gives back less than half, the KKT attack gives back no more",
        rule="good images per victim, KKT minus span: the whole interval is at 0 or below at every "
        "such point; points at which the KKT attack had less time are left out and named",
        check=no_more_from_kkt,
    ),
    *(
        Statement(
            claim=claim,
            where="ours; beside section 6.1 of the KKT paper",
            theirs="not claimed; section 6.1 is of the KKT attack",
            rule=rule,
            check=partial(check, start=f"standard, {known}"),
        )
        for claim, rule, check, known in STARTS
    ),
    *(
        Statement(
            claim=claim,
            where="ours; beside section 7 of the KKT paper",
            theirs="not claimed; section 7: only models of up to several layers are considered",
            rule="good images per victim, one hidden layer minus three: the difference holds, of "
            f"the {attack} attack from a {start} start{known}",
            check=partial(layers_harder, panel=panel, attack=attack),
        )
        for claim, attack, start, known, panel in LAYERS
    ),
)
