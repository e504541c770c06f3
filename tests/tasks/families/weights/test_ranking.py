"""The span attack's pictures in order: planted sources, with and without a second attack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from storage.checkpoints import save_checkpoint
from tasks.families.weights.attack import AttackRun, name_of
from tasks.families.weights.results import SavedCandidates, judged, rank
from tests.tasks.families.weights.attack_victims import SIDE, rectangles

SHAPE = (3, SIDE, SIDE)
MEAN = torch.full(SHAPE, 0.5)
IMAGES = rectangles(4, 0)
NOISE = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1))


def saved(folder: Path, *attacks: tuple[Tensor, list[float]]) -> SavedCandidates:
    """Attacks of these pictures, less the mean, with their trust."""
    runs = []
    for number, (pictures, trust) in enumerate(attacks):
        arrays = {
            "x": (pictures - MEAN).flatten(1)[None].numpy(),
            "label": np.arange(len(trust)),
            "trust": np.array(trust, np.float32),
        }
        meta = {"ending": "ok", "n_iterations": 1, "loss": 0.0, "residual": None, "settings": {},
                "seconds": 1.0, "threads": 1}  # fmt: skip
        save_checkpoint(folder, name_of(number), arrays, meta)
        runs.append(AttackRun(number, "ok", 1, 0.0, None, {}, 1.0, 1))
    return SavedCandidates(folder, runs, SHAPE, 1.0, signs=True)


def test_one_attack_goes_by_trust_and_is_judged_with_either_sign(tmp_path: Path) -> None:
    """In order: an image, another one's negative, noise, an image; a third is not there."""
    pictures = torch.stack([NOISE[0], IMAGES[0], IMAGES[1], 1 - IMAGES[2]])
    last = saved(tmp_path, (pictures, [0.3, 1.0, 0.1, 0.8]))
    ranked, n_attacks = rank(last, None, MEAN)
    assert n_attacks == 1
    assert [(r.candidate, r.label) for r in ranked] == [(1, 1), (3, 3), (0, 0), (2, 2)]
    shown, found = judged(ranked, 3, IMAGES, MEAN, "gaussian11", signs=True)
    assert [r.nearest_image for r in shown[:2]] == [0, 2]
    assert len(shown) == 3
    assert shown[0].ssim is not None
    assert shown[0].ssim > 0.9
    assert shown[0].ssim_as_negative is None
    assert shown[1].ssim_as_negative is not None
    assert shown[1].ssim is not None
    assert shown[1].ssim_as_negative > 0.9
    assert shown[1].ssim < 0.4
    assert found is not None
    assert (found.n_false, found.n_found) == (1, (2, 2, 2))
    assert found.spearman is not None
    signed = judged(ranked, 3, IMAGES, MEAN, "gaussian11", signs=False)[1]
    assert signed is not None
    assert (signed.n_false, signed.n_found) == (2, (1, 1, 1))


def test_what_two_attacks_find_goes_before_what_one_trusts(tmp_path: Path) -> None:
    last = saved(
        tmp_path,
        (torch.stack([NOISE[0], IMAGES[0]]), [0.6, 0.4]),
        (torch.stack([NOISE[1], IMAGES[0]]), [0.7, 0.5]),
    )
    ranked, n_attacks = rank(last, None, MEAN)
    assert n_attacks == 2
    assert [r.n_attacks for r in ranked] == [2, 1, 1]
    assert ranked[0].n_candidates == 2
    torch.testing.assert_close(ranked[0].x + MEAN, IMAGES[0])
    assert [r.attack for r in ranked[1:]] == [1, 0]
