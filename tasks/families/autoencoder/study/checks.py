"""How each claim of paper 000 is decided on a study: our numbers in words, and the verdict.

Every function takes `RecoveryResults` and raises NotTestableError where the study lacks what the
claim is about. `tasks.families.autoencoder.study.claims` has the claims themselves, and the rules
in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recon_core.summary import proportion_interval
from tasks.families.autoencoder.study.results import Paired, Record, RecoveryResults, Score
from tasks.families.weights.study.checks import Verdict, every
from tasks.study.results import NotTestableError

WIDE = 0.1
"""A wide margin between two shares."""
SLACK = 0.02
"""By so much a share may be lower and still count as at least as good."""
RARELY = 0.01
"""The share of test images that may be approximately recovered: 000 has 2 of 600."""
SUCCESS = 0.1
"""From this share on a method is said to succeed."""
F3_THRESHOLDS = (1e-3, 1e-6)
"""The largest and the smallest threshold of figure F.3."""
MOSTLY = 0.9
"""This share of runs, or of a mask's pixels, is nearly all of them."""
DEEP = 20
"""Layers of the second network of figure G.1."""
TABLE_IMAGES = {"fc": 25_000, "unet": 1_000}
"""What the networks of tables 1 and 2 were trained on."""


def _against(
    r: RecoveryResults,
    victims: Sequence[Record],
    method: str,
    than: str,
    score: Score,
    **where: Any,
) -> list[tuple[str, Paired]]:
    """By victim: our numbers in words, and what the method has more than the other."""
    found = []
    for victim in victims:
        one, other = (r.cells(victim, name, **where) for name in (method, than))
        d = r.difference(one, other, score)
        shares = f"{r.share(one, score):.3g} against {r.share(other, score):.3g}"
        found.append((f"{victim['title']}: {shares}, {d}", d))
    return found


def _text(found: Sequence[tuple[str, Any]]) -> str:
    return "; ".join(text for text, _value in found)


def _of_perfect(r: RecoveryResults, found: Sequence[tuple[str, Any]]) -> str:
    """The same of networks that overfit perfectly, and on how many images, and which are none."""
    counts = sorted({victim["n_images"] for victim in r.perfect})
    of = f"{' or '.join(str(n) for n in counts)} images each: {_text(found)}"
    if any(victim["architecture"]["kind"] == "unet" for victim in r.perfect):
        return of
    return f"{of}; no U-Net reached the loss of this regime"


def beats_iteration(r: RecoveryResults) -> Verdict:
    return _beats_iteration(r, "fc")


def unets_beat_iteration(r: RecoveryResults) -> Verdict:
    return _beats_iteration(r, "unet")


def _beats_iteration(r: RecoveryResults, kind: str) -> Verdict:
    victims = [victim for victim in r.perfect if victim["architecture"]["kind"] == kind]
    if not victims:
        name = "U-Net" if kind == "unet" else "fully connected network"
        raise NotTestableError(f"no {name} reached the loss of the perfect fitting regime")
    found = _against(r, victims, "unknown", "iteration", r.accurate)
    counts = " or ".join(str(n) for n in sorted({victim["n_images"] for victim in victims}))
    return f"{counts} images each: {_text(found)}", every(d.above(WIDE) for _t, d in found)


def beats_iteration_approximately(r: RecoveryResults) -> Verdict:
    found = _against(r, r.perfect, "unknown", "iteration", r.approximate)
    return _of_perfect(r, found), every(d.above() for _t, d in found)


def higher_psnr(r: RecoveryResults) -> Verdict:
    found = []
    for than in ("iteration", "ddnm", "biharmonic"):
        pairs = _against(r, r.perfect, "unknown", than, r.decibels)
        found += [(f"{than}, {text} dB", d) for text, d in pairs]
    return f"{_of_perfect(r, found)}; {_inpainter(r)}", every(d.above() for _t, d in found)


def _inpainter(r: RecoveryResults) -> str:
    """How good the diffusion model is that stands for DDNM: beside inpainting without learning."""
    victim = max(r.perfect, key=lambda v: int(v["n_images"]))
    ((text, d),) = _against(r, [victim], "ddnm", "biharmonic", r.decibels)
    how = "better than" if d.above() else "no better than"
    seconds = r.record["seconds"]["inpainter"]
    return (
        f"the diffusion model was trained for {seconds:.0f} s and is {how} biharmonic inpainting "
        f"({text.partition(': ')[2]} dB): no fair stand-in for theirs, which knows ImageNet"
    )


def mask_estimate_converges(r: RecoveryResults) -> Verdict:
    """Of every victim: how many runs stop changing, and the worst mask's share of right pixels."""
    found: list[tuple[str, bool | None]] = []
    most = r.record["settings"]["methods"]["unknown"]["n_alternations"]
    for victim in r.perfect:
        cells = r.cells(victim, "unknown")
        n, n_ended = sum(c["n"] for c in cells), sum(c["endings"]["converged"] for c in cells)
        low, high = proportion_interval(n_ended, n)
        worst = min(cells, key=lambda cell: float(cell["mask_accuracy"]))
        mean = sum(cell["mask_accuracy"] for cell in cells) / len(cells)
        text = (
            f"{victim['title']}: {n_ended} of {n} runs ended of themselves within {most} "
            f"alternations ({100 * low:.0f} to {100 * high:.0f} %), {mean:.3f} of the pixels are "
            f"right, {worst['mask_accuracy']:.3f} under {worst['mask']}"
        )
        ended = True if low > MOSTLY else False if high <= MOSTLY else None
        found.append((text, every([ended, worst["mask_accuracy"] > MOSTLY])))
    return _of_perfect(r, found), every(holds for _t, holds in found)


def known_at_least_as_good(r: RecoveryResults) -> Verdict:
    found = _against(r, r.perfect, "known", "unknown", r.accurate)
    return _of_perfect(r, found), every(d.not_below(SLACK) for _t, d in found)


def known_at_least_as_good_moderately(r: RecoveryResults) -> Verdict:
    victims = r.moderate()
    found = _against(r, victims, "known", "unknown", r.approximate)
    counts = ", ".join(_beside_theirs(victim) for victim in victims)
    return f"{counts}: {_text(found)}", every(d.not_below(SLACK) for _t, d in found)


def _beside_theirs(victim: Record) -> str:
    """How many images a network of the moderate regime has, beside those of tables 1 and 2."""
    return f"{victim['n_images']} images (theirs {TABLE_IMAGES[victim['architecture']['kind']]:,})"


def generic_recovers_none(r: RecoveryResults) -> Verdict:
    """Victims of the same images share what the generic methods make of them."""
    found = []
    for name in ("ddnm", "biharmonic"):
        for victim in r.perfect:
            cells = r.cells(victim, name)
            n_hits, n = (sum(cell[key] for cell in cells) for key in ("n_accurate", "n"))
            found.append((f"{name}, {victim['title']}: {n_hits} of {n}", n_hits == 0))
    return f"{_of_perfect(r, found)}; {_inpainter(r)}", all(holds for _t, holds in found)


def generic_recovers_few_approximately(r: RecoveryResults) -> Verdict:
    found: list[tuple[str, bool | None]] = []
    for victim in r.perfect:
        cells = r.cells(victim, "ddnm")
        shares = r.mean(cells, r.approximate)
        best = max(cells, key=lambda cell: r.share([cell], r.approximate))
        ((text, fewer),) = _against(r, [victim], "unknown", "ddnm", r.approximate)
        at_best = r.share([best], r.approximate), r.share([best], r.decibels)
        text = (
            f"{text}; of diffusion {shares}, most under {best['mask']}: {at_best[0]:.3g} at "
            f"{at_best[1]:.3g} dB"
        )
        found.append((text, every([shares.above(), fewer.above()])))
    return f"{_of_perfect(r, found)}; {_inpainter(r)}", every(holds for _t, holds in found)


def no_test_image_accurately(r: RecoveryResults) -> Verdict:
    return _of_test_images(r, r.accurate, at_most=0.0)


def test_images_rarely_approximately(r: RecoveryResults) -> Verdict:
    return _of_test_images(r, r.approximate, at_most=RARELY)


def _of_test_images(r: RecoveryResults, score: Score, *, at_most: float) -> Verdict:
    """Whether the share of all images and masks of each victim is at most that."""
    found = []
    for victim in r.evaluated:
        cells = r.cells(victim, "unknown", split="test")
        shares = r.by_image(cells, score)
        n = len(shares) * len(cells)
        share = float(shares.mean())
        found.append((f"{victim['title']}: {round(share * n)} of {n}", share <= at_most))
    return _text(found), all(holds for _t, holds in found)


def copying_gives_nothing(r: RecoveryResults) -> Verdict:
    found = []
    for victim in r.copying:
        for method in ("iteration", "unknown", "noise_aware"):
            share = r.share(r.cells(victim, method), r.approximate)
            found.append((f"{victim['title']}, {method}: {share:.3g}", share <= RARELY))
    return _text(found), all(holds for _t, holds in found)


def falls_with_the_loss(r: RecoveryResults) -> Verdict:
    found = []
    for victim in r.perfect:
        levels = [level["level"] for level in victim["levels"]]
        if len(levels) < 2:
            raise NotTestableError(f"{victim['title']} reached one loss only")
        ends = max(levels), min(levels)
        high, low = (r.cells(victim, "unknown", level=level) for level in ends)
        d = r.difference(low, high, r.accurate)
        shares = [f"{r.share(cells, r.accurate):.3g}" for cells in (high, low)]
        text = f"{victim['title']}: {shares[0]} at {ends[0]:g}, {shares[1]} at {ends[1]:g}, {d}"
        found.append((text, d))
    return _of_perfect(r, found), every(d.above() for _t, d in found)


def high_loss_prevents(r: RecoveryResults) -> Verdict:
    """At the highest loss, of all methods that ask the victim."""
    methods = [m["name"] for m in r.record["methods"] if not m["generic"] and not m["ours"]]
    found = []
    for victim in r.perfect:
        level = max(at["level"] for at in victim["levels"])
        if len(victim["levels"]) < 2:
            raise NotTestableError(f"{victim['title']} reached one loss only")
        counts = {
            name: sum(cell["n_accurate"] for cell in r.cells(victim, name, level=level))
            for name in methods
        }
        shown = ", ".join(f"{name} {n}" for name, n in counts.items())
        found.append((f"{victim['title']} at {level:g}: {shown}", not any(counts.values())))
    return _of_perfect(r, found), all(holds for _t, holds in found)


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


def table_1(r: RecoveryResults) -> Verdict:
    return _moderate(r, "fc")


def table_2(r: RecoveryResults) -> Verdict:
    return _moderate(r, "unet")


def _moderate(r: RecoveryResults, kind: str) -> Verdict:
    """Iteration, unknown and known under each mask, approximately."""
    found = []
    for victim in r.moderate(kind):
        alone, unknown = (r.cells(victim, name) for name in ("iteration", "unknown"))
        known = {cell["mask"]: cell for cell in r.cells(victim, "known")}
        for one, other in zip(unknown, alone, strict=True):
            d = r.difference([one], [other], r.approximate)
            shares = [r.share([cell], r.approximate) for cell in (other, one)]
            shares += [r.share([known[one["mask"]]], r.approximate)] if one["mask"] in known else []
            shown = ", ".join(f"{share:.3g}" for share in shares)
            found.append((f"{victim['title']}, {one['mask']}: {shown}; {d}", d))
    counts = ", ".join(_beside_theirs(victim) for victim in r.moderate(kind))
    return f"{counts}: {_text(found)}", every(d.above() for _t, d in found)


def with_noise(r: RecoveryResults) -> Verdict:
    return _with_noise(r, deep=False)


def with_noise_deep(r: RecoveryResults) -> Verdict:
    return _with_noise(r, deep=True)


def _with_noise(r: RecoveryResults, *, deep: bool) -> Verdict:
    sigmas = sorted({c["sigma"] for c in r.record["cells"] if c["sigma"] > 0})
    if not sigmas:
        raise NotTestableError("the study has no noise")
    names = {c["victim"] for c in r.record["cells"] if c["sigma"] > 0}
    victims = [
        victim
        for victim in r.evaluated
        if victim["name"] in names and (victim["architecture"].get("depth") == DEEP) == deep
    ]
    if not victims:
        of = f"of {DEEP} layers" if deep else f"but those of {DEEP} layers"
        raise NotTestableError(f"no network {of} was asked with noise")
    found = [
        (f"noise {sigma:g}, {text}", d)
        for sigma in sigmas
        for text, d in _against(r, victims, "unknown", "iteration", r.approximate, sigma=sigma)
    ]
    return _text(found), every(d.above() for _t, d in found)


def at_every_threshold(r: RecoveryResults) -> Verdict:
    victims = [v for v in r.perfect if v["architecture"]["kind"] == "unet"]
    if not victims:
        raise NotTestableError("no U-Net was evaluated")
    masks = [mask["name"] for mask in r.record["masks"]]
    mask = "window" if "window" in masks else masks[-1]
    high, low = F3_THRESHOLDS
    found = []
    for threshold in (t for t in r.record["thresholds"]["all"] if low <= t <= high):
        pairs = _against(r, victims, "unknown", "iteration", r.below(threshold), mask=mask)
        found += [(f"{threshold:g}, {text}", d) for text, d in pairs]
    return f"mask {mask!r}: {_text(found)}", every(d.above() for _t, d in found)


def ours_at_least_as_good(r: RecoveryResults) -> Verdict:
    found = _against(r, r.perfect, "noise_aware", "unknown", r.accurate)
    return _text(found), every(d.not_below(SLACK) for _t, d in found)


def ours_better(r: RecoveryResults) -> Verdict:
    found = _against(r, r.perfect, "noise_aware", "unknown", r.accurate)
    return _text(found), every(d.above() for _t, d in found)


def ours_better_in_the_moderate_regime(r: RecoveryResults) -> Verdict:
    found = _against(r, r.moderate(), "noise_aware", "unknown", r.approximate)
    return _text(found), every(d.above() for _t, d in found)


def ours_no_test_image(r: RecoveryResults) -> Verdict:
    cells = [c for v in r.evaluated for c in r.cells(v, "noise_aware", split="test")]
    n_hits, n = (sum(cell[name] for cell in cells) for name in ("n_accurate", "n"))
    return f"{n_hits} of {n} images, over all victims and masks", n_hits == 0
