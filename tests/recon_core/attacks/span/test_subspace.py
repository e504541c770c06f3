"""The span of a first layer's weights: its size told from noise, its start taken off, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recon_core.attacks.span.subspace import count_signal, fit_shares, subspace_of
from tests.recon_core.drawing import generator, normal
from tests.recon_core.tiles import photograph_tiles

WIDTH, D = 60, 400
NOISE = 1e-3


def _signal(n: int, *, seed: int, weakest: float = 3.0) -> tuple[Tensor, Tensor]:
    """(rows, n orthonormal directions), with strengths down to `weakest` edges of NOISE."""
    left, right = (torch.linalg.qr(normal(size, n, seed=seed))[0] for size in (WIDTH, D))
    edge = NOISE * (WIDTH**0.5 + D**0.5)
    strengths = edge * weakest * torch.logspace(2, 0, n, dtype=torch.float64)
    return (left * strengths) @ right.mT, right.mT


def test_the_number_of_images_is_told_from_the_noise_in_200_cases() -> None:
    wrong = []
    for seed in range(200):
        n = 1 + seed % 45
        rows = _signal(n, seed=seed)[0] + NOISE * normal(WIDTH, D, seed=1000 + seed)
        count, noise, _edge = count_signal(torch.linalg.svdvals(rows), rows.shape)
        wrong.append(count - n)
        assert noise == pytest.approx(NOISE, rel=0.05)
    assert sum(difference != 0 for difference in wrong) <= 4  # one in 200 is what the edge allows
    assert max(map(abs, wrong)) <= 1


@pytest.mark.parametrize("share", [1.0, 0.37, 0.0])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_the_start_that_weight_decay_shrank_is_taken_off(share: float, size: float) -> None:
    signal, right = _signal(12, seed=1)
    start = size * normal(WIDTH, D, seed=2)
    assert fit_shares(signal + share * start, start) == pytest.approx((share,), abs=1e-6)
    found = subspace_of(signal + share * start, start, n_directions=12)
    assert found.start_shares[0] == pytest.approx(share, abs=1e-6)
    inside = (right @ found.vectors.mT).square().sum(1)
    assert torch.allclose(inside, torch.ones(12, dtype=torch.float64), atol=1e-6)


def _strokes(n: int) -> Tensor:
    """White lines on black: two of three pixels are 0, some in every picture."""
    pictures = torch.zeros(n, 20, 20, dtype=torch.float64)
    draw = generator(7)
    for picture in pictures:
        for _ in range(5):
            row, column, length = torch.randint(2, 12, (3,), generator=draw).tolist()
            picture[row, column : column + length] = 1.0
            picture[row : row + length, column] = torch.rand(1, generator=draw).double()
    return pictures.clamp_max(1.0).flatten(1)


def _rounded(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return rows.to(dtype).double()


def _mixed(inputs: Tensor) -> Tensor:
    return normal(WIDTH, len(inputs), seed=3) @ inputs


def _uneven(n: int) -> Tensor:
    """As an optimiser's state: neurons and images of very different sizes."""
    neurons, images = (torch.logspace(0, -e, m).double()[:, None] for e, m in ((7, WIDTH), (4, n)))
    return neurons * _mixed(images * _strokes(n))


def _dominated(n: int) -> Tensor:
    """As at the end of a long training: one image has nearly all of the gradient, and a neuron that
    only it moves; dead neurons have what is left of their last gradients."""
    strengths = torch.logspace(0, -4, n, dtype=torch.float64)
    strengths[0] = 1e4
    mixing = normal(WIDTH, n, seed=3) * strengths
    mixing[0, 1:] = 0.0
    mixing[-5:] *= 1e-30
    return mixing @ _strokes(n)


def _few(n: int) -> Tensor:
    """Three neurons of five learned, the others stay as they were."""
    return torch.where(torch.arange(WIDTH)[:, None] % 5 < 3, _mixed(_strokes(n)), 0.0)


def _centred(n: int, *, bias: bool) -> Tensor:
    x = _strokes(n) - _strokes(n).mean(0)
    return _mixed(torch.cat([x, torch.ones(n, 1).double()], 1) if bias else x)


def _coarse(n: int) -> Tensor:
    """Their mean is taken off in single precision, whose rounding is a weak direction."""
    tiles = photograph_tiles(16, shrink=2)[:n].flatten(1).float() / 255
    return (tiles - tiles.mean(0)).double()


ENDS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "float64": (lambda: _mixed(_strokes(40)), 40),
    "float32": (lambda: _rounded(_mixed(_strokes(40))), 40),
    "a few": (lambda: _rounded(_mixed(_strokes(4))), 4),
    "all but three neurons": (lambda: _rounded(_mixed(_strokes(57))), 57),
    "a state": (lambda: _rounded(_uneven(30)), 30),
    "one image above all": (lambda: _rounded(_dominated(30)), 30),
    "dead neurons": (lambda: _rounded(_few(20)), 20),
    "bfloat16": (lambda: _rounded(_mixed(_strokes(10)), torch.bfloat16), 10),
    "white ground": (lambda: _rounded(_mixed(1 - _strokes(30))), 30),
    "centred, with biases": (lambda: _rounded(_centred(30, bias=True)), 30),
    "centred": (lambda: _rounded(_centred(30, bias=False)), 29),
    "centred in single precision": (lambda: _rounded(_mixed(_coarse(30))), 29),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_sharp_end_is_found_by_its_own_noise(case: str) -> None:
    """Many of these directions are as rough as noise is."""
    make, n = ENDS[case]
    found = subspace_of(make(), surplus=0.5)
    assert (found.n_signal, len(found.vectors), found.ends_sharply) == (n, n, True)


@pytest.mark.parametrize("n", [WIDTH, WIDTH + 30])
def test_as_many_images_as_neurons_leave_no_end(n: int) -> None:
    assert not subspace_of(_rounded(_mixed(_strokes(n)))).ends_sharply


def test_a_direction_that_drowns_in_the_rounding_of_loud_neurons_is_found() -> None:
    strokes = torch.linalg.qr(_strokes(20).mT).Q.mT
    mixing = torch.logspace(0, -2, 20, dtype=torch.float64) * normal(WIDTH, 20, seed=3)
    mixing[:, -1] = 0.0
    mixing[:30] *= 1e-5
    mixing[:30, -1] = 1e-9 * normal(30, seed=4)  # of quiet neurons alone
    rows = _rounded(mixing @ strokes)
    _left, values, right = torch.linalg.svd(rows, full_matrices=False)
    assert float(values[19]) < 1.3 * float(values[20])
    assert abs(float(right[19] @ strokes[19])) < 0.9  # the raw direction is mostly rounding
    found = subspace_of(rows)
    assert found.n_signal == 20
    inside = (strokes[19] @ found.vectors.mT).square().sum()
    assert float(inside) > 0.999


def test_a_start_is_taken_off_of_nearly_as_many_images_as_neurons() -> None:
    start = 0.03 * normal(WIDTH, D, seed=2)
    rows = _rounded(_mixed(_strokes(50)) + start)
    found = subspace_of(rows, _rounded(start))
    assert (found.n_signal, found.ends_sharply) == (50, True)
    assert found.start_shares[0] == pytest.approx(1.0, abs=1e-7)


def test_surplus_directions_come_behind_those_of_the_signal() -> None:
    rows = _signal(20, seed=1)[0] + NOISE * normal(WIDTH, D, seed=2)
    found = subspace_of(rows.float(), surplus=0.25)
    assert (found.n_signal, found.vectors.shape) == (20, (25, D))
    assert found.vectors.dtype == torch.float32
    assert torch.allclose(found.vectors @ found.vectors.mT, torch.eye(25), atol=1e-5)


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "nan": (lambda: subspace_of(torch.full((5, 9), torch.nan)), "45 of 45 first-layer numbers"),
    "zero": (lambda: subspace_of(torch.zeros(5, 9)), "all zero, or is its start"),
    "unmoved": (lambda: subspace_of(_signal(5, seed=1)[0], _signal(5, seed=1)[0]), "its start"),
    "noise": (lambda: subspace_of(normal(WIDTH, D, seed=3)), "stands out of noise.*--initial"),
    "other": (lambda: subspace_of(torch.eye(5), torch.eye(4)), r"\(4, 4\), must be .*\(5, 5\)"),
    "infinite": (lambda: subspace_of(torch.eye(2), torch.eye(2) / 0), "must be finite"),
    "many": (lambda: subspace_of(torch.eye(5, 9), n_directions=6), "6 directions .* 5 neurons"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_taken_apart_is_refused(case: str) -> None:
    attempt, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_the_start_of_a_neuron_that_hardly_learned_is_no_direction() -> None:
    """Divided by its own size, its noise is as strong as what other neurons learned."""
    learned = (normal(40, 5) @ normal(5, 300, seed=1)).float()
    learned[:2] = 0
    assert subspace_of(learned + 1e-4 * normal(40, 300, seed=2).float()).n_signal == 5


def test_a_direction_of_a_neuron_or_of_biases_alone_may_be_their_start() -> None:
    """In weights; in a state only rounding is left."""
    mixing = normal(WIDTH, 30, seed=3)
    mixing[:, 0] *= 2e-3
    mixing[0] = torch.eye(30, dtype=torch.float64)[0]
    rows = _rounded(mixing @ _strokes(30))
    found = subspace_of(rows, has_start=False)
    assert (found.n_signal, found.ends_sharply) == (30, True)
    assert not subspace_of(rows).ends_sharply
    start = normal(WIDTH, D + 1, seed=4) * torch.cat([torch.full((D,), 1e-4), torch.ones(1)])
    found = subspace_of(0.01 * _mixed(torch.cat([_strokes(5), torch.ones(5, 1)], 1)) + start)
    assert (found.n_signal, found.ends_sharply) == (6, False)


def test_silent_neurons_hide_no_rounding() -> None:
    mixing = normal(WIDTH, 30, seed=3) * torch.logspace(0, -6, 30, dtype=torch.float64)
    mixing[40:] *= 1e-38
    found = subspace_of(_rounded(mixing @ _strokes(30)), has_start=False)
    assert (found.n_signal, found.ends_sharply) == (30, True)
