"""Pairs that a training never sees, and how well the network in training restores them.

Whole parts of the store are held out, the smallest by SHA-256 of their numbers, so that a store
that grows mostly keeps them. Of their confident pairs a fixed random selection is scored, without
augmentation where there are any. Unless the strength is fitted, their images may occur in other
runs: how well a restorer does on images that it has not seen is the evaluation's part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from recon_core.balance import Curation
from recon_core.metrics import ssim_pairs
from recon_core.restore import Restorer
from recon_core.restore.examples import make_examples, to_pictures
from recon_core.strict import Count, Natural, Strict, Within
from recon_core.summary import t_interval
from storage.errors import StorageError
from storage.pairs.dataset import Dataset
from storage.pairs.stream import PairStream
from tasks.dataset.pair_stream import in_rgb

STRENGTHS = tuple(k / 10 for k in range(11))
LEFT_OUT = 0.2
"""Share of the images with pairs that are kept from a training to fit its strength."""


@dataclass(frozen=True, kw_only=True)
class Validation(Strict):
    """Settings of a training's validation, and of which weights become the model.

    Every `every` steps and at the end, `n_pairs` pairs of `n_parts` held-out parts of the store are
    restored with the averaged weights; 0: never, and nothing is held out. `n_samples`: restorations
    of each pair, whose mean is scored; a single one of a diffusion restorer says more about its
    sharpness than about what it knows. `n_sampler_steps`: its Heun steps there (None: its own
    number). `keep`: the model is the "last" weights, as in the image restoration paper, or those of
    the "best" validation. `strength` "fitted": the images of the held-out pairs are kept out of the
    training altogether, in whatever run, and the model goes from a picture as far towards the
    network's answer as helps them most; nowhere if none helps them beyond chance.
    """

    every: Natural = 0
    n_pairs: Count = 256
    n_parts: Count = 1
    n_samples: Count = 1
    n_sampler_steps: Annotated[int | None, Within("[2, inf)")] = None
    keep: Literal["last", "best"] = "last"
    strength: Literal["full", "fitted"] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("keep", "best"), ("strength", "fitted")):
            if getattr(self, name) == value and not self.every:
                raise ValueError(
                    f"{name}={value!r} needs validations; set validation.every, e.g. to 1000"
                )

    def due(self, step: int, n_steps: int) -> bool:
        """True if the weights after `step` steps are validated."""
        return self.every > 0 and (step % self.every == 0 or step == n_steps)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The scored pairs: pictures in [0, 1] before restoration, and what they should become, which
    are the images `image_ids`."""

    parts: tuple[int, ...]
    unaugmented: bool
    image_ids: npt.NDArray[np.int64]
    inputs: Float32[Tensor, "n c h w"]
    targets: Float32[Tensor, "n c h w"]
    ssim_inputs: float


def held_out_parts(dataset: Dataset, n_parts: int) -> tuple[int, ...]:
    """The parts that are kept from the training, ascending. Raises StorageError if no part with
    pairs would be left."""
    parts = [receipt.part for receipt in dataset.receipts if receipt.n_pairs]
    if len(parts) <= n_parts:
        raise StorageError(
            f"{dataset.root} has {len(parts)} parts with pairs and validation.n_parts={n_parts} "
            "are to be held out; generate more, lower n_parts, or set validation.every=0"
        )
    return tuple(sorted(sorted(parts, key=_rank)[:n_parts]))


def read_held_out(dataset: Dataset, validation: Validation, curation: Curation) -> HeldOut:
    """Read the pairs to score; to fit a strength, those of a fifth of the images, without
    which the training then goes. Raises StorageError if the held-out parts have none."""
    parts = held_out_parts(dataset, validation.n_parts)
    held_out = dataset.subset(parts)
    images = None
    if validation.strength == "fitted":
        n_all = int((dataset.image_counts(curation.min_iteration)[1] > 0).sum())
        ids, counts = held_out.image_counts(curation.min_iteration)
        ranked = sorted(ids[counts > 0].tolist(), key=lambda image: _rank(image, "image"))
        images = np.array(ranked[: max(2, round(LEFT_OUT * n_all))], np.int64)
    for unaugmented in (True, False):

        def eligible(
            part: int,
            columns: Mapping[str, npt.NDArray[Any]],
            unaugmented: bool = unaugmented,
        ) -> npt.NDArray[np.int64]:
            """1 for the pairs of a part that may be scored, 0 for the others."""
            found = columns["confident"] & (columns["iteration"] >= curation.min_iteration)
            if images is not None:
                found = found & np.isin(columns["image_id"], images)
            if unaugmented:
                is_plain = ~np.any(held_out.stored(part, "targets/augment") != 0, axis=1)
                found = found & is_plain[held_out.stored(part, "pairs/target_row")]
            return np.asarray(found, np.int64)

        stream = PairStream(held_out, repeats=eligible, seed=0, prefetch=False)
        batch = next(stream.batches(validation.n_pairs, scaled=False), None)
        if batch is not None:
            examples = make_examples(batch)
            inputs, targets = (
                in_rgb(to_pictures(made)) for made in (examples.condition, examples.target)
            )
            ssim = float(ssim_pairs(inputs, targets).mean())
            return HeldOut(parts, unaugmented, batch["image_id"], inputs, targets, ssim)
    raise StorageError(
        f"the held-out parts {list(parts)} of {dataset.root} have no confident pair from iteration "
        f"{curation.min_iteration} on; raise validation.n_parts or set validation.every=0"
    )


def score(
    restorer: Restorer,
    net: nn.Module,
    held_out: HeldOut,
    *,
    device: str,
    n_samples: int = 1,
) -> tuple[float, Float32[Tensor, "n c h w"]]:
    """(SSIM averaged over the held-out pairs, their restorations in [0, 1]): of each pair the mean
    of `n_samples`, always from the same noise. Pixels that are not numbers count as black.
    """
    seeds = torch.arange(len(held_out.inputs))
    inputs = held_out.inputs.to(device)
    samples = restorer.restore(net, inputs, n_samples=n_samples, seeds=seeds)
    restored = samples.mean(dim=0).cpu().nan_to_num(nan=0.0).clamp(0, 1)
    return float(ssim_pairs(restored, held_out.targets).mean()), restored


def fitted_strength(
    restored: Float32[Tensor, "n c h w"], held_out: HeldOut
) -> tuple[float, list[tuple[float, float]]]:
    """Return (strength with which restorations help the held-out pairs, [(strength, mean SSIM)]).

    Of eleven strengths the one with the highest mean; 0 unless the interval of the mean gain, over
    images, is above 0. `restored` are the answers with strength 1.
    """
    table = torch.stack(
        [ssim_pairs(held_out.inputs.lerp(restored, s), held_out.targets) for s in STRENGTHS]
    ).numpy()
    curve = [(s, float(row.mean())) for s, row in zip(STRENGTHS, table, strict=True)]
    best = int(table.mean(axis=1).argmax())
    _ids, image = np.unique(held_out.image_ids, return_inverse=True)
    gains = np.bincount(image, table[best] - table[0]) / np.bincount(image)
    helps = len(gains) > 1 and t_interval(gains.tolist())[0] > 0
    return (STRENGTHS[best] if helps else 0.0), curve


def _rank(number: int, kind: str = "part") -> str:
    return hashlib.sha256(f"held-out {kind} {number}".encode()).hexdigest()
