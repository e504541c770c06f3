"""Results of attacks on weights: pictures in the order in which an attacker would look at them, and
scores where the training images are known.

Pictures that several attacks with different settings arrive at belong to the network and not to the
start (`recon_core.ranking`): candidates are grouped, groups are ordered by how many attacks are in
them, after a single attack by how early their picture looked as it does at the end. The span
attack's pictures are ordered by the trust in their sources, and by how many attacks found them. No
original is used. Where originals are known, `judged` measures how good the order is, and each
training image takes its best match among all candidates, by SSIM; so do decoys, which the network
never saw. The span attack's pictures are matched with both signs, since weights without biases
leave the sign open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.matching import fit_to_range, scaled_to_range
from recon_core.metrics import SSIMConvention, ncc_matrix, ssim_matrix, ssim_pairs
from recon_core.ranking import agreement, clusters, consistency, rank_runs
from recon_core.summary import images_found, rank_correlation
from tasks.attack_file.comparison import MAX_PAIRS, N_NEAREST, compared, sentences
from tasks.attack_file.pictures import Named, Shape
from tasks.attack_file.report import STEPS, as_bytes, uri_of, write_arrays
from tasks.evaluation.record import rounded
from tasks.families.weights.attack import AttackRun, WeightsJob, read_attack
from tasks.families.weights.preflight import PUBLISH, PreparedWeights
from tasks.page.charts import Panel, dots, log_axis, rank_axis
from tasks.page.files import page_html
from tasks.page.pictures import COLUMNS, Strip, strips_sheet, wrapped

GREY = 0.5
"""The mean that is assumed when nothing is known."""
GOOD = 0.4
"""SSIM above which a match is called good (Buzaglo et al. 2023)."""
SAME_PICTURE = 0.7
"""Correlation above which two candidates are one picture; of .6 to .9 it found most images among
the first twenty (six attacks with drawn settings on a victim of 20 CIFAR images)."""
MAX_RANKED = 6000
"""Candidates that are compared with each other: those of the attacks with the lowest residuals."""
FALSE_SHARES = (0.0, 0.01, 0.05)
"""Shares of false pictures at which the images in the head of a ranking are counted."""
MIN_WINDOW = 11
N_DECOYS = 5
MAX_SHOWN_IMAGES = 40


@dataclass(frozen=True)
class Ranked:
    """One picture, best supported first: a group of candidates and the one that stands for it.

    `n_attacks` of the ranked attacks have it, in `n_candidates` candidates. `agreement` is the mean
    correlation with its best match in each other attack, or, after a single attack, the
    consistency over its iterations, or the trust in a source of the span attack. `label` is -1 or
    +1, a class, or None under regression. `nearest_image` and `ssim`: the training image most like
    it, if known; `ssim_as_negative`: that of its negative, where that is more like one.
    """

    attack: int
    candidate: int
    label: int | None
    n_attacks: int
    n_candidates: int
    agreement: float
    lam: float | None
    x: Float[Tensor, "c h w"]
    picture: Float[Tensor, "c h w"]
    nearest_image: int | None = None
    ssim: float | None = None
    ssim_as_negative: float | None = None

    def record(self) -> dict[str, Any]:
        """Everything but the pictures, as JSON."""
        return {n: rounded(v) for n, v in vars(self).items() if n not in ("x", "picture")}

    @property
    def known(self) -> str:
        """The SSIM with the nearest training image, or of the negative if that is a good match."""
        if self.ssim_as_negative is not None and self.ssim_as_negative > GOOD:
            return f"neg {self.ssim_as_negative:.2f}"
        return f"{self.ssim:.2f}"


@dataclass(frozen=True)
class RankingQuality:
    """Quality of the ranking by the training images. `spearman`: correlation of the order with the
    best SSIM with any of them. `n_false` of all pictures are like none. `n_found`: training images
    at each of `FALSE_SHARES` (`recon_core.summary.images_found`)."""

    spearman: float | None
    n_false: int
    n_found: tuple[int, ...]


@dataclass(frozen=True)
class Matches:
    """Each given image's best match among all candidates; -1 and black where there is none."""

    ssim: Float[Tensor, " n"]
    attack: Int64[Tensor, " n"]
    candidate: Int64[Tensor, " n"]
    picture: Float[Tensor, "n c h w"]
    by_attack: dict[int, int]

    @property
    def n_good(self) -> int:
        return int((self.ssim > GOOD).sum())

    @property
    def shown(self) -> Float[Tensor, "n c h w"]:
        """The pictures, NaN in place of black where there is none."""
        return self.picture.where((self.candidate >= 0)[:, None, None, None], torch.nan)


@dataclass(frozen=True)
class Results:
    """Results of all attacks: `ranked` is the head of `n_pictures` different pictures, of which
    `n_agreed` came back in at least half of the `n_ranked_attacks` that were compared."""

    ranked: tuple[Ranked, ...]
    n_pictures: int
    n_agreed: int
    n_ranked_attacks: int
    truth: Matches | None
    decoys: Matches | None
    convention: SSIMConvention
    exhaustive: bool
    method: Literal["kkt", "span"] = "kkt"
    found: RankingQuality | None = None
    compared: dict[str, Any] | None = None


def to_pictures(x: Float[Tensor, "p c h w"], mean: Tensor | None) -> Float[Tensor, "p c h w"]:
    """Raw candidates as pictures in [0, 1]: as far from the mean as they can go (image restoration
    paper, section 5.1), from grey where the mean is unknown; where nothing was subtracted in
    training, as bright as they can be."""
    if mean is None:
        return fit_to_range(x, torch.full(x.shape[1:], GREY, dtype=x.dtype))
    if not bool(mean.any()):
        return scaled_to_range(x)
    return fit_to_range(x, mean)


@dataclass(frozen=True)
class SavedCandidates:
    """The attacks' candidates at the last saved iteration, one attack in memory at a time.

    With `signs`, each is followed, m rows below, by its negative.
    """

    cache: Path
    runs: Sequence[AttackRun]
    shape: Shape
    std: Tensor | float
    signs: bool

    def saved(self, number: int) -> tuple[Float[Tensor, "s m c h w"], dict[str, Tensor]]:
        """x at every saved iteration, times std and so in units of pictures, in float32, and
        everything that was saved."""
        _run, found = read_attack(self.cache, number)
        return found["x"].float().unflatten(-1, self.shape) * self.std, found

    def __iter__(self) -> Iterator[tuple[int, Float[Tensor, "m c h w"]]]:
        for run in self.runs:
            x = self.saved(run.number)[0][-1]
            yield run.number, torch.cat([x, -x]) if self.signs else x


def gather(job: WeightsJob, runs: Sequence[AttackRun], prepared: PreparedWeights) -> Results:
    """Rank and score the candidates of the attacks in `job.out` at their last saved iteration."""
    attack, usable = job.attack, [run for run in runs if run.ending == "ok"]
    shape, mean, labels = prepared.victim.architecture.shape, prepared.mean, None
    span, scale = not isinstance(attack, KKTAttack), 1.0 if prepared.std is None else prepared.std
    last = SavedCandidates(job.out / "cache", usable, shape, scale, signs=span)
    if isinstance(attack, KKTAttack) and attack.condition != "regression":
        classes = attack.classes(prepared.victim.architecture.n_outputs, torch.device("cpu"))
        labels = (attack.signs(torch.zeros(())) if classes is None else classes).long()
    ranked, n_compared = rank(last, labels, mean) if usable else ([], 0)
    n_candidates = sum(len(x) for _number, x in last)
    convention: SSIMConvention = "gaussian11" if min(shape[1:]) >= MIN_WINDOW else "gaussian3"
    given = {"images": prepared.truth, "decoys": prepared.decoys}
    sets = {name: named.images for name, named in given.items() if named is not None}
    found = {
        name: matches(
            images, last, mean, convention, exhaustive=n_candidates * len(images) <= MAX_PAIRS
        )
        for name, images in sets.items()
    }
    shown, quality, evidence = ranked[: job.n_shown], None, None
    if prepared.truth is not None:
        images = sets["images"]
        if ranked:
            shown, quality = judged(ranked, job.n_shown, images, mean, convention, signs=span)
        control = mean if mean is not None and bool(mean.any()) else images.mean(0)
        sides = {name: (sets[name], found[name].shown, found[name].ssim) for name in sets}
        evidence = compared(sides, control.float(), good=GOOD, convention=convention)
    return Results(
        ranked=tuple(shown), n_pictures=len(ranked),
        n_agreed=sum(2 * r.n_attacks >= n_compared for r in ranked) if n_compared > 1 else 0,
        n_ranked_attacks=n_compared, truth=found.get("images"), decoys=found.get("decoys"),
        convention=convention, method="span" if span else "kkt", found=quality, compared=evidence,
        exhaustive=n_candidates * sum(map(len, sets.values())) <= MAX_PAIRS,
    )  # fmt: skip


def rank(
    last: SavedCandidates, labels: Tensor | None, mean: Tensor | None
) -> tuple[list[Ranked], int]:
    """All different pictures, the best supported first, and the number of attacks compared.

    `labels` of the KKT attack's candidates; the span attack saves its own.
    """
    runs, span = list(last.runs), last.signs
    if not span:
        residuals = [torch.inf if run.residual is None else run.residual for run in runs]
        runs = [runs[i] for i in rank_runs(torch.tensor(residuals)).tolist()]
    n_candidates = last.saved(runs[0].number)[0].shape[1]
    runs = runs[: max(1, MAX_RANKED // n_candidates)]
    read = [last.saved(run.number) for run in runs]
    x = torch.cat([saved[-1] for saved, _found in read])
    attack = torch.tensor([run.number for run in runs]).repeat_interleave(n_candidates)

    def column(name: str) -> Tensor:
        return torch.cat([found[name] for _saved, found in read])

    rows, n_attacks = torch.arange(len(x)), torch.ones(len(x), dtype=torch.int64)
    n_members = n_attacks
    if not span or len(runs) > 1:
        groups = clusters(x, attack, threshold=SAME_PICTURE)
        rows, n_attacks, n_members = groups.representative, groups.n_attacks, groups.n_members
    label = labels
    lam = None
    if span:
        label, trust = column("label"), column("trust").float()
        support = trust if len(runs) == 1 else agreement(x, attack)
        first = trust[rows] + n_attacks / len(runs)
    else:
        label = None if labels is None else labels.repeat(len(runs))
        lam, saved = column("lam").float(), read[0][0]
        if len(runs) > 1:  # groups are in order already
            support, first = agreement(x, attack), torch.zeros(len(rows))
        else:
            support = consistency(saved) if len(saved) > 1 else torch.zeros(len(x))
            first = support[rows]
    pictures = to_pictures(x[rows], mean)
    ranked = []
    for i in first.argsort(descending=True, stable=True).tolist():
        row = int(rows[i])
        ranked.append(Ranked(
            int(attack[row]), row % n_candidates, None if label is None else int(label[row]),
            int(n_attacks[i]), int(n_members[i]), float(support[row]),
            None if lam is None else float(lam[row]), x[row], pictures[i],
        ))  # fmt: skip
    return ranked, len(runs)


def judged(
    ranked: Sequence[Ranked],
    n_shown: int,
    images: Float[Tensor, "n c h w"],
    mean: Tensor | None,
    convention: SSIMConvention,
    *,
    signs: bool,
) -> tuple[list[Ranked], RankingQuality | None]:
    """Pictures that are shown, each with its nearest training image, and the order's quality."""
    whole = (1 + signs) * len(ranked) * len(images) <= MAX_PAIRS
    compared = ranked if whole else ranked[:n_shown]
    pictures = torch.stack([r.picture for r in compared])
    scores = ssim_matrix(pictures, images, convention=convention).nan_to_num(nan=-1.0)
    either = scores
    if signs:
        negatives = to_pictures(-torch.stack([r.x for r in compared]), mean)
        turned = ssim_matrix(negatives, images, convention=convention).nan_to_num(nan=-1.0)
        either = torch.maximum(scores, turned)
    best, most = scores.max(1).values, either.max(1)
    shown = []
    for i, r in enumerate(compared[:n_shown]):
        row, ssim, top = int(most.indices[i]), float(best[i]), float(most.values[i])
        negative = top if top > ssim else None
        shown.append(replace(r, nearest_image=row, ssim=ssim, ssim_as_negative=negative))
    if not whole:
        return shown, None
    order = -np.arange(len(ranked), dtype=np.float64)
    by_order = rank_correlation(order, most.values.double().numpy())
    n_found = images_found(either.numpy(), good=GOOD, false_shares=FALSE_SHARES)
    return shown, RankingQuality(by_order["spearman"], int((most.values <= GOOD).sum()), n_found)


def matches(
    images: Float[Tensor, "n c h w"],
    last: SavedCandidates,
    mean: Tensor | None,
    convention: SSIMConvention,
    *,
    exhaustive: bool,
) -> Matches:
    """Find the candidate with the highest SSIM for each image, attack after attack.

    Unless `exhaustive`, only the N_NEAREST candidates of each attack by correlation are compared. A
    score that is not finite counts as -1.
    """
    n = len(images)
    best, picture = torch.full((n,), -1.0), torch.zeros_like(images)
    attack, candidate = torch.full((n,), -1), torch.full((n,), -1)
    by_attack = {}
    for number, x in last:
        pictures, n_candidates = to_pictures(x, mean), len(x) // (1 + last.signs)
        if exhaustive:
            scores = ssim_matrix(pictures, images, convention=convention)
            score, row = scores.nan_to_num(nan=-1.0).max(0)
        else:
            near = ncc_matrix(pictures, images).nan_to_num(nan=torch.inf)
            rows = near.topk(min(N_NEAREST, len(pictures)), dim=0, largest=False).indices
            scores = torch.stack(
                [ssim_pairs(pictures[some], images, convention=convention) for some in rows]
            )
            score, place = scores.nan_to_num(nan=-1.0).max(0)
            row = rows.gather(0, place[None]).squeeze(0)
        by_attack[number] = int((score > GOOD).sum())
        better = score > best
        best = torch.where(better, score, best)
        attack[better], candidate[better] = number, row[better] % n_candidates
        picture[better] = pictures[row[better]]
    return Matches(best, attack, candidate, picture, by_attack)


def scores_record(results: Results, truth: Named | None, decoys: Named | None) -> dict[str, Any]:
    """The results as JSON: ranking and scores, without the pictures."""
    scores: dict[str, Any] = {"images": None, "decoys": None, "compared": results.compared}
    sides = {"images": (results.truth, truth), "decoys": (results.decoys, decoys)}
    for name, (found, given) in sides.items():
        if found is not None and given is not None:
            scores[name] = {
                "source": given.source,
                "n": len(given),
                "reading": given.facts,
                "n_good": found.n_good,
                "mean_ssim": rounded(float(found.ssim.mean())),
                "ssim": rounded(found.ssim.tolist()),
                "attack": found.attack.tolist(),
                "candidate": found.candidate.tolist(),
            }
    return {
        "ranking": {
            "n_attacks_compared": results.n_ranked_attacks,
            "n_pictures": results.n_pictures,
            "n_agreed": results.n_agreed,
            "same_picture_above": SAME_PICTURE,
            "found": None if results.found is None else asdict(results.found),
            "pictures": [{"rank": i} | r.record() for i, r in enumerate(results.ranked, start=1)],
        },
        "scores": scores,
        "conventions": {
            "good": f"SSIM above {GOOD}",
            "identified": "SSIM of the best match at least .05 above that of the same picture with "
            "any other image given, of a decoy with any other decoy",
            "mean_image": "a control: the mean image alone in place of every reconstruction",
            "p_value": "of decoys scoring as the images do, by permuting images and decoys",
            "SSIM": "Wang et al. 2004, window 11x11, sigma 1.5"
            if results.convention == "gaussian11"
            else "window 3x3, as images are smaller than 11x11",
            "match": "each image's best candidate of all attacks, "
            + ("with either sign" if results.method == "span" else "at the last saved iteration")
            + f", of the {N_NEAREST} nearest by correlation per attack" * (not results.exhaustive),
            "picture": "a raw candidate, as far from the mean image as [0, 1] allows",
        },
    }


def write_reconstructions(path: Path, results: Results) -> None:
    """The ranked pictures as safetensors: raw x, picture in [0, 1], attack, candidate, and lam, or
    trust of the span attack; with known images each one's best match (`best/picture`, `best/ssim`).
    """
    ranked = results.ranked
    arrays: dict[str, Tensor | npt.NDArray[Any]] = {}
    if ranked:
        values = [r.lam if r.lam is not None else r.agreement for r in ranked]
        arrays = {
            "x": torch.stack([r.x for r in ranked]),
            "picture": torch.stack([r.picture for r in ranked]),
            "attack": np.array([r.attack for r in ranked], np.int64),
            "candidate": np.array([r.candidate for r in ranked], np.int64),
            "lam" if results.method == "kkt" else "trust": np.array(values, np.float32),
        }
    if results.truth is not None:
        arrays |= {"best/picture": results.truth.picture, "best/ssim": results.truth.ssim}
    write_arrays(path, arrays)


def weights_sheet(
    results: Results, truth: Named | None = None, decoys: Named | None = None
) -> bytes:
    """PNG: known images over their best matches with scores, decoys likewise, and the ranking."""
    strips: list[Strip] = []
    for given, found, name, limit in (
        (truth, results.truth, "training images", MAX_SHOWN_IMAGES),
        (decoys, results.decoys, "decoys, which the network never saw", N_DECOYS),
    ):
        if given is None or found is None:
            continue
        order, ssim = best_rows(found, limit), found.ssim
        shown = f", the best {len(order)}" if len(order) < len(given) else ""
        strips.append(f"{found.n_good} of {len(given)} {name}{shown}: good above SSIM {GOOD:g}")
        originals = [(as_bytes(given.images[i]), "", False) for i in order]
        best = [(as_bytes(found.picture[i]), f"{ssim[i]:.2f}", bool(ssim[i] > GOOD)) for i in order]
        strips += wrapped([("original", originals), ("best match", best)])
    n, span = results.n_ranked_attacks, results.method == "span"
    by = f"how many of {n} attacks have it" if n > 1 else "trust" if span else "consistency"
    below = "; below each its SSIM with a training image (neg: of its negative)"
    is_known = span and results.truth is not None
    heading = f"ranked without the originals, by {by}{below if is_known else ''}"
    strips.append(heading if results.ranked else "no attack left a picture")
    tiles = []
    for rank, r in enumerate(results.ranked, start=1):
        support = f"{r.n_attacks}/{n}" if n > 1 else f"{r.agreement:.2f}"
        if r.ssim is not None:
            support = r.known if span else f"{support}  ({r.known})"
        good = max(r.ssim or 0, r.ssim_as_negative or 0) > GOOD
        tiles.append((as_bytes(r.picture), f"{rank}: {support}", good))
    strips += wrapped([("", tiles)])
    return strips_sheet(strips, columns=COLUMNS)


def weights_page(
    record: Mapping[str, Any],
    results: Results,
    *,
    truth: Named | None,
    decoys: Named | None,
    context: Mapping[str, Any],
) -> str:
    """The page. `context`: `command` and `created` as texts, `settings` and `versions`."""
    spectrum, outlook = record["spectrum"], record["preflight"]["outlook"]
    return page_html(
        "attack.html",
        {"lower_first": lambda text: text[:1].lower() + text[1:], "shown": uri_of},
        record=record, publish=PUBLISH, results=results, truth=truth, decoys=decoys,
        best={"images": best_rows(results.truth), "decoys": best_rows(results.decoys)},
        said=[] if results.compared is None else sentences(record["scores"], outlook),
        shares=[f"{share:.0%}" for share in FALSE_SHARES],
        spectrum=None if spectrum is None else _spectrum_svg(spectrum),
        steps=STEPS, good=GOOD, context=context,
    )  # fmt: skip


def best_rows(found: Matches | None, limit: int = MAX_SHOWN_IMAGES) -> list[int]:
    """Rows of the images that are shown, the best matched first."""
    ssim = torch.zeros(0) if found is None else found.ssim
    rows: list[int] = ssim.argsort(descending=True, stable=True)[:limit].tolist()
    return rows


def _spectrum_svg(spectrum: Mapping[str, Any]) -> str:
    """The first layer's singular values, the edge of its noise, and how many were taken."""
    values, n_taken, edge = spectrum["values"], spectrum["n_taken"], spectrum["edge"]
    points = [(i, value) for i, value in enumerate(values, start=1) if value > 0]
    low = min(edge or values[0], values[n_taken - 1] or values[0]) / 2
    axis = log_axis("singular value", max(low, values[0] * 1e-12), values[0])
    panel = Panel("singular value", rank_axis("direction of the first layer", len(values)), axis)
    parts = [dots(panel, points, (), colour=1)]
    if n_taken < 0.85 * len(values):  # beyond, its words leave the frame
        parts.append(panel.vertical(n_taken, f"{n_taken} taken"))
    parts += [panel.horizontal(edge)] if edge > 0 else []
    said = f"{spectrum['n_above']} of {len(values)} singular values are above the noise"
    return panel.svg(parts, said)
