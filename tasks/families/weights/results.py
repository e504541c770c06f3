"""Results of attacks: ranked as an attacker could, without an original (`ranking`), and scored
where the truth is known: each training image takes its best match among all candidates, by SSIM,
and so do decoys, which no network saw. The span attack's pictures are matched with both signs,
since weights without biases tell the sign only as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from recon_core.attacks.span.settings import SpanAttack
from recon_core.metrics import SSIMConvention, ncc_matrix, ssim_matrix, ssim_pairs
from tasks.attack_file.comparison import MAX_PAIRS, N_NEAREST, compared
from tasks.attack_file.pictures import Named
from tasks.evaluation.record import rounded
from tasks.families.weights.attack import WeightsJob
from tasks.families.weights.cache import AttackRun
from tasks.families.weights.preflight import PreparedWeights
from tasks.families.weights.ranking import (
    GOOD,
    SAME_PICTURE,
    Found,
    Ranked,
    SavedCandidates,
    judged,
    rank,
    rank_sources,
    to_pictures,
)

MIN_WINDOW = 11
SAID = {
    **{name: name for name in ("attack", "candidate", "label", "n_attacks")},
    **{"n_candidates": "n_members", "agreement": "agreement", "lam": "lam"},
    **{"nearest_image": "nearest", "ssim": "ssim", "ssim_as_negative": "as_negative"},
}
"""What the record has of each picture, by the name of a `Ranked`."""


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
    """Everything that is shown: `ranked` is the head of `n_pictures` different pictures, of which
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
    found: Found | None = None
    compared: dict[str, Any] | None = None


def gather(job: WeightsJob, runs: Sequence[AttackRun], prepared: PreparedWeights) -> Results:
    """Rank and score what the attacks in `job.out` left at their last saved iteration."""
    usable = [run for run in runs if run.ending == "ok"]
    span = isinstance(job.attack, SpanAttack)
    shape, mean = prepared.victim.architecture.shape, prepared.mean
    truth, decoys = prepared.truth, prepared.decoys
    scale = 1.0 if prepared.std is None else prepared.std
    last = SavedCandidates(job.out / "cache", usable, shape, scale, signs=span)
    convention: SSIMConvention = "gaussian11" if min(shape[1:]) >= MIN_WINDOW else "gaussian3"
    scoring = _Scoring(last, mean, convention)
    labels = _labels(job, prepared.victim.architecture.n_outputs)
    ranked: list[Ranked] = []
    n_compared = 0
    if usable:
        ranked, n_compared = rank_sources(last, mean) if span else rank(last, labels, mean)
    found = None if truth is None else scoring.matches(truth.images)
    lucky = None if decoys is None else scoring.matches(decoys.images)
    shown, found_by = ranked[: job.n_shown], None
    if truth is not None and ranked:
        shown, found_by = judged(ranked, job.n_shown, truth.images, mean, convention, signs=span)
    evidence = None
    if truth is not None and found is not None:
        sides = {"images": (truth.images, found.shown, found.ssim)}
        if decoys is not None and lucky is not None:
            sides["decoys"] = (decoys.images, lucky.shown, lucky.ssim)
        known = mean is not None and bool(mean.any())
        control = mean if known and mean is not None else truth.images.mean(0)
        evidence = compared(sides, control.float(), good=GOOD, convention=convention)
    n_images = sum(len(p) for p in (truth, decoys) if p is not None)
    return Results(
        ranked=tuple(shown), n_pictures=len(ranked),
        n_agreed=sum(2 * r.n_attacks >= n_compared for r in ranked) if n_compared > 1 else 0,
        n_ranked_attacks=n_compared, truth=found, decoys=lucky, convention=convention,
        exhaustive=scoring.exhaustive(n_images), method="span" if span else "kkt", found=found_by,
        compared=evidence,
    )  # fmt: skip


def _labels(job: WeightsJob, n_outputs: int) -> list[int] | None:
    """What the KKT attack's candidates were given as labels."""
    if isinstance(job.attack, SpanAttack) or job.attack.condition == "regression":
        return None
    classes = job.attack.classes(n_outputs, torch.device("cpu"))
    labels = job.attack.signs(torch.zeros(())) if classes is None else classes
    return [int(label) for label in labels]


class _Scoring:
    """Best matches of given images among all candidates, attack after attack."""

    def __init__(
        self, last: SavedCandidates, mean: Tensor | None, convention: SSIMConvention
    ) -> None:
        self.last, self.mean, self.convention = last, mean, convention
        self.n_candidates = sum(len(x) for _number, x in last)

    def exhaustive(self, n_images: int) -> bool:
        """True if every candidate is compared with every image by SSIM."""
        return self.n_candidates * n_images <= MAX_PAIRS

    def matches(self, images: Float[Tensor, "n c h w"]) -> Matches:
        """The candidate with the highest SSIM for each image."""
        n = len(images)
        best = torch.full((n,), -1.0)
        attack, candidate = torch.full((n,), -1), torch.full((n,), -1)
        picture = torch.zeros_like(images)
        by_attack = {}
        for number, x in self.last:
            n_candidates = len(x) // (1 + self.last.signs)
            pictures = to_pictures(x, self.mean)
            score, row = self._best(pictures, images)
            by_attack[number] = int((score > GOOD).sum())
            better = score > best
            best = torch.where(better, score, best)
            attack[better], candidate[better] = number, row[better] % n_candidates
            picture[better] = pictures[row[better]]
        return Matches(best, attack, candidate, picture, by_attack)

    def _best(
        self, pictures: Float[Tensor, "m c h w"], images: Float[Tensor, "n c h w"]
    ) -> tuple[Float[Tensor, " n"], Int64[Tensor, " n"]]:
        """(score, row) of each image's best picture; a score that is not finite counts as -1."""
        if self.exhaustive(len(images)):
            scores = ssim_matrix(pictures, images, convention=self.convention)
            best = scores.nan_to_num(nan=-1.0).max(0)
            return best.values, best.indices
        near = ncc_matrix(pictures, images).nan_to_num(nan=torch.inf)
        rows = near.topk(min(N_NEAREST, len(pictures)), dim=0, largest=False).indices
        each = torch.stack(
            [ssim_pairs(pictures[row], images, convention=self.convention) for row in rows]
        )
        best = each.nan_to_num(nan=-1.0).max(0)
        return best.values, rows.gather(0, best.indices[None]).squeeze(0)


def scores_record(results: Results, truth: Named | None, decoys: Named | None) -> dict[str, Any]:
    """The results as JSON: ranking and scores, without the pictures."""
    record: dict[str, Any] = {
        "ranking": {
            "n_attacks_compared": results.n_ranked_attacks,
            "n_pictures": results.n_pictures,
            "n_agreed": results.n_agreed,
            "same_picture_above": SAME_PICTURE,
            "found": None if results.found is None else asdict(results.found),
            "pictures": [
                {"rank": rank} | {name: rounded(getattr(r, key)) for name, key in SAID.items()}
                for rank, r in enumerate(results.ranked, start=1)
            ],
        },
        "scores": {"images": None, "decoys": None, "compared": results.compared},
    }
    for name, found, given in (
        ("images", results.truth, truth),
        ("decoys", results.decoys, decoys),
    ):
        if found is not None and given is not None:
            record["scores"][name] = {
                "source": given.source,
                "n": len(given),
                "reading": given.facts,
                "n_good": found.n_good,
                "mean_ssim": rounded(float(found.ssim.mean())),
                "ssim": rounded(found.ssim.tolist()),
                "attack": found.attack.tolist(),
                "candidate": found.candidate.tolist(),
            }
    record["conventions"] = {
        "good": f"SSIM above {GOOD}",
        "identified": "SSIM of the best match at least .05 above that of the same picture with any "
        "other image given, of a decoy with any other decoy",
        "mean_image": "a control: the mean image alone in place of every reconstruction",
        "p_value": "of decoys scoring as the images do, by permuting images and decoys",
        "SSIM": "Wang et al. 2004, window 11x11, sigma 1.5"
        if results.convention == "gaussian11"
        else "window 3x3, as images are smaller than 11x11",
        "match": "each image's best candidate of all attacks, "
        + ("with either sign" if results.method == "span" else "at the last saved iteration")
        + ("" if results.exhaustive else f", of the {N_NEAREST} nearest by correlation per attack"),
        "picture": "a raw candidate, as far from the mean image as [0, 1] allows",
    }
    return record
