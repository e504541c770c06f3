"""What an attack's scores are worth: images beside decoys, and beside the mean image alone.

A count of good matches says little where pictures resemble each other: faces, digits, a common
ground. So three things stand beside it: how many images are *identified*, that is, have a best
picture that is nearer to them than to any other image given; how good the mean image alone would
be, which carries nothing of any single image; and the chance that decoys would score as the images
do. Below are parts of an attack's record and of its cache. Nothing here imports Prefect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.leakage import exchangeable_p
from recon_core.matching import GAP, runner_up
from recon_core.metrics import SSIMConvention, ncc_matrix, ssim_matrix, ssim_pairs
from recon_core.victims.preflight import Preflight
from storage.documents import read_document
from storage.files import write_json

MAX_PAIRS = 4_000_000
"""Pairs up to which every SSIM is computed; of more, each picture is compared with its nearest
images by correlation."""
N_NEAREST = 20
SURE = 0.05
"""P-value above which scores do not tell images from decoys."""
FEW = 5
"""Fewest images or decoys for which a p-value is given: of fewer it could hardly be low."""


def leads(
    pictures: Float[Tensor, "n c h w"],
    images: Float[Tensor, "n c h w"],
    member: Bool[Tensor, " n"],
    *,
    convention: SSIMConvention = "gaussian11",
) -> Float[Tensor, " n"]:
    """SSIM of each image with its best picture, in the same row, less the highest SSIM of that
    picture with another image: any other for a training image (`member`), any other decoy for a
    decoy. A picture of NaN has no lead (-inf)."""
    n = len(images)
    own = ssim_pairs(pictures, images, convention=convention)
    if n * n <= MAX_PAIRS:
        scores = ssim_matrix(pictures, images, convention=convention)
        second = runner_up(scores, torch.arange(n), member)
    else:
        rivals = (member[:, None] | ~member[None, :]) & ~torch.eye(n, dtype=torch.bool)
        distances = ncc_matrix(pictures, images).nan_to_num(nan=torch.inf)
        rows = distances.where(rivals, torch.inf).topk(N_NEAREST, dim=1, largest=False).indices
        second = torch.stack(
            [ssim_pairs(pictures, images[row], convention=convention) for row in rows.T]
        ).amax(0)
    return (own - second).nan_to_num(nan=-torch.inf)


def compared(
    sides: Mapping[str, tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"], Tensor]],
    control: Float[Tensor, "c h w"],
    *,
    good: float,
    convention: SSIMConvention = "gaussian11",
) -> dict[str, Any]:
    """The record's `compared`. `sides` has `images`, and `decoys` where there are some: the images,
    the best picture of each (NaN where there is none), its SSIM. `control`: the mean image."""
    images, pictures = (torch.cat([side[k] for side in sides.values()]) for k in range(2))
    sizes = [len(side[0]) for side in sides.values()]
    member = torch.arange(len(images)) < sizes[0]
    alone = control.expand_as(images).clone()
    by_mean = ssim_pairs(alone, images, convention=convention)
    ahead = leads(pictures, images, member, convention=convention) >= GAP
    record: dict[str, Any] = {"identified": {}, "mean_image": {}, "p_value": None}
    for name, lead, scores in zip(sides, ahead.split(sizes), by_mean.split(sizes), strict=True):
        record["identified"][name] = int(lead.sum())
        record["mean_image"][name] = {
            "n_good": int((scores > good).sum()),
            "mean_ssim": round(float(scores.mean()), 6),
        }
    if len(sizes) > 1 and min(sizes) >= FEW:
        ssim = torch.cat([side[2] for side in sides.values()]).double().numpy()[None]
        p = exchangeable_p(ssim, member.numpy()[None], generator=np.random.default_rng(0))
        record["p_value"] = p
    return record


def sentences(scores: Mapping[str, Any], outlook: str) -> list[str]:
    """State what the record's `scores` allow to conclude, for the page and the screen.

    `scores` has `images`, `decoys` (or None) and `compared`; `outlook` is that of the check before
    the attack (`recon_core.victims.preflight`).
    """
    images, decoys, found = scores["images"], scores["decoys"], scores["compared"]
    n, identified = images["n"], found["identified"]
    said = [f"Identified, that is, nearer to what came back than every other picture: "
            f"{identified['images']} of {n} images"]  # fmt: skip
    if decoys:
        said[0] += f"; among themselves, {identified['decoys']} of {decoys['n']} decoys"
    said[0] += "."
    alone = found["mean_image"]["images"]["n_good"]
    if alone:
        said.append(
            f"The mean image alone, which shows none of them, is a good match of {alone} of {n}."
        )
    p = found["p_value"]
    if p is not None and p > SURE:
        said.append(
            f"Decoys score like the training images (p = {p:.2g}): these scores are no evidence "
            "that anything came back."
        )
    if not images["n_good"] and outlook in ("good", "open"):
        said.append(
            "The weights looked as if an attack could work, yet nothing came back well: the images "
            "given may not be the training images, or the network saw them with another mean, "
            "scale, size or order of values; more attacks may help as well."
        )
    return said


def chances(found: Preflight) -> dict[str, Any]:
    """Verdict, outlook and findings as JSON."""
    findings = [asdict(finding) for finding in found.findings]
    return {"verdict": found.verdict, "outlook": found.outlook, "findings": findings}


def plain(settings: Any) -> dict[str, Any]:
    """A dataclass as JSON has it: tuples are lists."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return found


def setting_rows(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every setting."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from setting_rows(value, f"{above}{key}.")
        elif isinstance(value, list):
            yield f"{above}{key}", ", ".join(map(str, value))
        else:
            yield f"{above}{key}", "none" if value is None else str(value)


def six_digits(value: Any) -> Any:
    """`value` with all numbers in it at six digits; None for what JSON has no number for."""
    return with_floats(value, lambda number: float(f"{number:.6g}"))


def with_floats(value: Any, change: Callable[[float], float]) -> Any:
    """`value` as JSON has it, with all floats in it changed, and None for what is not finite."""
    if isinstance(value, Mapping):
        return {key: with_floats(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_floats(item, change) for item in value]
    if isinstance(value, float):
        return change(value) if math.isfinite(value) else None
    return value


def claimed(cache: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The job that `cache/job.json` names; `wanted`, if that is new."""
    path = cache / "job.json"
    if path.exists():
        return read_document(path, "remove it with what is beside it, or start over with --fresh")
    cache.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)
    return wanted
