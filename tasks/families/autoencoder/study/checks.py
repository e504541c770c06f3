"""Rules that decide the claims of the autoencoder paper (`claims` states them in words). A rule
returns our numbers and its verdict, or raises NotTestableError where the study lacks what the claim
is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from recon_core.similarity import psnr
from recon_core.summary import bootstrap_interval, proportion_interval
from tasks.families.autoencoder.study.figure_specs import (
    at_lowest,
    cells_of,
    copies,
    lowest,
    moderate,
)
from tasks.study.statements import (
    Difference,
    NotTestableError,
    Verdict,
    all_of,
    every,
    share_above,
    share_at_most,
)

WIDE = 0.1
"""A wide margin between two shares."""
SLACK = 0.02
"""How much lower a share may be and still count as at least as good."""
RARELY = 0.01
"""Share of test images that may be recovered approximately; 2 of 600 in the autoencoder paper."""
SUCCESS = 0.1
"""Least share of images at which a method succeeds."""
F3_THRESHOLDS = (1e-3, 1e-6)
"""The largest and the smallest threshold of figure F.3."""
MOSTLY = 0.9
"""Share of runs, or of a mask's pixels, that counts as nearly all."""
DEEP = 20
"""Layers of the second network of figure G.1."""
TABLE_IMAGES = {"fc": 25_000, "unet": 1_000}
"""Number of training images of the networks of tables 1 and 2."""

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]
Score = Literal["accurate", "approximate", "decibels"] | float
"""Score of an image: 1 if its error is below the threshold, else 0; or its PSNR."""
Regime = Literal["perfect", "moderate", "copying", "evaluated"]
NO_VICTIM: dict[Regime, str] = {
    "perfect": "victim of the perfect fitting regime was evaluated",
    "moderate": "victim of the moderate regime was evaluated",
    "copying": "victim copies its input",
    "evaluated": "victim reached a loss",
}
Verdicts = list[Verdict]
Decide = Callable[[Difference], bool | None]


class RecoveryResults:
    """A study's record by victim, loss and method, image by image. Look-ups raise NotTestableError
    if they find nothing."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def victims(self, regime: Regime, kind: str = "") -> list[Record]:
        """Evaluated victims of a kind ("fc", "unet"), or of both.

        "perfect" and "moderate" are victims that overfit, by the loss that they reached; "copying"
        are victims that reached a low loss by copying their input.
        """
        few = [victim["name"] for victim in moderate(self.record)]
        found = []
        for victim in self.record["victims"]:
            own: Regime = "moderate" if victim["name"] in few else "perfect"
            if copies(victim):
                own = "copying"
            of_kind = kind in ("", victim["architecture"]["kind"])
            if victim["levels"] and of_kind and regime in (own, "evaluated"):
                found.append(victim)
        if not found:
            raise NotTestableError(f"no {kind} {NO_VICTIM[regime]}".replace("  ", " "))
        return found

    def cells(
        self, victim: Record, method: str, *, level: float | None = None, **where: Any
    ) -> list[Record]:
        """Cells of a method, in the order of masks; by default at the lowest loss reached."""
        at = {"sigma": 0.0, "split": "train", **where, "method": method}
        if level is None:
            found = at_lowest(self.record, victim, **at)
        else:
            found = cells_of(self.record, victim=victim["name"], level=level, **at)
        if not found:
            words = ", ".join(f"{name} {value}" for name, value in where.items())
            raise NotTestableError(f"no {method!r} on {victim['title']} {words}".rstrip())
        return found

    def by_image(self, cells: Sequence[Record], score: Score) -> Floats:
        """The mean score of every image over the cells, one per mask."""
        n = min(len(cell["mse"]) for cell in cells)
        mse = np.array([cell["mse"][:n] for cell in cells], np.float64)
        if score == "decibels":
            decibels = psnr(torch.from_numpy(mse.ravel())).numpy()
            return np.asarray(decibels.reshape(mse.shape).mean(axis=0))
        limit = self.record["thresholds"][score] if isinstance(score, str) else score
        return np.asarray((mse < limit).mean(axis=0))

    def share(self, cells: Sequence[Record], score: Score) -> float:
        return float(self.by_image(cells, score).mean())

    def difference(
        self, cells: Sequence[Record], than: Sequence[Record], score: Score
    ) -> Difference:
        """The mean difference of the images' scores, over the masks that both have."""
        masks = {cell["mask"] for cell in cells} & {cell["mask"] for cell in than}
        if not masks:
            raise NotTestableError("the methods have no mask in common")
        one, other = (
            self.by_image([cell for cell in side if cell["mask"] in masks], score)
            for side in (cells, than)
        )
        n = min(len(one), len(other))
        gained = one[:n] - other[:n]
        return Difference(float(gained.mean()), *bootstrap_interval(gained))


def not_below(d: Difference) -> bool | None:
    return d.not_below(SLACK)


def compared(
    r: RecoveryResults,
    method: str,
    than: str,
    score: Score = "accurate",
    *,
    decide: Decide = Difference.above,
    regime: Regime = "perfect",
    beside_theirs: bool = False,
) -> Verdict:
    """Compare the scores of two methods, victim by victim."""
    victims = r.victims(regime)
    verdicts = _against(r, victims, (method, than), score, decide)
    if regime == "perfect" and method != "noise_aware":
        return _of_perfect(r, verdicts)
    text, holds = all_of(verdicts)
    return f"{_counts_beside_theirs(victims)}: {text}" if beside_theirs else text, holds


def _against(
    r: RecoveryResults,
    victims: Sequence[Record],
    methods: tuple[str, str],
    score: Score,
    decide: Decide = Difference.above,
    **where: Any,
) -> Verdicts:
    verdicts = []
    for victim in victims:
        one, other = (r.cells(victim, name, **where) for name in methods)
        d = r.difference(one, other, score)
        shares = f"{r.share(one, score):.3g} against {r.share(other, score):.3g}"
        verdicts.append((f"{victim['title']}: {shares}, {d}", decide(d)))
    return verdicts


def _counts_beside_theirs(victims: Sequence[Record]) -> str:
    return ", ".join(
        f"{victim['n_images']} images (theirs {TABLE_IMAGES[victim['architecture']['kind']]:,})"
        for victim in victims
    )


def _n_images(victims: Sequence[Record]) -> str:
    counts = sorted({victim["n_images"] for victim in victims})
    return f"{' or '.join(map(str, counts))} images each"


def _of_perfect(r: RecoveryResults, verdicts: Verdicts, more: str = "") -> Verdict:
    """Join verdicts on networks of the perfect fitting regime; the text has their numbers of images
    and notes if no U-Net is among them."""
    (text, holds), victims = all_of(verdicts), r.victims("perfect")
    if not any(victim["architecture"]["kind"] == "unet" for victim in victims):
        text += "; no U-Net reached the loss of this regime"
    return f"{_n_images(victims)}: {text}{more}", holds


def _each_perfect(
    rule: Callable[[RecoveryResults, Record], Verdict],
) -> Callable[[RecoveryResults], Verdict]:
    """Apply a rule to every network of the perfect fitting regime."""
    return lambda r: _of_perfect(r, [rule(r, victim) for victim in r.victims("perfect")])


def _perfect(r: RecoveryResults, kind: str) -> list[Record]:
    """Networks of a kind in the perfect fitting regime. Raises NotTestableError, with the losses
    that were reached, if there is none."""
    victims = r.victims("perfect")
    if found := [victim for victim in victims if victim["architecture"]["kind"] == kind]:
        return found
    name = "U-Net" if kind == "unet" else "fully connected network"
    others = ", ".join(
        f"{victim['title']} {(lowest(victim) or {})['level']:g}"
        for victim in r.victims("evaluated")
        if victim["architecture"]["kind"] == kind
    )
    more = f"; the lowest losses evaluated: {others}" if others else ""
    raise NotTestableError(f"no {name} reached the loss of the perfect fitting regime{more}")


def beats_iteration(r: RecoveryResults, kind: str) -> Verdict:
    """Decide whether the method beats iteration by a wide margin, for networks of a kind."""
    victims, methods = _perfect(r, kind), ("unknown", "iteration")
    text, holds = all_of(_against(r, victims, methods, "accurate", lambda d: d.above(WIDE)))
    return f"{_n_images(victims)}: {text}", holds


def higher_psnr(r: RecoveryResults) -> Verdict:
    verdicts = [
        (f"{than}, {text} dB", holds)
        for than in ("iteration", "ddnm", "biharmonic")
        for text, holds in _against(r, r.victims("perfect"), ("unknown", than), "decibels")
    ]
    return _of_perfect(r, verdicts, _inpainter(r))


def _inpainter(r: RecoveryResults) -> str:
    """Compare the diffusion model that stands for DDNM with inpainting that learns nothing."""
    victim = max(r.victims("perfect"), key=lambda v: int(v["n_images"]))
    ((text, better),) = _against(r, [victim], ("ddnm", "biharmonic"), "decibels")
    return (
        f"; the diffusion model was trained for {r.record['seconds']['inpainter']:.0f} s and is "
        f"{'better than' if better else 'no better than'} biharmonic inpainting "
        f"({text.partition(': ')[2]} dB): no fair stand-in for theirs, which knows ImageNet"
    )


@_each_perfect
def mask_estimate_converges(r: RecoveryResults, victim: Record) -> Verdict:
    """Decide by the share of runs that converge, and by the worst mask's share of right pixels.

    Runs that our limit of alternations cut short might have converged; the paper has no limit.
    """
    cells = r.cells(victim, "unknown")
    n = sum(c["n"] for c in cells)
    n_ended, n_cut = (sum(c["endings"][how] for c in cells) for how in ("converged", "limit"))
    low, high = proportion_interval(n_ended, n)
    ended = share_above(n_ended, n, MOSTLY)
    if ended is False and share_above(n_ended + n_cut, n, MOSTLY) is not False:
        ended = None
    worst = min(cells, key=lambda cell: float(cell["mask_accuracy"]))
    mean = sum(cell["mask_accuracy"] for cell in cells) / len(cells)
    most = r.record["settings"]["methods"]["unknown"]["n_alternations"]
    text = (
        f"{victim['title']}: {n_ended} of {n} runs ended of themselves within {most} alternations "
        f"({100 * low:.0f} to {100 * high:.0f} %), {n_cut} were cut short by that limit of ours, "
        f"{mean:.3f} of the pixels are right, {worst['mask_accuracy']:.3f} under {worst['mask']}"
    )
    return text, every([ended, bool(worst["mask_accuracy"] > MOSTLY)])


def generic_recovers_none(r: RecoveryResults) -> Verdict:
    """Decide for each victim; victims of the same images share the generic methods' results."""
    verdicts: Verdicts = []
    for name in ("ddnm", "biharmonic"):
        for victim in r.victims("perfect"):
            text, is_none = _none_accurate(r.cells(victim, name))
            verdicts.append((f"{name}, {victim['title']}: {text}", is_none))
    return _of_perfect(r, verdicts, _inpainter(r))


def _none_accurate(cells: Sequence[Record]) -> Verdict:
    n_hits, n = (sum(cell[key] for cell in cells) for key in ("n_accurate", "n"))
    return f"{n_hits} of {n}", n_hits == 0


def generic_recovers_few_approximately(r: RecoveryResults) -> Verdict:
    verdicts: Verdicts = []
    for victim in r.victims("perfect"):
        cells = r.cells(victim, "ddnm")
        values = r.by_image(cells, "approximate")
        shares = Difference(float(values.mean()), *bootstrap_interval(values))
        best = max(cells, key=lambda cell: r.share([cell], "approximate"))
        ((text, fewer),) = _against(r, [victim], ("unknown", "ddnm"), "approximate")
        at_best = r.share([best], "approximate"), r.share([best], "decibels")
        text = (
            f"{text}; of diffusion {shares}, most under {best['mask']}: {at_best[0]:.3g} at "
            f"{at_best[1]:.3g} dB"
        )
        verdicts.append((text, every([shares.above(), fewer])))
    return _of_perfect(r, verdicts, _inpainter(r))


def of_test_images(r: RecoveryResults, score: Score, *, at_most: float) -> Verdict:
    """Decide whether the share over all test images and masks is at most `at_most`, by victim."""
    verdicts: Verdicts = []
    for victim in r.victims("evaluated"):
        cells = r.cells(victim, "unknown", split="test")
        shares = r.by_image(cells, score)
        n = len(shares) * len(cells)
        n_hits = round(float(shares.mean()) * n)
        verdicts.append((f"{victim['title']}: {n_hits} of {n}", share_at_most(n_hits, n, at_most)))
    return all_of(verdicts)


def copying_gives_nothing(r: RecoveryResults) -> Verdict:
    verdicts: Verdicts = []
    for victim in r.victims("copying"):
        for method in ("iteration", "unknown", "noise_aware"):
            cells = r.cells(victim, method)
            n_hits, n = (sum(cell[key] for cell in cells) for key in ("n_approximate", "n"))
            text = f"{victim['title']}, {method}: {n_hits} of {n}"
            verdicts.append((text, share_at_most(n_hits, n, RARELY)))
    return all_of(verdicts)


def _highest(victim: Record) -> float:
    if len(victim["levels"]) < 2:
        raise NotTestableError(f"{victim['title']} reached one loss only")
    return float(max(at["level"] for at in victim["levels"]))


@_each_perfect
def falls_with_the_loss(r: RecoveryResults, victim: Record) -> Verdict:
    ends = _highest(victim), float((lowest(victim) or {})["level"])
    high, low = (r.cells(victim, "unknown", level=level) for level in ends)
    d = r.difference(low, high, "accurate")
    shares = [f"{r.share(cells, 'accurate'):.3g}" for cells in (high, low)]
    text = f"{victim['title']}: {shares[0]} at {ends[0]:g}, {shares[1]} at {ends[1]:g}, {d}"
    return text, d.above()


@_each_perfect
def high_loss_prevents(r: RecoveryResults, victim: Record) -> Verdict:
    """Decide at the highest loss, for all methods that query the victim."""
    level = _highest(victim)
    counts = {
        m["name"]: sum(cell["n_accurate"] for cell in r.cells(victim, m["name"], level=level))
        for m in r.record["methods"]
        if not m["generic"] and not m["ours"]
    }
    shown = ", ".join(f"{name} {n}" for name, n in counts.items())
    return f"{victim['title']} at {level:g}: {shown}", not any(counts.values())


def succeeds_where_iteration_does_not(r: RecoveryResults) -> Verdict:
    cases: list[tuple[float, str]] = []
    for victim in r.victims("perfect"):
        for level in (at["level"] for at in victim["levels"]):
            alone = {c["mask"]: c for c in r.cells(victim, "iteration", level=level)}
            for cell in r.cells(victim, "unknown", level=level):
                n, hits = cell["n"], cell["n_accurate"]
                if cell["mask"] in alone and not alone[cell["mask"]]["n_accurate"]:
                    where = f"{victim['title']}, {cell['mask']}, {level:g}"
                    cases.append((hits / n, f"{where}: {hits} of {n} against 0"))
    if not cases:
        raise NotTestableError("iterating f recovers something everywhere")
    share, text = max(cases, key=lambda case: case[0])
    return f"at best {text}", share >= SUCCESS


def moderate_table(r: RecoveryResults, kind: str) -> Verdict:
    """Compare approximate recovery by iteration, unknown and known mask, under each mask."""
    verdicts: Verdicts = []
    for victim in r.victims("moderate", kind):
        alone, unknown = (r.cells(victim, name) for name in ("iteration", "unknown"))
        known = {cell["mask"]: cell for cell in r.cells(victim, "known")}
        for one, other in zip(unknown, alone, strict=True):
            d = r.difference([one], [other], "approximate")
            cells = [other, one, *([known[one["mask"]]] if one["mask"] in known else [])]
            shown = ", ".join(f"{r.share([cell], 'approximate'):.3g}" for cell in cells)
            verdicts.append((f"{victim['title']}, {one['mask']}: {shown}; {d}", d.above()))
    text, holds = all_of(verdicts)
    return f"{_counts_beside_theirs(r.victims('moderate', kind))}: {text}", holds


def with_noise(r: RecoveryResults, *, deep: bool) -> Verdict:
    """Compare methods with noise, for networks of 20 layers or for the others."""
    noisy = [cell for cell in r.record["cells"] if cell["sigma"] > 0]
    if not noisy:
        raise NotTestableError("the study has no noise")
    names = {cell["victim"] for cell in noisy}
    victims = [
        victim
        for victim in r.victims("evaluated")
        if victim["name"] in names and (victim["architecture"].get("depth") == DEEP) == deep
    ]
    if not victims:
        of = f"of {DEEP} layers" if deep else f"but those of {DEEP} layers"
        raise NotTestableError(f"no network {of} was asked with noise")
    methods = ("unknown", "iteration")
    return all_of([
        (f"noise {sigma:g}, {text}", holds)
        for sigma in sorted({cell["sigma"] for cell in noisy})
        for text, holds in _against(r, victims, methods, "approximate", sigma=sigma)
    ])  # fmt: skip


def at_every_threshold(r: RecoveryResults) -> Verdict:
    victims, methods = _perfect(r, "unet"), ("unknown", "iteration")
    masks = [mask["name"] for mask in r.record["masks"]]
    mask = "window" if "window" in masks else masks[-1]
    high, low = F3_THRESHOLDS
    text, holds = all_of([
        (f"{threshold:g}, {text}", holds)
        for threshold in r.record["thresholds"]["all"]
        if low <= threshold <= high
        for text, holds in _against(r, victims, methods, float(threshold), mask=mask)
    ])  # fmt: skip
    return f"mask {mask!r}: {text}", holds


def ours_no_test_image(r: RecoveryResults) -> Verdict:
    cells = [c for v in r.victims("evaluated") for c in r.cells(v, "noise_aware", split="test")]
    text, is_none = _none_accurate(cells)
    return f"{text} images, over all victims and masks", is_none
