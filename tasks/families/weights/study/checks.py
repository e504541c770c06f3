"""Rules by which each claim of the KKT paper is decided (`claims` has them in words): our numbers,
and the verdict; NotTestableError where the study lacks what a claim is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from recon_core.summary import t_interval
from tasks.families.weights.study.results import Floats, Results, difference
from tasks.study.statements import (
    NotTestableError,
    Verdict,
    above,
    all_of,
    decided_by,
    every,
    share_above,
    share_at_most,
)

QUARTER = 0.25
"""A large portion of a training set."""
NEXT_TO_NOTHING = 0.05
"""At most this share of images is none to speak of."""
REGRESSION = ("MSE", "L2.5", "Huber")
WORDS = {"n_classes": "number of classes", "n_images": "number of images"}
Cell = Mapping[str, Any]


def several(values: Iterable[Any], what: str) -> list[Any]:
    """The values in order; NotTestableError if there is but one."""
    found = sorted(values)
    if len(found) < 2:
        raise NotTestableError(f"one {what} only")
    return found


def _row(r: Results, panel: str, along: str, **at: Any) -> list[dict[str, Any]]:
    """Cells of a panel in the order of an axis of two values or more."""
    row = sorted(r.cells(panel, **at), key=lambda cell: int(cell["at"][along]))
    several({cell["at"][along] for cell in row}, WORDS[along])
    return row


def _values(cells: Iterable[Cell], axis: str) -> list[Any]:
    """Values that cells have on an axis, in order of appearance."""
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
    """The cells of fewest and of most classes."""
    cells = sorted(r.cells("fixed"), key=lambda cell: int(cell["at"]["n_classes"]))
    return cells[0], cells[-1]


def ten_against_binary(r: Results) -> Verdict:
    _few, ten = _ends_of_fixed(r)
    (binary,) = r.cells("binary")
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
    """Cells were trained on their own images, so they are drawn independently of each other."""
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
    votes, nearest = (sum(of[good] for of in found) for found in (
        [cell["vote"] for cell in cells], [cell["vote"]["nearest"] for cell in cells]
    ))  # fmt: skip
    ours = (
        f"mean SSIM {np.mean(gains):+.4f} [{low:+.4f}, {high:+.4f}] over {len(cells)} cells; good "
        f"{nearest} of the nearest alone, {votes} of the mean"
    )
    return ours, above(low, high)


# losses


def regression_reconstructs(r: Results) -> Verdict:
    n = min(_values(r.cells("grid"), "n_images"))
    cells = {loss: r.cells("grid", loss=loss, n_images=n)[0] for loss in REGRESSION}
    return decided_by((f"{loss}, {n} images", r.beyond_decoys(c)) for loss, c in cells.items())


def large_portions(r: Results) -> Verdict:
    """Judged at the largest number of images: of a few, any network gives a large portion."""
    largest = max(cell["n_images"] for cell in r.cells("grid"))
    cells = [c for loss in REGRESSION for c in r.cells("grid", loss=loss)]
    verdicts = []
    for cell in cells:
        if cell["n_images"] == largest:
            good = np.concatenate(r.good(cell))
            verdicts.append(share_above(int(good.sum()), len(good), QUARTER))
    return f"good share, {_text((c['name'], r.share(c)) for c in cells)}", every(verdicts)


def higher_loss_comes_back_better(r: Results) -> Verdict:
    found = {
        loss: r.rank_correlation(r.cells("grid", loss=loss), "loss", "ssim")
        for loss in _values(r.cells("grid"), "loss")
    }
    parts = [f"{k} {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for k, d in found.items()]
    verdict = every(d.above() for d in found.values())
    return f"rank correlation of loss and SSIM: {', '.join(parts)}", verdict


def fewer_images_larger_share(r: Results) -> Verdict:
    rows = {
        loss: _row(r, "grid", "n_images", loss=loss) for loss in _values(r.cells("grid"), "loss")
    }
    return decided_by((k, r.more_good(row[0], row[-1], share=True)) for k, row in rows.items())


# weight decay


def _decays(r: Results, n_classes: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Cells with weight decay, and those without by their start."""
    baselines = r.cells(f"{n_classes} classes, no decay")
    return r.cells(f"{n_classes} classes"), {str(c["at"]["start"]): c for c in baselines}


def best_elsewhere(r: Results, cells: Sequence[Cell], victim: int) -> int:
    """The cell with most good images on all victims but this one: chosen without looking at it."""
    scores = [sum(g.sum() for k, g in enumerate(r.good(c)) if k != victim) for c in cells]
    return int(np.argmax(scores))


def best_decay(r: Results, cells: Sequence[Cell]) -> tuple[list[Floats], list[str]]:
    """Good images per victim with the weight decay that is best for the other victims."""
    n = len(cells[0]["victims"])
    if n < 2:
        raise NotTestableError("one victim: the best weight decay cannot be chosen without it")
    chosen = [best_elsewhere(r, cells, k) for k in range(n)]
    return [r.good(cells[c])[k] for k, c in enumerate(chosen)], [cells[c]["name"] for c in chosen]


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
    """Of networks of each number of classes."""
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
    """Good images of several cells, by the place of the victim."""
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
    """Batches are read from the settings; a full batch is no stochastic gradient."""
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
