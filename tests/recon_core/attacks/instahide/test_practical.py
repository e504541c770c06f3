"""The practical attack on photographs: images to the grey level, and none that is only nearly so
called recovered."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.instahide.practical import Practical, recover_practically
from recon_core.attacks.instahide.recover import Recovered, Status
from storage.sources.photographs import photograph_tiles

N = 10
HALF_A_LEVEL = 1 / 255


ONCE = Practical(n_again=0)


@lru_cache
def attacked(
    side: int, *, k_pub: int, labels: bool = True, how: Practical | None = None
) -> tuple[Recovered, Tensor]:
    """Of ten private photographs and twenty public ones, 400 encodings; what came back, the truth.
    Two images are of each class."""
    tiles = torch.from_numpy(photograph_tiles("train", side)[0]).float() * (2 / 255) - 1
    drawn = torch.Generator().manual_seed(0)
    images = tiles[torch.randperm(len(tiles), generator=drawn)[: N + 20]].flatten(1)
    private, public = images.split([N, 20])
    scheme = InstaHide(k_pub=k_pub, n_epochs=40)
    made = scheme.encode(private, public, generator=drawn, labels=torch.eye(5).repeat(2, 1))
    found = recover_practically(
        made.y,
        (3, side, side),
        mixing=scheme,
        public=public if k_pub else None,
        n_private=N,
        labels=made.labels if labels else None,
        generator=drawn,
        how=how,
    )
    return found, private.double()


def errors(found: Recovered, truth: Tensor, *, signed: bool) -> Tensor:
    """The largest error of a pixel of each image; without signs that of its absolute value."""
    ours, theirs = (found.images, truth) if signed else (found.images.abs(), truth.abs())
    ids = linear_sum_assignment(torch.cdist(ours, theirs).numpy())[1]
    return (ours - theirs[ids]).abs().amax(1)


def recovered(found: Recovered) -> Tensor:
    return torch.tensor([status is Status.RECOVERED for status in found.status])


@pytest.mark.parametrize(("k_pub", "labels", "least"), [(1, True, 5), (1, False, 3), (0, False, 5)])
def test_photographs_come_back_to_the_grey_level(k_pub: int, labels: bool, least: int) -> None:
    found, truth = attacked(16, k_pub=k_pub, labels=labels, how=ONCE)
    worst = errors(found, truth, signed=k_pub > 0)
    sure = recovered(found)
    assert int(sure.sum()) >= least
    assert float(worst[sure].max()) < HALF_A_LEVEL
    assert float((found.images[sure] * 127.5 + 127.5).frac().abs().sub(0.5).abs().min()) > 0.49


def test_a_mixture_of_two_images_is_not_called_recovered() -> None:
    """All explained encodings of one image have the other image of its class too: their weights
    are fitted, so that any mixture of the two meets all of them."""
    found, truth = attacked(24, k_pub=1, how=ONCE)
    worst = errors(found, truth, signed=True)
    assert float(worst[recovered(found)].max()) < HALF_A_LEVEL


def test_what_is_missing_is_found_with_what_is_there() -> None:
    once, truth = attacked(24, k_pub=1, how=ONCE)
    again, _truth = attacked(24, k_pub=1)
    assert int(recovered(again).sum()) > int(recovered(once).sum())
    assert float(errors(again, truth, signed=True)[recovered(again)].max()) < HALF_A_LEVEL
    with pytest.raises(ValueError, match="n_again=-1"):
        Practical(n_again=-1)


def test_without_grey_levels_fitted_weights_prove_nothing() -> None:
    how = Practical(refinement=replace(Practical().refinement, n_levels=0, n_rounds=30), n_again=0)
    found, truth = attacked(16, k_pub=1, labels=False, how=how)
    assert not bool(recovered(found).any())
    assert float(errors(found, truth, signed=True).median()) < 0.1
