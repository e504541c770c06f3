"""Restoration inside the span: a separation by a network that knows images.

    python -m benchmarks.restore.in_span --images folder:cifar10 --store DIR [--n 400 ...]
        [--victims 12] [--device cpu] [--quick] [--json FILE] [--sheet FILE]

Victims 3072-1000-1000-1 learn n held-out images by gradient descent; their start is known, so that
the span is known to float32. "Before" is the attack alone, which knows of images only that their
derivatives are sparse (`independent`); "after" the separation by the network that knows the other
images in a picture (`network`), every picture a row of the unmixing matrix and so in the span; few
images are left to sparse derivatives, as by `auto` in the attack. Beside them on the same victims:
what the classical denoisers make of the attack's pictures, projected on the span; and the oracle,
the images' own projections. "Good" is an SSIM above .4, decoys are as many images that no victim
saw. Intervals resample victims. One finished victim is one file of DIR, and is not computed again:
run it in goes, or with --only on many machines; the lines are of all victims that are there.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from benchmarks.evaluation.checks import FEW
from benchmarks.record import Claim, Measurement, checked_json, decided_claims, measured, publish
from benchmarks.span.speed import GOOD, HIGH, LOW, drawn, ratio_of_sums
from flows.papers import gradient_descent
from recon_core.attacks.span.attack import Separated, SpanAttack, separate
from recon_core.attacks.span.rows import weight_rows
from recon_core.attacks.span.search import sources_for
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.restore.generic import GENERIC_RESTORERS
from recon_core.strict import Strict
from recon_core.summary import NOTICEABLE
from recon_core.types import seeded_generator
from recon_core.victims.network import Network
from recon_core.victims.training import Training, train
from storage.files import write_file, write_json
from storage.sources.load import ImageSet, load_images
from tasks.page.formats import OURS
from tasks.page.pictures import COLUMNS, eight_bits, strips_sheet, wrapped
from tasks.study.statements import Statement, Verdict, above, every

_line = partial(measured, "restore_in_span")
WORSE = 0.02
"""Loss of SSIM from which on an image counts as worse."""
FALSE_POSITIVES = 0.01
TRAINING = Training(epochs=3000, optimiser=gradient_descent(0.2), span="auto")
NETWORK = Network()
ATTACK = SpanAttack(start="known")
N_SHOWN = 20
ROOM = 0.9
"""Share of good images before up to which there is something to restore."""
RISES = "good after over good before"
BEYOND = "good less good decoys, after over before"
CLOSED = "share of the headroom in SSIM closed"
SSIM_OVER = "mean SSIM after over that of"
SHARE_WORSE = "share of images worse by more than"
OF_VICTIMS = re.compile(r"mean of (\d+) victims")
COMMAND = "python -m benchmarks.restore.in_span --images folder:cifar10 --store DIR --n"


@dataclass(frozen=True, kw_only=True)
class Scored(Strict):
    """SSIM of the best picture for each image, and for each decoy."""

    images: list[float]
    decoys: list[float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Restored(Strict):
    """Scores on one victim, by method."""

    n: int
    seed: int
    methods: dict[str, Scored]

    def __post_init__(self) -> None:
        if lacking := {"before", "after", "oracle"} - self.methods.keys():
            raise ValueError(
                f"methods lack {', '.join(sorted(lacking))}, as those of older versions do: remove "
                "the file"
            )


def restored(
    images: ImageSet,
    n: int,
    seed: int,
    *,
    device: str,
    quick: bool,
    sheet: Path | None = None,
) -> Restored:
    """Everything on one victim; seconds of "oracle" are the victim's training. Images with their
    best pictures before and after go to `sheet`."""
    seen, decoys = (some.to(device) for some in drawn(images, n, seed))
    mean, shape = seen.mean(0), tuple(seen.shape[1:])
    assert len(shape) == 3
    x = (seen - mean).flatten(1)
    network = replace(NETWORK, widths=(2 * n, 2 * n)) if quick else NETWORK
    attack = replace(ATTACK, n_network=3) if quick else ATTACK
    architecture = network.on(shape, 1)
    generator = seeded_generator(seed, 0, "dense")
    start = architecture.initial([generator], dtype=torch.float32).map(lambda t: t.to(device))
    labels = torch.tensor([1.0, -1.0], device=device).repeat_interleave(n // 2)
    methods, laps = {}, [time.perf_counter()]

    def scored(x: Tensor, seconds: float) -> Scored:
        pictures = _pictures(x, mean)
        best, lucky = (
            [round(float(s), 4) for s in ssim_matrix(pictures, some).amax(0)]
            for some in (seen, decoys)
        )
        return Scored(images=best, decoys=lucky, seconds=round(seconds, 1))

    def lap() -> float:
        """Seconds since the last one."""
        laps.append(time.perf_counter())
        return laps[-1] - laps[-2]

    trained = train(architecture, start, x[None], labels[None], training=TRAINING).parameters
    training = lap()

    def attacked(attack: SpanAttack) -> Separated:
        generators = [seeded_generator(seed, 0, "attack")]
        rows = [weight_rows(trained, start)]
        return separate(attack, architecture, trained, generators, rows=rows)[0]

    sparse = SpanAttack(start="known", sources="independent")  # without a model of images
    found = attacked(replace(sparse, n_independent=20) if quick else sparse)
    methods["before"] = scored(found.sources.x, lap())
    vectors, given = found.subspace.vectors, found.sources.x
    for name, generic in GENERIC_RESTORERS.items():
        both = torch.cat([given, -given]).unflatten(1, shape)
        pictures, seeds = fit_to_range(both, mean), torch.zeros(len(both), dtype=torch.int64)
        (clean,) = generic.restore(nn.Identity(), pictures, n_samples=1, seeds=seeds)
        inside = ((clean - mean).flatten(1) @ vectors.mT) @ vectors
        methods[f"{name}, projected"] = scored(inside, lap())
    chosen = sources_for(attack, found.subspace, shape)
    after = attacked(chosen).sources.x if chosen.sources == "network" else given
    methods["after"] = scored(after, lap())
    if sheet is not None:
        write_file(sheet, _sheet({"before": given, "after": after}, mean, seen))
    methods["oracle"] = scored((x @ vectors.mT) @ vectors, training)
    return Restored(n=n, seed=seed, methods=methods)


def lines(found: Sequence[Restored]) -> Iterator[Measurement]:
    """Sums over `found`, victims of one size."""
    n, victims = found[0].n, len(found)
    case, line = f"{n} images", partial(_line, repeats=victims)
    ends = [_values(found, name) for name in ("before", "after", "oracle")]
    before, after, oracle = ends
    for name in sorted({name for some in found for name in some.methods}):
        there = [some for some in found if name in some.methods]
        means, lucky = _values(there, name), _values(there, name, "decoys")
        of_these = f"of {n}, mean of {len(there)} victims"
        edge = np.quantile(lucky, 1 - FALSE_POSITIVES)
        for unit, value in (
            (f"good {of_these}", (means > GOOD).sum(1).mean()),
            ("mean SSIM", means.mean()),
            (f"good decoys {of_these}", (lucky > GOOD).sum(1).mean()),
            (f"{of_these}, at 1 % false positives", (means > edge).sum(1).mean()),
            (
                "s of training" if name == "oracle" else "s",
                np.median([some.methods[name].seconds for some in there]),
            ),
        ):
            yield line(f"{case}, {name}", float(value), unit)
    good = {name: (_values(found, name) > GOOD).sum(1) for name in ("before", "after")}
    excess = {name: n - (_values(found, name, "decoys") > GOOD).sum(1) for name, n in good.items()}
    yield from ratio_of_sums(line, case, RISES, good["after"], good["before"])
    yield from ratio_of_sums(line, case, BEYOND, excess["after"], excess["before"])
    for name in GENERIC_RESTORERS:
        generic = _values(found, f"{name}, projected")
        yield from ratio_of_sums(
            line, case, f"{SSIM_OVER} {name}, projected", after.sum(1), generic.sum(1)
        )
        yield from ratio_of_sums(
            line, case, f"SSIM of {name}, projected, over before", generic.sum(1), before.sum(1)
        )
    yield from ratio_of_sums(line, case, f"{SSIM_OVER} before", after.sum(1), before.sum(1))
    gained, room = float((after - before).mean()), float((oracle - before).mean())
    closed = max(0.0, gained / room) if room > 0 else 0.0  # where nothing was gained, none
    yield line(case, closed, CLOSED)
    for least in (NOTICEABLE, WORSE):
        worse, better = after < before - least, after > before + least
        yield line(case, float(worse.mean()), f"{SHARE_WORSE} {least:g}")
        yield line(case, float(better.mean()), f"share of images better by more than {least:g}")
    yield line(case, victims, "victims")


Lines = Mapping[str, float]
"""Values by unit, of one size."""


def ratio(found: Lines, unit: str) -> Verdict:
    """A ratio with its interval, and whether it is above 1."""
    low, high = (found[f"{unit}, {end}"] for end in (LOW, HIGH))
    return f"{found[unit]:.3g} [{low:.3g}, {high:.3g}]", above(low, high, 1.0)


def rises(found: Lines, unit: str, name: str) -> Verdict:
    words, verdict = ratio(found, unit)
    return f"{name} {words}", verdict


def model_beats_generic(found: Lines) -> Verdict:
    names = tuple(GENERIC_RESTORERS)
    verdicts = [rises(found, f"{SSIM_OVER} {name}, projected", name) for name in names]
    words = ", ".join(text for text, _verdict in verdicts)
    return f"SSIM over that of {words}, each projected on the span", every(v for _t, v in verdicts)


def almost_none_is_worse(found: Lines) -> Verdict:
    share = found[f"{SHARE_WORSE} {NOTICEABLE:g}"]
    return f"{share:.1%} of the images are worse by more than {NOTICEABLE:g}", share <= FEW


MORE = "{} is above 1, and so is its interval over victims; false if that ends at 1 or below"
_of_ours = partial(
    Statement[Lines],
    where=f"{OURS}, another setting: the start is known",
    theirs="not in the paper: its restorers see reconstructions alone, and learn from them",
)
STATEMENTS: tuple[Statement[Lines], ...] = (
    _of_ours(
        claim="Inside a known span, a network that learned from public images gives back more good "
        "images than sparse derivatives alone",
        rule=MORE.format("good after over good before"),
        check=partial(rises, unit=RISES, name="good after over before"),
    ),
    _of_ours(
        claim="... and more than among images that were not trained on",
        rule=MORE.format("good less good decoys, after over before,"),
        check=partial(rises, unit=BEYOND, name=BEYOND),
    ),
    _of_ours(
        claim="... and a higher SSIM than classical denoisers inside the span",
        rule=MORE.format("mean SSIM over that of every classical denoiser, projected on the span,"),
        check=model_beats_generic,
    ),
    _of_ours(
        claim="... and makes almost no image worse",
        rule=f"at most {FEW:.0%} of the targets lose more than {NOTICEABLE:g} SSIM",
        check=almost_none_is_worse,
    ),
)


def in_span_claims(measurements: Sequence[Measurement], *, name: str) -> Iterator[Claim]:
    """Questions of ours on restoration inside the span, of sizes at which the attack leaves a tenth
    of the images or more; `name` stands before our numbers. Seconds are the medians of all methods,
    times the victims. Raises ValueError if nothing was measured there."""
    sizes = sorted({m.case for m in measurements if m.unit == RISES})
    counts_of = {
        case: [
            next(m for m in measurements if m.case == f"{case}, {when}" and "good of" in m.unit)
            for when in ("before", "after")
        ]
        for case in sizes
    }
    sizes = [c for c in sizes if counts_of[c][0].value <= ROOM * int(c.partition(" ")[0])]
    if not sizes:
        raise ValueError(f"{name} has no restoration inside the span; run {COMMAND} 400")
    for case in sizes:
        of_case = [m for m in measurements if m.case == case]
        found = {m.unit: m.value for m in of_case}
        before, after = counts_of[case]
        counts = f"{before.value:g} -> {after.value:g} {after.unit}"
        victims = {
            m.case: int(match[1]) for m in measurements if (match := OF_VICTIMS.search(m.unit))
        }
        spent = sum(
            m.value * victims[m.case]
            for m in measurements
            if m.case.startswith(f"{case}, ") and m.unit in ("s", "s of training")
        )
        yield from decided_claims(
            STATEMENTS,
            found,
            name=f"{name}: {counts}; ",
            command=f"{COMMAND} {case.split()[0]}",
            seconds=round(spent, 1),
            machine=of_case[0].hardware,
        )


def _values(found: Sequence[Restored], name: str, of: str = "images") -> np.ndarray:
    return np.array([getattr(some.methods[name], of) for some in found])


def _pictures(x: Tensor, mean: Tensor) -> Tensor:
    """Both signs of sources (k, d), best fitted into [0, 1]."""
    return fit_to_range(torch.cat([x, -x]).unflatten(1, mean.shape), mean)


def _sheet(found: dict[str, Tensor], mean: Tensor, seen: Tensor) -> bytes:
    """PNG of images over the best picture of each; the images stand in even distances of their SSIM
    before."""
    best = {}
    for name, x in found.items():
        pictures = _pictures(x, mean)
        ssim, row = ssim_matrix(pictures, seen).max(0)
        best[name] = (pictures[row], ssim)
    order = best["before"][1].argsort(descending=True)
    places = torch.linspace(0, len(seen) - 1, min(N_SHOWN, len(seen))).round().long()
    chosen = order[places.to(order.device)].tolist()
    rows = [("original", [(eight_bits(seen[i]), "", False) for i in chosen])]
    for name, (pictures, ssim) in best.items():
        tiles = [(pictures[i], float(ssim[i])) for i in chosen]
        rows.append((name, [(eight_bits(p), f"{s:.2f}", s > GOOD) for p, s in tiles]))
    title = f"{len(chosen)} of {len(seen)} images, in even ranks of the attack's SSIM (bold: good)"
    return strips_sheet([title, *wrapped(rows)], columns=COLUMNS)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", default="photos", help="folder:PATH, ...; default: photographs")
    parser.add_argument("--store", type=Path, required=True, help="folder of finished victims")
    parser.add_argument("--n", type=int, nargs="+", default=[400], help="images of a victim, even")
    parser.add_argument("--victims", type=int, default=12)
    parser.add_argument("--only", type=int, nargs="*", help="of these victims, from 0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="few iterations")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--sheet", type=Path, help="PNG of the first victim that is computed")
    options = parser.parse_args(argv)
    images = load_images(options.images, split="heldout")
    options.store.mkdir(parents=True, exist_ok=True)
    sheet = options.sheet
    for n in options.n:
        for seed in range(options.victims) if options.only is None else options.only:
            part = options.store / f"{n}-{seed}.json"
            if not part.exists():
                found = restored(
                    images, n, seed, device=options.device, quick=options.quick, sheet=sheet
                )
                sheet = None
                write_json(part, asdict(found))
    adapter = TypeAdapter(Restored)
    there = sorted(options.store.glob("*-*.json"))
    try:
        every = [checked_json(adapter, part.read_text(), str(part)) for part in there]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    by_size = ([some for some in every if some.n == n] for n in sorted({e.n for e in every}))
    publish((line for some in by_size for line in lines(some)), options.json)


if __name__ == "__main__":
    main()
