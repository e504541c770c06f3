"""A study's record by cell and victim, and the rules that decide the claims of the KKT paper.

`claims` states the rules in words. A rule returns our numbers and its verdict, or raises
NotTestableError where the study lacks what the claim is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from recon_core.summary import N_BOOTSTRAP, bootstrap_interval, t_interval
from tasks.study.statements import (
    Difference,
    NotTestableError,
    Verdict,
    above,
    all_of,
    decided_by,
    every,
    share_above,
    share_at_most,
)

MIN_IMAGES = 8
"""Least images of a victim for a rank correlation."""
PAPER_ATTACKS, PAPER_ITERATIONS = 100, 50_000
"""The KKT paper's effort on each network."""
QUARTER = 0.25
"""Share that counts as a large portion of a training set."""
NEXT_TO_NOTHING = 0.05
"""Share of images up to which next to nothing came back."""
REGRESSION = ("MSE", "L2.5", "Huber")
WORDS = {"n_classes": "number of classes", "n_images": "number of images"}
Cell = Mapping[str, Any]
Floats = npt.NDArray[np.float64]


class Results:
    """A study's record by cell and victim. SSIM has our `window` of 11 pixels, or the window of 3
    of the KKT paper's code."""

    def __init__(self, record: Mapping[str, Any], *, window: Literal[11, 3] = 11) -> None:
        self.record = record
        self.threshold = float(record["good_threshold"])
        columns = record["images"]
        self.cell = np.array(columns["cell"], np.int64)
        self.victim = np.array(columns["victim"], np.int64)
        self.score = "ssim" if window == 11 else "ssim3"
        names = {"ssim": self.score, "decoy_ssim": f"decoy_{self.score}"}
        self.values: dict[str, Floats] = {
            name: np.array([np.nan if v is None else v for v in columns[key]], np.float64)
            for name in ("margin", "loss", "ssim", "decoy_ssim")
            if (key := names.get(name, name)) in columns
        }

    def cells(self, panel: str | None = None, **at: Any) -> list[dict[str, Any]]:
        """Cells of a panel at these values of the axes, in order.

        Raises NotTestableError if there is none.
        """
        found = [
            dict(cell)
            for cell in self.record["cells"]
            if (panel is None or cell["panel"] == panel)
            and all(cell["at"].get(name) == value for name, value in at.items())
        ]
        if not found:
            raise NotTestableError(f"no cell with {panel or ''} {at or ''}".strip())
        return found

    def of(self, cell: Cell, name: str) -> list[Floats]:
        """A column of the images, victim by victim.

        If the record lacks the decoys' scores by this window, they are 0 where no decoy is good;
        NotTestableError is raised where one is.
        """
        if name in self.values:
            return [self.values[name][self.victim == victim] for victim in cell["victims"]]
        if n_good := cell["decoys"]["n_good_ssim3"]:
            raise NotTestableError(
                f"{cell['name']}: {n_good} decoys are good by a window of 3, but whose was not kept"
            )
        return [np.zeros(cell["n_images"]) for _victim in cell["victims"]]

    def short_of(self) -> str | None:
        """Describe the attacks on a network if they are fewer or shorter than the KKT paper's."""
        n = int(self.record["n_attacks"])
        ends = {
            int(max(cell["experiment"]["attack"]["save_at"]))
            for cell in self.record["settings"]["cells"]
        }
        if n >= PAPER_ATTACKS and min(ends, default=0) >= PAPER_ITERATIONS:
            return None
        return (
            f"{n} attacks of {' or '.join(f'{end:,}' for end in sorted(ends))} iterations on a "
            f"network (theirs {PAPER_ATTACKS} of {PAPER_ITERATIONS:,})"
        )

    def good(self, cell: Cell, name: str = "ssim") -> list[Floats]:
        """1 where the SSIM is above the threshold, else 0, victim by victim."""
        return [(v > self.threshold).astype(np.float64) for v in self.of(cell, name)]

    def more_good(self, cell: Cell, than: Cell, *, share: bool = False) -> Difference:
        """Good images (or their share) of a cell minus those of another."""
        return difference(self.good(cell), self.good(than), mean=share)

    def beyond_decoys(self, cell: Cell) -> Difference:
        """Share of good images minus share of good decoys."""
        return difference(self.good(cell), self.good(cell, "decoy_ssim"), mean=True)

    def share(self, cell: Cell) -> float:
        return float(np.concatenate(self.good(cell)).mean())

    def count(self, cell: Cell) -> float:
        """Good images per victim."""
        return float(sum(g.sum() for g in self.good(cell)) / len(cell["victims"]))

    def rank_correlation(self, cells: Sequence[Cell], one: str, other: str) -> Difference:
        """Spearman's correlation within victims, averaged over the victims of all cells."""
        rhos = []
        for cell in cells:
            for a, b in zip(self.of(cell, one), self.of(cell, other), strict=True):
                usable = np.isfinite(a) & np.isfinite(b)
                if usable.sum() >= MIN_IMAGES and np.ptp(a[usable]) and np.ptp(b[usable]):
                    rhos.append(float(stats.spearmanr(a[usable], b[usable]).statistic))
        if len(rhos) < 2:
            raise NotTestableError(
                f"too few victims of {MIN_IMAGES} images or more whose {one} and {other} vary"
            )
        low, high = bootstrap_interval(np.array(rhos))
        return Difference(float(np.mean(rhos)), low, high, tuple(rhos), "victim")


def difference(one: Sequence[Floats], other: Sequence[Floats], *, mean: bool = False) -> Difference:
    """Difference of sums (or means) over images, averaged over victims, with a bootstrap interval
    over the images of each victim."""
    if len(one) != len(other):
        raise NotTestableError("the cells have other numbers of victims")

    def total(values: Floats) -> float:
        return float(values.mean() if mean else values.sum())

    by_victim = [total(a) - total(b) for a, b in zip(one, other, strict=True)]
    rng = np.random.default_rng(0)

    def drawn(groups: Sequence[Floats]) -> Floats:
        sums = np.zeros(N_BOOTSTRAP)
        for values in groups:
            picked = rng.choice(values, (N_BOOTSTRAP, len(values)))
            sums += picked.mean(1) if mean else picked.sum(1)
        return sums / len(groups)

    low, high = np.quantile(drawn(one) - drawn(other), [0.025, 0.975])
    value = float(np.mean(by_victim))
    return Difference(value, float(low), float(high), tuple(by_victim), "victim")


def several(values: Iterable[Any], what: str) -> list[Any]:
    """Sort the values; raise NotTestableError if there is only one."""
    found = sorted(values)
    if len(found) < 2:
        raise NotTestableError(f"one {what} only")
    return found


def _row(r: Results, panel: str, along: str, **at: Any) -> list[dict[str, Any]]:
    """Cells of a panel in the order of an axis, which must have two values or more."""
    row = sorted(r.cells(panel, **at), key=lambda cell: int(cell["at"][along]))
    several({cell["at"][along] for cell in row}, WORDS[along])
    return row


def _values(cells: Iterable[Cell], axis: str) -> list[Any]:
    """Values of cells on an axis, in order of appearance."""
    return list(dict.fromkeys(cell["at"][axis] for cell in cells))


def _text(results: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name}: {value:.3g}" for name, value in results)


def _arrows(values: Iterable[float], digits: int) -> str:
    return " -> ".join(f"{value:.{digits}g}" for value in values)


# multiclass


def more_classes_more_good(r: Results, *, share: bool = False) -> Verdict:
    found = []
    for n in sorted(_values(r.cells("grid"), "per_class")):
        row = _row(r, "grid", "n_classes", per_class=n)
        shown = _arrows((r.share(c) if share else r.count(c) for c in row), 3)
        name = f"{n} each, {row[0]['at']['n_classes']} to {row[-1]['at']['n_classes']} classes"
        found.append((f"{name} ({shown})", r.more_good(row[-1], row[0], share=share)))
    return decided_by(found)


def fixed_number(r: Results) -> Verdict:
    row = _row(r, "fixed", "n_classes")
    counts = _text((f"{c['at']['n_classes']} classes", r.count(c)) for c in row)
    d = r.more_good(row[-1], row[0])
    return f"good per victim, {counts}; last minus first {d}", d.holds


def _ends_of_fixed(r: Results) -> tuple[Cell, Cell]:
    """The cells with the fewest and the most classes."""
    cells = sorted(r.cells("fixed"), key=lambda cell: int(cell["at"]["n_classes"]))
    return cells[0], cells[-1]


def ten_against_binary(r: Results) -> Verdict:
    (_few, ten), (binary,) = _ends_of_fixed(r), r.cells("binary")
    d = r.more_good(ten, binary)
    return f"{r.count(ten):.3g} against {r.count(binary):.3g} good per victim: {d}", d.holds


def near_the_boundary(r: Results) -> Verdict:
    d = r.rank_correlation(r.cells(), "margin", "ssim")
    shown = f"rank correlation of distance and SSIM {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
    return f"{shown} over {len(d.each)} victims", above(-d.high, -d.low)


def more_images_matter(r: Results) -> Verdict:
    few, ten = _ends_of_fixed(r)
    return _effective(ten, few)


def _effective(cell: Cell, than: Cell) -> Verdict:
    pairs = list(zip(cell["victim"]["n_effective"], than["victim"]["n_effective"], strict=True))
    if any(a is None or b is None for a, b in pairs):
        raise NotTestableError("a victim has no loss left on any image")
    one, other = (", ".join(f"{pair[k]:.3g}" for pair in pairs) for k in (0, 1))
    ours = (
        f"effective number of images of each victim, {cell['name']}: {one} of {cell['n_images']}; "
        f"{than['name']}: {other} of {than['n_images']}"
    )
    return ours, all(a > b for a, b in pairs)


def vote_beats_nearest(r: Results) -> Verdict:
    """By an interval over cells, which are independent: each was trained on images of its own."""
    cells = [cell for cell in r.cells() if cell["vote"] and cell["targets"]["mean_ssim"]]
    if len(cells) < 2:
        raise NotTestableError("no vote was scored in two cells")
    name, good = f"mean_{r.score}", "n_good" if r.score == "ssim" else f"n_good_{r.score}"
    if not all(cell["vote"].get("nearest") for cell in cells):
        lost = np.mean([c["vote"]["mean_ssim"] - c["targets"]["mean_ssim"] for c in cells])
        raise NotTestableError(
            "the nearest alone was not scored; less the best match by SSIM, which is chosen with "
            f"the answer at hand, the mean SSIM is {lost:+.4f} over {len(cells)} cells (window of "
            "11)"
        )
    gains = [cell["vote"][name] - cell["vote"]["nearest"][name] for cell in cells]
    low, high = t_interval(gains)
    ours = (
        f"mean SSIM {np.mean(gains):+.4f} [{low:+.4f}, {high:+.4f}] over {len(cells)} cells; good "
        f"{sum(cell['vote']['nearest'][good] for cell in cells)} of the nearest alone, "
        f"{sum(cell['vote'][good] for cell in cells)} of the mean"
    )
    return ours, above(low, high)


# losses


def regression_reconstructs(r: Results) -> Verdict:
    n = min(_values(r.cells("grid"), "n_images"))
    cells = {loss: r.cells("grid", loss=loss, n_images=n)[0] for loss in REGRESSION}
    return decided_by((f"{loss}, {n} images", r.beyond_decoys(c)) for loss, c in cells.items())


def large_portions(r: Results) -> Verdict:
    """Judge by the largest number of images: any network gives a large portion of a few."""
    largest = max(cell["n_images"] for cell in r.cells("grid"))
    cells = [c for loss in REGRESSION for c in r.cells("grid", loss=loss)]
    verdicts = []
    for cell in cells:
        if cell["n_images"] == largest:
            good = np.concatenate(r.good(cell))
            verdicts.append(share_above(int(good.sum()), len(good), QUARTER))
    return f"good share, {_text((c['name'], r.share(c)) for c in cells)}", every(verdicts)


def higher_loss_comes_back_better(r: Results) -> Verdict:
    names = _values(r.cells("grid"), "loss")
    found = [r.rank_correlation(r.cells("grid", loss=name), "loss", "ssim") for name in names]
    each = (f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for d in found)
    text = ", ".join(f"{name} {shown}" for name, shown in zip(names, each, strict=True))
    return f"rank correlation of loss and SSIM: {text}", every(d.above() for d in found)


def fewer_images_larger_share(r: Results) -> Verdict:
    rows = {k: _row(r, "grid", "n_images", loss=k) for k in _values(r.cells("grid"), "loss")}
    return decided_by((k, r.more_good(row[0], row[-1], share=True)) for k, row in rows.items())


# weight decay


def _decays(r: Results, n_classes: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Cells with weight decay, and cells without it by their start."""
    baselines = r.cells(f"{n_classes} classes, no decay")
    return r.cells(f"{n_classes} classes"), {str(c["at"]["start"]): c for c in baselines}


def best_decay(r: Results, cells: Sequence[Cell]) -> tuple[list[Floats], list[str]]:
    """Good images per victim, and the cell's name, at the weight decay that gives most good images
    on the other victims: it is chosen without looking at the victim itself."""
    sums = np.array([[good.sum() for good in r.good(cell)] for cell in cells])
    if sums.shape[1] < 2:
        raise NotTestableError("one victim: the best weight decay cannot be chosen without it")
    chosen = [cells[c] for c in (sums.sum(1, keepdims=True) - sums).argmax(0)]
    return [r.good(cell)[k] for k, cell in enumerate(chosen)], [cell["name"] for cell in chosen]


def against_start(r: Results, start: str) -> Verdict:
    found = []
    for n_classes in (2, 10):
        cells, baselines = _decays(r, n_classes)
        good, names = best_decay(r, cells)
        base = baselines[start]
        label = f"{' / '.join(sorted(set(names)))} against {base['name']}"
        counts = f"({np.mean([g.sum() for g in good]):.3g} against {r.count(base):.3g})"
        found.append((f"{label} {counts}", difference(good, r.good(base))))
    return decided_by(found)


def none_without_decay(r: Results) -> Verdict:
    """Decide for each number of classes."""
    found = []
    for n_classes in (2, 10):
        cell = _decays(r, n_classes)[1]["standard"]
        good = np.concatenate(r.good(cell))
        text = f"{cell['name']}: {good.sum():.0f} of {len(good)} good"
        found.append((text, share_at_most(int(good.sum()), len(good), NEXT_TO_NOTHING)))
    return all_of(found)


def decay_makes_more_images_matter(r: Results) -> Verdict:
    both = [_decays(r, n_classes) for n_classes in (2, 10)]
    return all_of([_effective(max(cells, key=r.count), base["small"]) for cells, base in both])


def test_error_hardly_changes(r: Results) -> Verdict:
    found = []
    for n_classes in (2, 10):
        cells, baselines = _decays(r, n_classes)
        accuracies = [
            [a for a in cell["victim"]["test_accuracy"] if a is not None]
            for cell in (*cells, baselines["standard"])
        ]
        if not all(accuracies):
            raise NotTestableError("victims were not tested on other images")
        low, high = (end(float(np.mean(a)) for a in accuracies) for end in (min, max))
        found.append((f"{n_classes} classes: accuracy {low:.3f} to {high:.3f}", high - low <= 0.05))
    return all_of(found)


def unfitted_come_back(r: Results) -> Verdict:
    found = [
        (f"{cell['name']} (accuracy {min(accuracies):.2f})", r.beyond_decoys(cell))
        for cell in r.cells()
        if min(accuracies := cell["victim"]["train_accuracy"]) < 1
    ]
    if not found:
        raise NotTestableError("every victim classifies its own images")
    verdicts = {d.holds for _name, d in found}
    return decided_by(found)[0], True if True in verdicts else None if None in verdicts else False


# convolutions


def cnn_comes_back(r: Results) -> Verdict:
    best = max(r.cells("decay"), key=r.share)
    d = r.beyond_decoys(best)
    return f"{best['name']}: share {r.share(best):.3g}, beyond decoys {d}", d.holds


def cnn_needs_decay(r: Results) -> Verdict:
    good, _names = best_decay(r, r.cells("decay"))
    return decided_by(
        (f"against {c['name']} ({r.count(c):.3g} good per victim)", difference(good, r.good(c)))
        for c in r.cells("no decay")
    )


def fewer_channels_fewer_good(r: Results) -> Verdict:
    channels = several(_values(r.cells("grid"), "channels"), "number of channels")
    cells = {c: r.cells("grid", channels=c) for c in channels}
    sums = _text((f"{c} channels", sum(map(r.share, row))) for c, row in cells.items())
    most, least = (_together(r, cells[channels[k]]) for k in (-1, 0))
    d = difference(most, least, mean=True)
    return f"shares summed over kernels, {sums}; mean difference {d}", d.holds


def middle_kernels_are_safer(r: Results) -> Verdict:
    kernels = sorted(_values(r.cells("grid"), "kernel"))
    if len(kernels) < 3:
        raise NotTestableError("fewer than three kernels")
    good = [_together(r, r.cells("grid", kernel=k)) for k in kernels]
    shares = [float(np.concatenate(g).mean()) for g in good]
    lowest = min(range(1, len(kernels) - 1), key=lambda k: shares[k])
    ends = [difference(good[k], good[lowest], mean=True) for k in (0, -1)]
    shown = _text((f"side {k}", share) for k, share in zip(kernels, shares, strict=True))
    text = f"share, {shown}; smallest and largest above side {kernels[lowest]} by "
    return text + " and ".join(map(str, ends)), every(d.holds for d in ends)


def _together(r: Results, cells: Sequence[Cell]) -> list[Floats]:
    """Good images of several cells joined, victim by victim."""
    return [np.concatenate(groups) for groups in zip(*(r.good(c) for c in cells), strict=True)]


# width


def _panels(r: Results) -> list[str]:
    return list(dict.fromkeys(cell["panel"] for cell in r.cells()))


def wider_means_more(r: Results) -> Verdict:
    found = []
    for panel in _panels(r):
        cells = r.cells(panel)
        widths, rows = several(_values(cells, "width"), "width"), []
        for n in sorted(_values(cells, "n_images")):
            shares = (r.share(r.cells(panel, width=w, n_images=n)[0]) for w in widths)
            rows.append(f"{n} images {_arrows(shares, 2)}")
        ends = [_together(r, r.cells(panel, width=w)) for w in (widths[-1], widths[0])]
        found.append((f"{panel} ({'; '.join(rows)})", difference(*ends, mean=True)))
    return decided_by(found)


def fewer_images_at_a_width(r: Results) -> Verdict:
    found = []
    for panel in _panels(r):
        widest = max(_values(r.cells(panel), "width"))
        row = _row(r, panel, "n_images", width=widest)
        text = f"{panel}, width {widest} ({_arrows(map(r.share, row), 2)})"
        found.append((text, r.more_good(row[0], row[-1], share=True)))
    return decided_by(found)


def all_of_ten(r: Results) -> Verdict:
    found = []
    for panel in _panels(r):
        fewest = r.cells(panel, n_images=min(_values(r.cells(panel), "n_images")))
        widest = max(fewest, key=lambda cell: int(cell["at"]["width"]))
        found.append((widest["name"], r.share(widest)))
    return f"good share, {_text(found)}", all(share == 1 for _name, share in found)


# large


def some_come_back(r: Results) -> Verdict:
    (cell,) = r.cells("large")
    d = r.beyond_decoys(cell)
    return f"{r.count(cell):.3g} good of {cell['n_images']} per victim; beyond decoys {d}", d.holds


def minibatches_come_back(r: Results) -> Verdict:
    """Read the batch sizes from the settings; a full batch is no stochastic gradient."""
    found = []
    for cell, settings in zip(r.cells(), r.record["settings"]["cells"], strict=True):
        size = settings["experiment"]["training"]["batch_size"]
        if size is not None and size < cell["n_images"]:
            name = f"{cell['name']}, batches of {size}"
            found.append((f"{name} ({r.count(cell):.3g} good per victim)", r.beyond_decoys(cell)))
    if not found:
        raise NotTestableError("every victim was trained with its full batch")
    return decided_by(found)


def most_near_few_good(r: Results) -> Verdict:
    (cell,) = r.cells("large")
    numbers = cell["victim"]["n_effective"]
    if any(n is None for n in numbers):
        raise NotTestableError("a victim has no loss left on any image")
    good = [int(g.sum()) for g in r.good(cell)]
    shown = ", ".join(f"{n:.3g}" for n in numbers)
    ours = f"effective number of images {shown} of {cell['n_images']}, good {good}"
    return ours, all(g < n for g, n in zip(good, numbers, strict=True))
