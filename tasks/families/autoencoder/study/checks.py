"""Rules by which each claim of the autoencoder paper is decided (`claims` has them in words): our
numbers, and the verdict; NotTestableError where the study lacks what a claim is about."""

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
"""By so much a share may be lower and still count as at least as good."""
RARELY = 0.01
"""Share of test images that may be approximately recovered; 2 of 600 in the autoencoder paper."""
SUCCESS = 0.1
"""From this share on a method is said to succeed."""
F3_THRESHOLDS = (1e-3, 1e-6)
"""The largest and the smallest threshold of figure F.3."""
MOSTLY = 0.9
"""This share of runs, or of a mask's pixels, is nearly all of them."""
DEEP = 20
"""Layers of the second network of figure G.1."""
TABLE_IMAGES = {"fc": 25_000, "unet": 1_000}
"""Images that the networks of tables 1 and 2 were trained on."""


Found = list[Verdict]
Decide = Callable[[Difference], bool | None]
Named = Literal["accurate", "approximate", "decibels"]
"""A score of `RecoveryResults`."""


def compared(
    r: RecoveryResults,
    method: str,
    than: str,
    score: Named = "accurate",
    *,
    decide: Decide = Difference.above,
    told: Callable[[RecoveryResults, Found], Verdict] | None = None,
    moderately: bool = False,
) -> Verdict:
    """By victim, the scores of a method minus those of another; `told` puts them into words, by
    default those of networks that overfit perfectly."""
    victims = r.moderate() if moderately else r.perfect
    return (told or _of_perfect)(r, _against(r, victims, (method, than), getattr(r, score), decide))


def _against(
    r: RecoveryResults,
    victims: Sequence[Record],
    methods: tuple[str, str],
    score: Score,
    decide: Decide = Difference.above,
    **where: Any,
) -> Found:
    found = []
    for victim in victims:
        one, other = (r.cells(victim, name, **where) for name in methods)
        d = r.difference(one, other, score)
        shares = f"{r.share(one, score):.3g} against {r.share(other, score):.3g}"
        found.append((f"{victim['title']}: {shares}, {d}", decide(d)))
    return found


def plainly(_r: RecoveryResults, found: Found) -> Verdict:
    return all_of(found)


def beside_theirs(r: RecoveryResults, found: Found) -> Verdict:
    """Numbers of networks of the moderate regime, and of their images beside tables 1 and 2."""
    text, holds = all_of(found)
    return f"{_counts_beside_theirs(r.moderate())}: {text}", holds


def _counts_beside_theirs(victims: Sequence[Record]) -> str:
    return ", ".join(
        f"{victim['n_images']} images (theirs {TABLE_IMAGES[victim['architecture']['kind']]:,})"
        for victim in victims
    )


def not_below(d: Difference) -> bool | None:
    return d.not_below(SLACK)


def _of_perfect(r: RecoveryResults, found: Found, more: str = "") -> Verdict:
    """Numbers of networks that overfit perfectly, and on how many images, and which are none."""
    text, holds = all_of(found)
    counts = sorted({victim["n_images"] for victim in r.perfect})
    of = f"{' or '.join(str(n) for n in counts)} images each: {text}"
    if not any(victim["architecture"]["kind"] == "unet" for victim in r.perfect):
        of += "; no U-Net reached the loss of this regime"
    return of + more, holds


def _each_perfect(
    rule: Callable[[RecoveryResults, Record], Verdict],
) -> Callable[[RecoveryResults], Verdict]:
    """The check of a rule for every network that overfits perfectly."""
    return lambda r: _of_perfect(r, [rule(r, victim) for victim in r.perfect])


def _perfect(r: RecoveryResults, kind: str) -> list[Record]:
    """Networks of a kind that overfit perfectly; NotTestableError without one, which says how far
    those that there are came."""
    victims = [victim for victim in r.perfect if victim["architecture"]["kind"] == kind]
    if victims:
        return victims
    name = "U-Net" if kind == "unet" else "fully connected network"
    others = ", ".join(
        f"{victim['title']} {r.lowest(victim):g}"
        for victim in r.evaluated
        if victim["architecture"]["kind"] == kind
    )
    more = f"; the lowest losses evaluated: {others}" if others else ""
    raise NotTestableError(f"no {name} reached the loss of the perfect fitting regime{more}")


def beats_iteration(r: RecoveryResults, kind: str) -> Verdict:
    """By a wide margin, of networks of a kind."""
    victims = _perfect(r, kind)
    found = _against(r, victims, ("unknown", "iteration"), r.accurate, lambda d: d.above(WIDE))
    counts = " or ".join(str(n) for n in sorted({victim["n_images"] for victim in victims}))
    text, holds = all_of(found)
    return f"{counts} images each: {text}", holds


def higher_psnr(r: RecoveryResults) -> Verdict:
    found = [
        (f"{than}, {text} dB", holds)
        for than in ("iteration", "ddnm", "biharmonic")
        for text, holds in _against(r, r.perfect, ("unknown", than), r.decibels)
    ]
    return _of_perfect(r, found, _inpainter(r))


def _inpainter(r: RecoveryResults) -> str:
    """Quality of the diffusion model that stands for DDNM, beside inpainting without learning."""
    victim = max(r.perfect, key=lambda v: int(v["n_images"]))
    ((text, better),) = _against(r, [victim], ("ddnm", "biharmonic"), r.decibels)
    how = "better than" if better else "no better than"
    seconds = r.record["seconds"]["inpainter"]
    return (
        f"; the diffusion model was trained for {seconds:.0f} s and is {how} biharmonic inpainting "
        f"({text.partition(': ')[2]} dB): no fair stand-in for theirs, which knows ImageNet"
    )


@_each_perfect
def mask_estimate_converges(r: RecoveryResults, victim: Record) -> Verdict:
    """Runs that stop changing, and the worst mask's share of right pixels. Runs that our limit of
    alternations cut short, which the paper does not have, may have stopped later."""
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
    """Victims of the same images share what the generic methods make of them."""
    found: Found = []
    for name in ("ddnm", "biharmonic"):
        for victim in r.perfect:
            text, is_none = _none_accurate(r.cells(victim, name))
            found.append((f"{name}, {victim['title']}: {text}", is_none))
    return _of_perfect(r, found, _inpainter(r))


def _none_accurate(cells: Sequence[Record]) -> Verdict:
    n_hits, n = (sum(cell[key] for cell in cells) for key in ("n_accurate", "n"))
    return f"{n_hits} of {n}", n_hits == 0


def generic_recovers_few_approximately(r: RecoveryResults) -> Verdict:
    found: Found = []
    for victim in r.perfect:
        cells = r.cells(victim, "ddnm")
        shares = r.mean(cells, r.approximate)
        best = max(cells, key=lambda cell: r.share([cell], r.approximate))
        ((text, fewer),) = _against(r, [victim], ("unknown", "ddnm"), r.approximate)
        at_best = r.share([best], r.approximate), r.share([best], r.decibels)
        text = (
            f"{text}; of diffusion {shares}, most under {best['mask']}: {at_best[0]:.3g} at "
            f"{at_best[1]:.3g} dB"
        )
        found.append((text, every([shares.above(), fewer])))
    return _of_perfect(r, found, _inpainter(r))


def of_test_images(r: RecoveryResults, score: Named, *, at_most: float) -> Verdict:
    """By victim, the share of all test images and masks is at most that."""
    found: Found = []
    for victim in r.evaluated:
        cells = r.cells(victim, "unknown", split="test")
        shares = r.by_image(cells, getattr(r, score))
        n = len(shares) * len(cells)
        n_hits = round(float(shares.mean()) * n)
        found.append((f"{victim['title']}: {n_hits} of {n}", share_at_most(n_hits, n, at_most)))
    return all_of(found)


def copying_gives_nothing(r: RecoveryResults) -> Verdict:
    found: Found = []
    for victim in r.copying:
        for method in ("iteration", "unknown", "noise_aware"):
            cells = r.cells(victim, method)
            n_hits, n = (sum(cell[key] for cell in cells) for key in ("n_approximate", "n"))
            text = f"{victim['title']}, {method}: {n_hits} of {n}"
            found.append((text, share_at_most(n_hits, n, RARELY)))
    return all_of(found)


def _highest(victim: Record) -> float:
    if len(victim["levels"]) < 2:
        raise NotTestableError(f"{victim['title']} reached one loss only")
    return float(max(at["level"] for at in victim["levels"]))


@_each_perfect
def falls_with_the_loss(r: RecoveryResults, victim: Record) -> Verdict:
    ends = _highest(victim), r.lowest(victim)
    high, low = (r.cells(victim, "unknown", level=level) for level in ends)
    d = r.difference(low, high, r.accurate)
    shares = [f"{r.share(cells, r.accurate):.3g}" for cells in (high, low)]
    text = f"{victim['title']}: {shares[0]} at {ends[0]:g}, {shares[1]} at {ends[1]:g}, {d}"
    return text, d.above()


@_each_perfect
def high_loss_prevents(r: RecoveryResults, victim: Record) -> Verdict:
    """At the highest loss, of all methods that ask the victim."""
    level = _highest(victim)
    counts = {
        m["name"]: sum(cell["n_accurate"] for cell in r.cells(victim, m["name"], level=level))
        for m in r.record["methods"]
        if not m["generic"] and not m["ours"]
    }
    shown = ", ".join(f"{name} {n}" for name, n in counts.items())
    return f"{victim['title']} at {level:g}: {shown}", not any(counts.values())


def succeeds_where_iteration_does_not(r: RecoveryResults) -> Verdict:
    best: tuple[float, str] | None = None
    for victim in r.perfect:
        for level in (at["level"] for at in victim["levels"]):
            alone = {c["mask"]: c for c in r.cells(victim, "iteration", level=level)}
            for cell in r.cells(victim, "unknown", level=level):
                other = alone.get(cell["mask"])
                if other is None or other["n_accurate"]:
                    continue
                text = f"{victim['title']}, {cell['mask']}, {level:g}"
                share = cell["n_accurate"] / cell["n"]
                if best is None or share > best[0]:
                    best = (share, f"{text}: {cell['n_accurate']} of {cell['n']} against 0")
    if best is None:
        raise NotTestableError("iterating f recovers something everywhere")
    return f"at best {best[1]}", best[0] >= SUCCESS


def moderate_table(r: RecoveryResults, kind: str) -> Verdict:
    """Iteration, unknown and known under each mask, approximately."""
    found: Found = []
    for victim in r.moderate(kind):
        alone, unknown = (r.cells(victim, name) for name in ("iteration", "unknown"))
        known = {cell["mask"]: cell for cell in r.cells(victim, "known")}
        for one, other in zip(unknown, alone, strict=True):
            d = r.difference([one], [other], r.approximate)
            cells = [other, one, *([known[one["mask"]]] if one["mask"] in known else [])]
            shown = ", ".join(f"{r.share([cell], r.approximate):.3g}" for cell in cells)
            found.append((f"{victim['title']}, {one['mask']}: {shown}; {d}", d.above()))
    text, holds = all_of(found)
    return f"{_counts_beside_theirs(r.moderate(kind))}: {text}", holds


def with_noise(r: RecoveryResults, *, deep: bool) -> Verdict:
    """Comparison with noise, of networks of 20 layers or of the others."""
    noisy = [cell for cell in r.record["cells"] if cell["sigma"] > 0]
    if not noisy:
        raise NotTestableError("the study has no noise")
    names = {cell["victim"] for cell in noisy}
    victims = [
        victim
        for victim in r.evaluated
        if victim["name"] in names and (victim["architecture"].get("depth") == DEEP) == deep
    ]
    if not victims:
        of = f"of {DEEP} layers" if deep else f"but those of {DEEP} layers"
        raise NotTestableError(f"no network {of} was asked with noise")
    return all_of([
        (f"noise {sigma:g}, {text}", holds)
        for sigma in sorted({cell["sigma"] for cell in noisy})
        for text, holds in _against(
            r, victims, ("unknown", "iteration"), r.approximate, sigma=sigma
        )
    ])  # fmt: skip


def at_every_threshold(r: RecoveryResults) -> Verdict:
    victims = _perfect(r, "unet")
    masks = [mask["name"] for mask in r.record["masks"]]
    mask = "window" if "window" in masks else masks[-1]
    high, low = F3_THRESHOLDS
    text, holds = all_of([
        (f"{threshold:g}, {text}", holds)
        for threshold in r.record["thresholds"]["all"]
        if low <= threshold <= high
        for text, holds in _against(
            r, victims, ("unknown", "iteration"), r.below(threshold), mask=mask
        )
    ])  # fmt: skip
    return f"mask {mask!r}: {text}", holds


def ours_no_test_image(r: RecoveryResults) -> Verdict:
    cells = [c for v in r.evaluated for c in r.cells(v, "noise_aware", split="test")]
    text, is_none = _none_accurate(cells)
    return f"{text} images, over all victims and masks", is_none


Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]
Score = Callable[[Floats], Floats]


class RecoveryResults:
    """A study's record; every look-up raises NotTestableError where there is nothing."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.accurate: Score = self.below(float(record["thresholds"]["accurate"]))
        self.approximate: Score = self.below(float(record["thresholds"]["approximate"]))

    @staticmethod
    def below(threshold: float) -> Score:
        """1 where an error is below the threshold, else 0."""
        return lambda mse: (mse < threshold).astype(np.float64)

    @staticmethod
    def decibels(mse: Floats) -> Floats:
        return np.asarray(psnr(torch.from_numpy(mse)).numpy())

    @property
    def perfect(self) -> list[Record]:
        """Victims that overfit their images, beyond the moderate regime."""
        few = [victim["name"] for victim in moderate(self.record)]
        victims = [v for v in self.record["victims"] if v["name"] not in few and not copies(v)]
        return self._asked(victims, "victim of the perfect fitting regime was evaluated")

    def moderate(self, kind: str = "") -> list[Record]:
        """Victims of the moderate regime that overfit: "fc", "unet", or both."""
        of_kind = [v for v in moderate(self.record) if kind in ("", v["architecture"]["kind"])]
        found = [victim for victim in of_kind if not copies(victim)]
        return self._asked(found, f"{kind} victim of the moderate regime was evaluated".strip())

    @property
    def copying(self) -> list[Record]:
        """Victims that reached a low loss by copying their input."""
        found = [victim for victim in self.record["victims"] if copies(victim)]
        return self._asked(found, "victim copies its input")

    @property
    def evaluated(self) -> list[Record]:
        return self._asked(self.record["victims"], "victim reached a loss")

    def _asked(self, victims: Sequence[Record], what: str) -> list[Record]:
        found = [victim for victim in victims if victim["levels"]]
        if not found:
            raise NotTestableError(f"no {what}")
        return found

    def cells(
        self, victim: Record, method: str, *, level: float | None = None, **where: Any
    ) -> list[Record]:
        """Cells of a method in the order of masks, by default at the lowest loss reached."""
        at = {"sigma": 0.0, "split": "train", **where, "method": method}
        if level is None:
            found = at_lowest(self.record, victim, **at)
        else:
            found = cells_of(self.record, victim=victim["name"], level=level, **at)
        if not found:
            raise NotTestableError(f"no {method!r} on {victim['title']} {_words(where)}".rstrip())
        return found

    def lowest(self, victim: Record) -> float:
        """The lowest loss that was reached."""
        found = lowest(victim)
        if found is None:
            raise NotTestableError(f"{victim['title']} reached no loss")
        return float(found["level"])

    def by_image(self, cells: Sequence[Record], score: Score) -> Floats:
        """The mean score of every image over its cells, which are its masks."""
        n = min(len(cell["mse"]) for cell in cells)
        scores = [score(np.array(cell["mse"][:n], np.float64)) for cell in cells]
        return np.asarray(np.mean(scores, axis=0))

    def share(self, cells: Sequence[Record], score: Score) -> float:
        return float(self.by_image(cells, score).mean())

    def mean(self, cells: Sequence[Record], score: Score) -> Difference:
        """The share of `cells`, with its interval over images."""
        values = self.by_image(cells, score)
        return Difference(float(values.mean()), *bootstrap_interval(values))

    def difference(
        self, cells: Sequence[Record], than: Sequence[Record], score: Score
    ) -> Difference:
        """The mean over images of how much higher their scores are; over the masks of both."""
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


def _words(where: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in where.items())
