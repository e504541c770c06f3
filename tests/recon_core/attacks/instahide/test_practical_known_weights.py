"""The practical attack where weights are known: images are finite and pairs are pairs."""

from __future__ import annotations

import pytest
import torch

from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.natural_fit import Refinement
from recon_core.attacks.instahide.practical import Practical, recover_practically
from storage.sources.photographs import photograph_tiles


@pytest.mark.parametrize("with_labels", [True, False])
def test_equal_weights_on_photographs(with_labels: bool) -> None:
    tiles = torch.from_numpy(photograph_tiles("train", 16)[0]).float() * (2 / 255) - 1
    drawn = torch.Generator().manual_seed(0)
    images = tiles[torch.randperm(len(tiles), generator=drawn)[:20]].flatten(1)
    labels = torch.eye(2).repeat(3, 1)
    mixing = Mixing.as_a_whole(2)
    made = mixing.encode(images[:6], images[6:], 40, generator=drawn, labels=labels)
    found = recover_practically(
        made.y,
        (3, 16, 16),
        mixing=mixing,
        public=images[6:],
        n_private=6,
        labels=made.labels if with_labels else None,
        generator=drawn,
        how=Practical(refinement=Refinement(n_rounds=2)),
    )
    assert bool(found.images.isfinite().all())
    assert (found.edges[:, 0] < found.edges[:, 1]).all()
