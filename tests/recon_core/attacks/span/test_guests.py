"""The network that knows a picture's guests: its metric, its file, and where it leads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.span.guests import Mixtures, learn, losses, main
from recon_core.attacks.span import guests
from recon_core.attacks.span.features import whitened
from recon_core.attacks.span.guests import (
    N_FREED,
    OPERATIONS,
    PATIENCE,
    GuestModel,
    apart,
    build_network,
    covariances,
    guests_of,
    in_blocks,
    packed,
    roots,
    shipped_guests,
    unpacked,
)
from recon_core.attacks.span.search import views_of
from recon_core.attacks.span.separation import rotation_start
from recon_core.attacks.span.settings import SpanAttack
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import photograph_tiles

CPU = torch.device("cpu")


def _pictures(n: int) -> Tensor:
    tiles = photograph_tiles(32, shrink=2)[:n].float() / 255
    return (tiles - tiles.mean(0)).flatten(1)


def test_the_metric_whitens_and_mirrors() -> None:
    """Pictures and their mirror images have the covariance that was taken apart by parity."""
    x = _pictures(40)
    both = torch.cat([x, x.unflatten(1, guests.SHAPE).flip(-1).flatten(1)])
    covariance = covariances(x)
    there = in_blocks(both, roots(covariance, -0.5))
    back = in_blocks(there, roots(covariance, 0.5))
    assert torch.allclose(back, both, atol=1e-3)
    assert torch.allclose(covariances(both), covariance, rtol=1e-3, atol=1e-6)
    gram = (both.double() @ both.double().mT) / 3072
    white = (there.double() @ there.double().mT) / 3072
    assert _spread(white) < 0.1 * _spread(gram)
    mirrored = in_blocks(x.unflatten(1, guests.SHAPE).flip(-1).flatten(1), roots(covariance, -0.5))
    assert torch.allclose(mirrored, there[40:], atol=1e-3)


def _spread(gram: Tensor) -> float:
    """Largest over median eigenvalue."""
    values = torch.linalg.eigvalsh(gram)[-20:]
    return float(values[-1] / values.median())


def test_a_packed_model_is_the_model() -> None:
    net = build_network(generator(1))
    for parameter in net.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator(2))
    net = net.half().float().eval()
    x = _pictures(30)
    covariance = covariances(x)
    model = GuestModel(net, roots(covariance, -0.5))
    again = unpacked(packed(net, covariance))
    seen = again.whitened(x)
    assert float((seen - model.whitened(x)).norm() / seen.norm()) < 0.15  # 30 pictures, in half
    y = seen / seen.square().mean(1, keepdim=True).sqrt()
    assert torch.allclose(again.guests(y, x), guests_of(net, y, x), atol=1e-4)
    assert again.guests(y.double(), x.double()).dtype == torch.float64


def test_what_the_network_costs() -> None:
    x = torch.randn(2, 3072, generator=generator(1))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        guests_of(build_network(generator(0)), x, x)
    assert counted.get_total_flops() / 2 == pytest.approx(OPERATIONS, rel=0.02)


class _Knows(nn.Module):
    """Knows the images themselves: what of the picture is not the nearest of them is its guests."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images / images.square().mean(1, keepdim=True).sqrt()

    def forward(self, both: Tensor, _noise: Tensor, _labels: Tensor) -> Tensor:
        y = both[:, 3:].flatten(1)
        alike = y @ self.images.mT / y.shape[1]
        best = alike.abs().argmax(1)
        host = alike.gather(1, best[:, None]) * self.images[best]
        share = (1 - alike.abs().amax(1).square()).clamp(1e-4, 1 - 1e-4)[:, None]
        said = ((y - host) - share * y) / (share * (1 - share)).sqrt()
        logit = (share / (1 - share)).log() / guests.STEEPEST
        return torch.cat([said, logit.expand(-1, 1024)], 1).view(-1, 4, 32, 32)


def test_who_knows_the_guests_takes_a_span_apart() -> None:
    """From random rotations, of a span alone and of two at once, and it ends early."""
    x = torch.randn(2, 12, 3072, generator=generator(3))
    white = torch.stack([torch.eye(1536)] * 2)
    for rows in (slice(0, 1), slice(1, 2), slice(0, 2)):
        model = GuestModel(_Knows(x[rows].flatten(0, 1)), white)
        z = torch.stack([whitened(some)[1] @ some for some in x[rows]])
        starts = torch.stack([rotation_start(12, generator(9)).float() for _ in z])
        heard: list[int] = []
        ended = apart(model, z, starts, n_iterations=200, report=heard.append)
        assert ended.settled
        assert PATIENCE + N_FREED < ended.n_iterations < 150
        assert heard == list(range(1, ended.n_iterations + 1))
        for sources, images in zip(ended.sources, x[rows], strict=True):
            alike = torch.corrcoef(torch.cat([sources, images]))[:12, 12:].abs()
            assert float(alike.amax(0).min()) > 0.999
        assert float(ended.objective.max()) < 0.1
    assert not apart(model, z, starts, n_iterations=3).settled


def test_the_shipped_network_takes_photographs_apart() -> None:
    """Tiles of photographs, which it never saw, from a random rotation."""
    x = _pictures(40)
    directions = torch.linalg.svd(x.double(), full_matrices=False)[2][:39].float()
    attack = SpanAttack(start="known", sources="network")
    views = views_of(attack, directions.unflatten(1, guests.SHAPE)[None])
    model = shipped_guests(CPU)
    assert model is shipped_guests(CPU)
    start = rotation_start(39, generator(1)).float()[None]

    def nearest(sources: Tensor) -> Tensor:
        return torch.corrcoef(torch.cat([sources, x]))[:39, 39:].abs().amax(0)

    before = nearest((start @ views.z)[0])
    ended = apart(model, views.z, start, n_iterations=60)
    after = nearest(ended.sources[0])
    assert float(before.median()) < 0.65
    assert float(after.median()) > 0.9
    features = views.features(ended.sources)
    assert features.shape == (1, 39, 189 * 81)
    with pytest.raises(
        ValueError, match=r"sources='network' knows images of 3x32x32, and not of 3"
    ):
        views_of(attack, torch.zeros(1, 4, 3, 16, 16))


def test_a_model_of_photographs_is_learned_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "SIZE", "tiny")
    out = tmp_path / "model.npz"
    words = ["--images", "photos", "--steps", "2", "--device", "cpu", "--batch", "4"]
    main([*words, "--out", str(out)])
    with np.load(out, allow_pickle=False) as arrays:
        model = unpacked(dict(arrays))
    x = _pictures(4)
    assert torch.isfinite(model.guests(model.whitened(x), x)).all()


def test_learning_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "SIZE", "tiny")
    x = _pictures(60)
    mixtures = Mixtures.of(x, covariances(x))
    y, mixed, scale = mixtures.draw(8, 20)
    assert torch.allclose(y.square().mean(1), torch.ones(8), atol=1e-5)
    assert scale.shape == (8, 1)
    assert bool((mixed.square().mean(1) < 1.5).all())
    untrained = losses(build_network(generator(0)).eval(), mixtures)
    trained = losses(learn(mixtures, n_steps=60, batch=16, n_guests=20).eval(), mixtures)
    assert min(untrained.values()) > 0.9
    assert trained[0.7] < untrained[0.7]


def test_a_setting_that_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="n_fine=9 goes on with the model of images of sources='l"):
        SpanAttack(sources="network", n_fine=9)
    with pytest.raises(ValueError, match="n_network=0"):
        replace(SpanAttack(), n_network=0)
    assert SpanAttack(sources="network", n_network=50).n_iterations == 50 + N_FREED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Bfloat16 there moves the guests by little, and finds the same pictures."""
    x = _pictures(40)
    model, theirs = shipped_guests(CPU), shipped_guests(torch.device("cuda"))
    seen = model.whitened(x)
    y = seen / seen.square().mean(1, keepdim=True).sqrt()
    here, there = model.guests(y, x), theirs.guests(y.cuda(), x.cuda()).cpu()
    assert float((here - there).norm() / here.norm()) < 0.05
    z = (whitened(seen)[1] @ x)[None]
    start = rotation_start(40, generator(1)).float()[None]
    ended = apart(theirs, z.cuda(), start.cuda(), n_iterations=60)
    alike = torch.corrcoef(torch.cat([ended.sources[0].cpu(), x]))[:40, 40:].abs()
    assert float(alike.amax(0).median()) > 0.9
