"""The practical attack on photographs, and the family's runs: nearly right is not recovered."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from scipy.optimize import linear_sum_assignment, nnls
from torch import Tensor

from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.natural_fit import Practical, exchanged, few_atoms
from recon_core.attacks.instahide.practical import recover_practically
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.attacks.instahide.run import InstaHideRecovery, two_sets
from recon_core.types import Outcome, RunSpec
from tests.recon_core.attacks.instahide.cases import photographs
from tests.recon_core.drawing import generator, refuses

N = 10
HALF_A_LEVEL = 1 / 255


ONCE = Practical(n_again=0)


@lru_cache
def attacked(
    side: int, *, k_pub: int, labels: bool = True, how: Practical | None = None
) -> tuple[Recovered, Tensor]:
    """Of ten private photographs and twenty public ones, 400 encodings; what came back, the truth.
    Two images are of each class."""
    drawn = generator(0)
    private, public = photographs(N + 20, side, drawn).split([N, 20])
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


@pytest.mark.slow
def test_what_is_missing_is_found_with_what_is_there() -> None:
    once, truth = attacked(24, k_pub=1, how=ONCE)
    again, _truth = attacked(24, k_pub=1)
    assert int(recovered(again).sum()) > int(recovered(once).sum())
    assert float(errors(again, truth, signed=True)[recovered(again)].max()) < HALF_A_LEVEL


def test_without_grey_levels_fitted_weights_prove_nothing() -> None:
    how = Practical(n_levels=0, n_rounds=30, n_again=0)
    found, truth = attacked(16, k_pub=1, labels=False, how=how)
    assert not bool(recovered(found).any())
    assert float(errors(found, truth, signed=True).median()) < 0.1


@pytest.mark.parametrize("with_labels", [True, False])
def test_equal_weights_on_photographs(with_labels: bool) -> None:
    """Where weights are known: images are finite and pairs are pairs."""
    drawn = generator(0)
    images = photographs(20, 16, drawn)
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
        how=Practical(n_rounds=2),
    )
    assert bool(found.images.isfinite().all())
    assert (found.edges[:, 0] < found.edges[:, 1]).all()


SMALL = InstaHideRecovery(n_public=20, scheme=InstaHide(k_pub=1, n_epochs=40))


def tiles(n: int) -> Tensor:
    """In [0, 255]."""
    pixels = (photographs(n, 16, generator(0)) + 1) * 127.5
    return pixels.round().to(torch.uint8).view(n, 3, 16, 16)


def spec(n: int) -> RunSpec:
    labels = tuple(k % 2 for k in range(n))
    return RunSpec(run=3, root_seed=1, image_ids=tuple(range(n)), labels=labels)


def test_private_and_public_images_are_all_and_none_is_both():
    private, public = two_sets(spec(12), 5)
    assert len(public) == 5
    assert sorted(private.tolist() + public.tolist()) == list(range(12))
    assert two_sets(replace(spec(12), run=4, victim=4), 5)[1].tolist() != public.tolist()


@pytest.mark.slow
def test_photographs_come_back_as_pairs_of_private_images():
    images = tiles(32)
    (found,) = SMALL.run_batch([spec(32)], images[None], device=torch.device("cpu"))
    assert found.outcome is Outcome.OK
    private, _public = two_sets(spec(32), 20)
    rows = found.pairs.target_row.tolist()
    assert set(rows) <= set(private.tolist())
    assert len(rows) >= 6
    assert len(set(rows)) == len(rows)
    truth = images[found.pairs.target_row].float() / 255
    error = (found.pairs.reconstruction - truth).square().mean((1, 2, 3)).sqrt()
    assert float(error.median()) < 0.1
    assert 0 <= found.stats["train_accuracy"] <= 1
    assert found.stats["n_iterations"] == 12 * 40


def test_what_cannot_be_attacked_is_refused():
    refuses("leave 2 private ones", SMALL.check_images, 22)
    few = InstaHideRecovery(n_public=2, scheme=Mixing.as_a_whole(2), n_encodings=10)
    refuses("10 encodings of 18 private images are too few", few.check_images, 20)
    refuses("attacks_per_victim=2", SMALL.check_sweep, 2)
    SMALL.check_sweep(1)
    with pytest.raises(ValueError, match="images of 8 pixels are too small"):
        SMALL.run_batch([spec(32)], tiles(32)[None, ..., :8, :8], device=torch.device("cpu"))


def test_the_best_two_of_eight_are_found():
    """Against non-negative least squares of all 28 pairs, 200 targets."""
    drawn = generator(0)
    atoms = torch.randn(8, 40, generator=drawn)
    ids = torch.stack([torch.randperm(8, generator=drawn)[:2] for _ in range(200)])
    weights = 0.2 + torch.rand(200, 2, generator=drawn)
    noise = 0.1 * torch.randn(200, 40, generator=drawn)
    targets = (atoms[ids] * weights[..., None]).sum(1) + noise
    chosen, own = few_atoms(targets @ atoms.T, atoms @ atoms.T, 2, largest=2.0)
    for k in range(200):
        best = min(
            itertools.combinations(range(8), 2),
            key=lambda pair: nnls(atoms[list(pair)].T.numpy(), targets[k].numpy())[1],
        )
        assert sorted(chosen[k].tolist()) == list(best)
        exact, _ = nnls(atoms[chosen[k]].T.numpy(), targets[k].numpy())
        torch.testing.assert_close(own[k], torch.from_numpy(exact).float(), atol=1e-3, rtol=1e-3)


def test_coefficients_stay_within_their_bounds():
    drawn = generator(1)
    atoms = torch.randn(6, 30, generator=drawn)
    targets = torch.stack([3 * atoms[0] - atoms[1], -2 * atoms[2]])
    chosen, weights = few_atoms(targets @ atoms.T, atoms @ atoms.T, 2, largest=0.65)
    assert 0 <= float(weights.min()) <= float(weights.max()) <= 0.65
    assert 0 in chosen[0].tolist()


def test_exchanges_find_atoms_of_small_coefficients():
    """Of 200 alike atoms four, one of which has a fiftieth of the weight."""
    drawn = generator(2)
    atoms = torch.randn(200, 300, generator=drawn) + torch.randn(300, generator=drawn)
    ids = torch.stack([torch.randperm(200, generator=drawn)[:4] for _ in range(100)])
    weights = torch.tensor([0.4, 0.3, 0.2, 0.02])
    targets = (atoms[ids] * weights[:, None]).sum(1)
    targets += 0.005 * torch.randn(100, 300, generator=drawn)
    products, gram = targets @ atoms.T, atoms @ atoms.T
    first, _own = few_atoms(products, gram, 4)
    chosen, own = exchanged(products, gram, first)
    true = ids.sort(1).values
    assert float((first.sort(1).values == true).all(1).float().mean()) < 0.5
    assert float((chosen.sort(1).values == true).all(1).float().mean()) > 0.95
    torch.testing.assert_close(own.mean(0), weights, atol=2e-3, rtol=0)
    assert torch.equal(exchanged(products, gram, chosen)[0], chosen)


def test_of_one_atom_the_best_is_taken():
    drawn = generator(3)
    atoms = torch.randn(9, 30, generator=drawn)
    targets = 0.5 * atoms[[4, 7]] + 0.01 * torch.randn(2, 30, generator=drawn)
    start = torch.zeros(2, 1, dtype=torch.int64)
    assert exchanged(targets @ atoms.T, atoms @ atoms.T, start)[0].tolist() == [[4], [7]]
