"""Inversion of features: the paper's descent and the strong attacker find x where it can be found,
image by image, and report what they minimised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.attacks.inversion.feature_matching import (
    SYNTHETIC,
    GradientInversion,
    Inverted,
    total_variation,
)
from recon_core.attacks.inversion.strong_inversion import (
    StrongInversion,
    errors_by_zeta,
    whiten,
)
from recon_core.attacks.plug_and_play import Ending
from tests.recon_core.drawing import generator, generators, normal, refuses
from tests.recon_core.tiles import photograph_tiles

Features = Callable[[Tensor], Tensor]
SHAPE = (1, 4, 4)
TILES = photograph_tiles(4, shrink=8).double().mean(1, keepdim=True) / 255
X, PUBLIC = TILES[:3], TILES[10:90]
SHORT = StrongInversion(n_steps=40, zeta=0.01)


def linear(gain: float = 1.0) -> Features:
    """Invertible and well conditioned: singular values from .5 to 1.5, times `gain`."""
    u, v = (torch.linalg.qr(normal(16, 16, seed=seed))[0] for seed in (0, 1))
    matrix = gain * (u * torch.linspace(0.5, 1.5, 16, dtype=torch.float64)) @ v
    return lambda x: x.flatten(1) @ matrix


def relu(width: int = 200) -> Features:
    matrix, bias = normal(16, width, seed=2) / 4, 0.1 * normal(width, seed=3)
    return lambda x: F.relu(x.flatten(1) @ matrix + bias)


def blurry() -> Features:
    """A few smooth features, which many images share."""
    matrix = normal(16, 6, seed=4) / 4
    return lambda x: torch.tanh(x.flatten(1) @ matrix)


def close(found: Inverted, expected: Inverted, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=atol)
    torch.testing.assert_close(found.objective, expected.objective, rtol=1e-9, atol=atol)
    assert torch.equal(found.ending, expected.ending)
    assert torch.equal(found.n_steps, expected.n_steps)


def literal_variation(x: Tensor) -> Tensor:
    sums = []
    for image in x:
        total = 0.0
        for channel in image.tolist():
            height, width = len(channel), len(channel[0])
            for i in range(height):
                for j in range(width):
                    dx = channel[i + 1][j] - channel[i][j] if i + 1 < height else 0.0
                    dy = channel[i][j + 1] - channel[i][j] if j + 1 < width else 0.0
                    total += (dx**2 + dy**2) ** 0.5
        sums.append(total)
    return torch.tensor(sums, dtype=x.dtype)


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 1, 6), (2, 7, 1), (1, 1, 1)])
def test_total_variation_is_the_double_sum(shape: tuple[int, int, int]) -> None:
    x = normal(3, *shape)
    torch.testing.assert_close(total_variation(x), literal_variation(x))


def test_total_variation_has_a_gradient_everywhere() -> None:
    x = normal(2, 2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(total_variation, (x,))
    flat = torch.full((1, 2, 3, 3), 0.5, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(total_variation(flat).sum(), flat)
    assert torch.equal(gradient, torch.zeros_like(flat))
    half = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    half[..., 2:] = 1.0
    (gradient,) = torch.autograd.grad(total_variation(half.requires_grad_()).sum(), half)
    expected = torch.tensor([0.0, -1.0, 1.0, 0.0], dtype=torch.float64).expand(1, 1, 3, 4)
    assert torch.equal(gradient, expected)


def test_a_linear_map_is_inverted() -> None:
    h = linear()
    method = StrongInversion(zeta=0.0, n_steps=2000, starts=("grey",))
    found = method.invert(h, h(X), shape=SHAPE)
    assert float((found.x - X).abs().max()) < 1e-6
    assert found.n_steps.tolist() == [2000] * 3
    slow = GradientInversion(zeta=0.0, weight_decay=0.0, lr=3.0, n_steps=1500)
    found = slow.invert(h, h(X), shape=SHAPE)
    assert float((found.x - X).abs().max()) < 1e-6


METHODS: dict[str, GradientInversion | StrongInversion] = {
    "paper": GradientInversion(zeta=0.05, n_steps=60),
    "paper, vectors": GradientInversion(vectors=True, lr=0.05, zeta=0.0, n_steps=60),
    "strong": SHORT,
}


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_is_its_images_one_by_one(name: str) -> None:
    h = relu(40)
    z = h(X)
    together = METHODS[name].invert(h, z, shape=SHAPE, generators=generators(3))
    for i in range(3):
        alone = METHODS[name].invert(h, z[i : i + 1], shape=SHAPE, generators=generators(1, i))
        part = {field.name: getattr(together, field.name)[i : i + 1] for field in FIELDS}
        # Products round as their number of rows has it, and 120 steps make that a little larger.
        close(alone, Inverted(**part), atol=1e-11)


FIELDS = dataclasses.fields(Inverted)


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("zeta", [0.0, 0.02])
def test_the_objective_is_that_of_the_result(zeta: float, whitened: bool) -> None:
    h = relu(40)
    z = h(X)
    for vectors in (False, True):
        method = GradientInversion(vectors=vectors, zeta=zeta, n_steps=20, lr=0.01)
        found = method.invert(h, z, shape=SHAPE)
        difference, variation = h(found.x) - z, zeta * literal_variation(found.x)
        expected = difference.square().mean(1) + variation / 16
        if vectors:
            expected = difference.abs().sum(1) + variation
        torch.testing.assert_close(found.objective, expected)
    whitening = whiten(h(PUBLIC)) if whitened else None
    strong = dataclasses.replace(SHORT, zeta=zeta)
    found = strong.invert(h, z, shape=SHAPE, generators=generators(3), whitening=whitening)
    difference = h(found.x) - z if whitening is None else (h(found.x) - z) * whitening
    expected = difference.square().mean(1) + zeta * literal_variation(found.x) / 16
    torch.testing.assert_close(found.objective, expected)
    assert found.ending.tolist() == [Ending.LIMIT] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_paper_descends_as_torch_does(dtype: torch.dtype) -> None:
    matrix = normal(6, 5).to(dtype) / 2
    x = torch.rand(4, 1, 1, 6, generator=generator(0)).to(dtype)

    def h(images: Tensor) -> Tensor:
        return torch.tanh(images.flatten(1) @ matrix)

    z = h(x)
    for n_steps in (1, 2, 7, 50):
        method = dataclasses.replace(SYNTHETIC, n_steps=n_steps, weight_decay=0.1, lr=0.03)
        found = method.invert(h, z, shape=(1, 1, 6))
        s = torch.zeros_like(x).requires_grad_()
        optimiser = torch.optim.SGD([s], lr=0.03, weight_decay=0.1)
        for _ in range(n_steps):
            optimiser.zero_grad()
            (h(s) - z).abs().sum().backward()
            optimiser.step()
        torch.testing.assert_close(found.x, s.detach(), rtol=0, atol=1e-6 * (dtype.itemsize == 4))
        assert found.x.dtype == dtype


def test_the_strong_attack_descends_as_torch_does() -> None:
    h = relu(40)
    z = h(X)
    method = StrongInversion(zeta=0.01, n_steps=30, starts=("grey",), lr=0.05)
    s = torch.full_like(X, 0.5).requires_grad_()
    adam = torch.optim.Adam([s], lr=0.05)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 30)
    for _ in range(30):
        adam.zero_grad()
        ((h(s) - z).square().mean(1) + 0.01 / 16 * total_variation(s)).sum().backward()
        adam.step()
        cosine.step()
        with torch.no_grad():
            s.clamp_(0, 1)
    found = method.invert(h, z, shape=SHAPE)
    torch.testing.assert_close(found.x, s.detach(), rtol=0, atol=1e-10)


def test_a_diverging_image_ends_and_leaves_the_others_as_they_are() -> None:
    h = linear()
    gains = torch.tensor([1.0, 1e3, 1.0], dtype=torch.float64).unsqueeze(1)

    def planted(x: Tensor) -> Tensor:
        return h(x) * gains

    method = GradientInversion(zeta=0.001, lr=3.0, n_steps=200)
    found = method.invert(planted, planted(X), shape=SHAPE)
    assert found.ending.tolist() == [Ending.LIMIT, Ending.NONFINITE, Ending.LIMIT]
    assert found.x.isfinite().all()
    assert found.objective.isfinite().all()
    assert 1 < int(found.n_steps[1]) < 200
    for i in (0, 2):
        alone = method.invert(h, h(X[i : i + 1]), shape=SHAPE)
        torch.testing.assert_close(found.x[i], alone.x[0], rtol=0, atol=1e-12)
    shorter = dataclasses.replace(method, n_steps=int(found.n_steps[1]) - 2)
    before = shorter.invert(planted, planted(X), shape=SHAPE)
    assert torch.equal(found.x[1], before.x[1])  # the last iterate that was finite
    assert before.ending[1] == Ending.LIMIT
    one_more = dataclasses.replace(method, n_steps=int(found.n_steps[1]) + 5)
    assert torch.equal(one_more.invert(planted, planted(X), shape=SHAPE).x[1], found.x[1])


def test_the_last_step_may_be_the_one_that_is_lost() -> None:
    def h(x: Tensor) -> Tensor:
        return torch.where(x.flatten(1) > 0.51, torch.nan, 2 * x.flatten(1))

    z = torch.full((1, 16), 2.0, dtype=torch.float64)
    method = GradientInversion(zeta=0.0, n_steps=1, weight_decay=0.0)
    found = method.invert(h, z, shape=SHAPE)
    assert found.ending.tolist() == [Ending.NONFINITE]
    assert torch.equal(found.x, torch.full((1, *SHAPE), 0.5, dtype=torch.float64))
    assert found.objective.tolist() == [1.0]


def test_a_restart_never_harms() -> None:
    h = blurry()
    z = h(X)
    first = dataclasses.replace(SHORT, starts=("zeros",)).invert(h, z, shape=SHAPE)
    starts = ("zeros", "noise", "grey")
    every = [
        dataclasses.replace(SHORT, starts=(start,)).invert(
            h, z, shape=SHAPE, generators=generators(3)
        )
        for start in starts
    ]
    best = dataclasses.replace(SHORT, starts=starts).invert(
        h, z, shape=SHAPE, generators=generators(3)
    )
    lowest = torch.stack([found.objective for found in every])
    assert (best.objective <= first.objective + 1e-12).all()
    torch.testing.assert_close(best.objective, lowest.amin(0))
    for i, k in enumerate(lowest.argmin(0).tolist()):
        torch.testing.assert_close(best.x[i], every[k].x[i])
    assert len(set(lowest.argmin(0).tolist())) > 1 or (best.objective < first.objective).all()
    assert best.n_steps.tolist() == [len(starts) * SHORT.n_steps] * 3


def test_a_start_that_is_lost_is_not_chosen() -> None:
    def h(x: Tensor) -> Tensor:
        flat = x.flatten(1)
        lost = (flat.mean(1, keepdim=True) > 0.3) & (flat.mean(1, keepdim=True) < 0.49)
        return torch.where(lost, torch.nan, flat)

    method = StrongInversion(n_steps=300, zeta=0.0, starts=("grey", "zeros"))
    z = torch.full((1, 16), 0.2, dtype=torch.float64)
    found = method.invert(h, z, shape=SHAPE)
    assert found.ending.tolist() == [Ending.LIMIT]
    torch.testing.assert_close(found.x.flatten(1), z, rtol=0, atol=1e-6)


def test_a_start_whose_objective_is_unknown_is_not_chosen() -> None:
    n_calls = 0

    def h(x: Tensor) -> Tensor:
        nonlocal n_calls
        n_calls += 1
        flat = x.flatten(1)
        lost = torch.arange(len(x)).unsqueeze(1) < (3 if n_calls > 1 else 0)
        return torch.where(lost, torch.nan, flat)

    found = dataclasses.replace(SHORT, starts=("zeros", "grey")).invert(
        h, X.flatten(1), shape=SHAPE
    )
    assert found.ending.tolist() == [Ending.LIMIT] * 3
    assert found.objective.isfinite().all()


def test_noise_is_drawn_anew_for_every_start_that_asks_for_it() -> None:
    seen: list[Tensor] = []

    def h(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x.flatten(1)

    method = StrongInversion(n_steps=1, starts=("noise", "noise", "zeros", "grey"))
    method.invert(h, X.flatten(1), shape=SHAPE, generators=generators(3))
    starts = seen[0].unflatten(0, (4, 3))
    assert not torch.equal(starts[0], starts[1])
    assert len({tuple(image.flatten().tolist()) for image in starts[:2].flatten(0, 1)}) == 6
    assert bool(((starts[:2] >= 0) & (starts[:2] <= 1)).all())
    assert torch.equal(starts[2], torch.zeros(3, *SHAPE, dtype=torch.float64))
    assert torch.equal(starts[3], torch.full((3, *SHAPE), 0.5, dtype=torch.float64))


def test_whitening_undoes_what_a_defence_does_to_the_scale() -> None:
    h = relu(40)

    def defended(x: Tensor) -> Tensor:
        return 0.003 * h(x) + 5.0

    strong, paper = StrongInversion(n_steps=100, zeta=0.01), GradientInversion(n_steps=100)
    found, plain = [], []
    for f in (h, defended):
        whitening = whiten(f(PUBLIC))
        found.append(
            strong.invert(f, f(X), shape=SHAPE, whitening=whitening, generators=generators(3))
        )
        plain.append(paper.invert(f, f(X), shape=SHAPE))
    torch.testing.assert_close(found[0].x, found[1].x, rtol=0, atol=1e-6)
    assert float((found[0].x - X).square().mean()) < 0.005
    assert float((plain[0].x - plain[1].x).abs().max()) > 0.1


def test_whitening_makes_spreads_equal() -> None:
    features = normal(500, 6) @ normal(6, 6, seed=1) + 3
    variance = features.var(0, correction=0)
    expected = ((variance + variance.mean()) / 2).rsqrt()
    torch.testing.assert_close(whiten(features), expected)
    dead = torch.cat([features, torch.ones(500, 1)], dim=1)
    assert whiten(dead).isfinite().all()
    assert torch.equal(whiten(torch.ones(3, 4)), torch.ones(4))


def test_errors_by_zeta_are_those_of_inversions() -> None:
    h, zetas = blurry(), (10.0, 0.0, 0.1, 1.0)
    public = PUBLIC[:12]
    method = dataclasses.replace(SHORT, n_steps=100)
    whitening = whiten(h(PUBLIC))
    errors = []
    for zeta in zetas:
        found = dataclasses.replace(method, zeta=zeta).invert(
            h, h(public), shape=SHAPE, generators=generators(12), whitening=whitening
        )
        errors.append(float((found.x - public).square().mean()))
    given = {"generators": generators(12), "whitening": whitening}
    measured = errors_by_zeta(method, h, public, zetas, **given)
    assert measured.tolist() == pytest.approx(errors)
    assert zetas[int(measured.argmin())] not in (0.0, 10.0)  # inside, so that it matters


def test_rows_keep_their_places() -> None:
    """So that h may be another network for every image."""
    gains = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    h = linear()

    def by_row(x: Tensor) -> Tensor:
        return h(x) * gains.repeat(len(x) // 3).unsqueeze(1)

    method = StrongInversion(zeta=0.0, n_steps=600)
    found = method.invert(by_row, by_row(X), shape=SHAPE, generators=generators(3))
    assert float((found.x - X).abs().max()) < 1e-4


def test_the_network_is_not_touched() -> None:
    layer = torch.nn.Linear(16, 8)
    z = layer(X.float().flatten(1))
    for method in (GradientInversion(n_steps=5), SHORT):
        for is_enabled in (True, False):
            with torch.set_grad_enabled(is_enabled):
                found = method.invert(
                    lambda x: layer(x.flatten(1)), z, shape=SHAPE, generators=generators(3)
                )
            assert not found.x.requires_grad
            assert not found.objective.requires_grad
            assert found.x.dtype == found.objective.dtype == torch.float32
    assert all(parameter.grad is None for parameter in layer.parameters())


H, Z = linear(), linear()(X)
WEIGHTS = torch.ones(16, dtype=torch.float64, requires_grad=True)
ONE_LOST = torch.where(torch.tensor([[False], [True], [False]]), torch.nan, Z)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"h": lambda x: H(x)[:, :5]}, "z has 16 features; h must give one row"),
    ({"h": lambda x: H(x).view(-1, 4, 4)}, "h must give one row"),
    ({"h": lambda x: (H(x),)}, "h gives tuple"),
    ({"h": lambda x: H(x) / 0}, r"features at the start, for images \[0, 1, 2\]"),
    ({"h": lambda x: H(x.detach())}, "without a gradient"),
    ({"h": lambda x: H(x.detach()) * WEIGHTS}, "without a gradient"),
    ({"z": ONE_LOST}, r"z has NaN or infinite features for images \[1\]"),
    ({"generators": generators(2)}, "one generator per image: 2 for 3"),
    ({"generators": ()}, "one generator per image: 0 for 3"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_fit_is_told(changes: dict[str, Any], message: str) -> None:
    right = {"h": H, "z": Z, "shape": SHAPE, "generators": generators(3), "starts": SHORT.starts}
    given = right | changes
    method = dataclasses.replace(SHORT, starts=given.pop("starts"))
    refuses(message, method.invert, given.pop("h"), given.pop("z"), **given)


def test_public_images_that_do_not_do_are_told() -> None:
    refuses("features of 1 public images", whiten, normal(1, 4))
    refuses("all of them finite", whiten, torch.full((3, 4), torch.nan))
    refuses("0 zetas and 80 public images", errors_by_zeta, SHORT, linear(), PUBLIC, ())
    refuses("1 zetas and 0 public images", errors_by_zeta, SHORT, linear(), PUBLIC[:0], (0.1,))
    with pytest.raises(ValueError, match=r"zeta=-0\.1"):
        errors_by_zeta(SHORT, linear(), PUBLIC[:2], (-0.1,), generators=generators(2))
