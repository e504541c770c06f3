"""Separators: the metric, mixtures, learning, the file, and where a network leads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recon_core.attacks.span.guided import SHORT_PATIENCE, _Search, joined, separated
from recon_core.attacks.span.learning import Mixtures, is_mirrored, learn, metric_of
from recon_core.attacks.span.search import SpanAttack, checked, searched
from recon_core.attacks.span.separation import OVER, rotation_start, whitening
from recon_core.attacks.span.separator import (
    METADATA,
    SHIPPED,
    STEEPEST,
    Card,
    Metric,
    Separator,
    build_network,
    packed,
    shipped_separator,
    unpacked,
)
from tests.recon_core.drawing import generator, refuses
from tests.recon_core.tiles import photograph_tiles


def _card(shape: tuple[int, int, int] = (1, 16, 16), **changed: object) -> Card:
    facts: dict[str, object] = {
        "shape": shape, "widths": (8, 12), "patch": 2, "centred": True,
        "mirrored": False, "shifted": 1, "floor": 1e-2, "source": "drawn", "n_pictures": 40,
        "sha256": "", "n_steps": 3, "alone": 0.0, "spread": 0.1,
        "separated": ((50, 40, 30), (200, 20, 30)),
    }  # fmt: skip
    return Card(**facts | changed)  # type: ignore[arg-type]


def _tiles(n: int, side: int = 16) -> Tensor:
    tiles = photograph_tiles(side, shrink=2).float() / 255
    return tiles[tiles.flatten(1).std(1) > 0.08][:n]


def _untrained(card: Card, pictures: Tensor) -> Separator:
    mixtures, net = Mixtures(pictures, card), build_network(card).requires_grad_(False)
    for tensor in net.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator(1)).mul_(0.1).half())
    return Separator(card, net, mixtures.metric, mixtures.mean)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("largest", [2048, 100])
def test_the_metric_whitens_pictures_and_bears_noise(
    mirrored: bool, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recon_core.attacks.span.learning.LARGEST_BLOCK", largest)
    x = _tiles(600)
    x = x - (x + x.flip(-1)).mean(0) / 2
    metric, flat = metric_of(x, floor=1e-3, mirrored=mirrored), x.flatten(1)
    white = metric.whitened(flat)
    before, after = (torch.linalg.svdvals(some.double())[:40] for some in (flat, white))
    assert float(after[0] / after[-1]) < 0.25 * float(before[0] / before[-1])
    if mirrored:
        turned = metric.whitened(x.flip(-1).flatten(1)).unflatten(1, x.shape[1:]).flip(-1)
        assert torch.allclose(turned.flatten(1), white, atol=1e-2)
    noisy = flat + 0.5 * metric.variance**0.5 * torch.randn(flat.shape, generator=generator(2))
    size = float(metric.noisy(0.5).whitened(noisy).square().mean())
    assert size == pytest.approx(1, abs=0.15)
    assert float(metric.whitened(noisy).square().mean()) > 3 * size


def test_detail_that_public_pictures_lack_is_borne_by_the_metric() -> None:
    """Smooth pictures make a metric that noisy ones fit with more noise than others like them."""
    x = torch.nn.functional.interpolate(_tiles(240)[:, :1], size=24, mode="bicubic")
    separator = _untrained(_card((1, 24, 24), floor=1e-4), x[:150])
    own, metric = x[150:].flatten(1) - separator.mean, separator.metric
    detail = 0.05 * metric.variance**0.5 * torch.randn(own.shape, generator=generator(4))
    fitted = separator.fitted(own + detail).metric
    assert float(fitted.own.mean()) > 2 * float(separator.fitted(own).metric.own.mean())
    again = Metric.of(fitted.shape, fitted.own, metric.factors)  # without the short cut
    grams = [white @ white.mT for white in (fitted.whitened(own), again.whitened(own))]
    assert float((grams[0] - grams[1]).norm() / grams[0].norm()) < 1e-2


def test_mirroring_is_told_from_the_pictures() -> None:
    x = _tiles(300)
    assert is_mirrored(x)
    assert not is_mirrored(x * torch.linspace(0.2, 1, 16))  # all lit from the right


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([(1, 16, 16), (3, 20, 18), (1, 28, 28), (3, 17, 23)]),
    st.sampled_from([(8,), (8, 12), (4, 8, 12)]),
    st.integers(1, 2),
)
def test_networks_of_any_shape_answer_in_it(
    shape: tuple[int, int, int], widths: tuple[int, ...], patch: int
) -> None:
    net = build_network(_card(shape, widths=widths, patch=patch))
    x = torch.randn(2, 2 * shape[0], *shape[1:], generator=generator(1))
    assert net(x, torch.zeros(2), torch.zeros(2, 0)).shape == (2, shape[0] + 1, *shape[1:])


def test_mixtures_have_their_shares() -> None:
    x = _tiles(60)
    mixtures = Mixtures(x, card := _card((3, 16, 16)))
    for _ in range(20):
        y, shown, interference, product = mixtures.draw(8)
        assert torch.allclose(y.square().mean(1), torch.ones(8), atol=1e-4)
        assert float(interference.square().mean(1).max()) < 1.6
        assert bool(((product > 0.09) & (product <= 0.5 + 1e-6)).all())
        seen = mixtures.metric.whitened(shown)
        alike = (seen * y).mean(1) / seen.square().mean(1).sqrt()
        assert torch.allclose(alike, torch.ones(8), atol=1e-3)
    moved = Mixtures(x, replace(card, mirrored=True)).maps
    assert len(moved.unique(dim=0)) == 2 * 9
    assert torch.equal(x[:1].flatten(1)[:, moved[9]], x[:1].flip(-1).flatten(1))


def _squares(n: int, seed: int) -> Tensor:
    """Pictures 1x16x16 of three bright squares."""
    drawn = generator(seed)
    rows, columns = (torch.randint(13, (n, 3), generator=drawn) for _ in range(2))
    x = torch.zeros(n, 1, 16, 16)
    for i, j in ((a, b) for a in range(3) for b in range(3)):
        for square in range(3):
            x[torch.arange(n), 0, rows[:, square] + i, columns[:, square] + j] = 1
    return x


def test_learning_lowers_the_loss_on_other_pictures() -> None:
    """To less than half of what it was; every weight moves; a seed gives the same network."""
    card = _card(widths=(16, 16), patch=2, n_steps=120, shifted=0, centred=False)
    mixtures = Mixtures(_squares(1500, 1), card)
    learned = learn(mixtures, card, batch=32)
    other = Mixtures(_squares(500, 2), card, seed=5)
    other.metric = mixtures.metric
    y, shown, wanted, product = other.draw(100)
    untrained = _untrained(card, _squares(1500, 1))
    before, after = (
        float(((one.interference(y, shown) - wanted) / product).square().mean())
        for one in (untrained, learned)
    )
    assert after < 0.5 * before
    short = replace(card, n_steps=2)
    made = (untrained, *(learn(Mixtures(_squares(300, 1), short), short, batch=8) for _ in "ab"))
    was, now, same = (torch.cat([p.flatten() for p in s.network.parameters()]) for s in made)
    assert torch.equal(now, same)
    assert (was != now).float().mean() > 0.99


@pytest.mark.parametrize("rank", [40, 256])
def test_a_packed_separator_is_the_separator(rank: int) -> None:
    x = _tiles(300)[:, :1]
    made = _untrained(_card(), x)
    metric = made.metric
    metric = replace(metric, axes=metric.axes[..., -rank:], values=metric.values[:, -rank:])
    made = replace(made, metric=metric)
    tensors, metadata = packed(made)
    assert ("factors" in tensors) == (rank == 40)
    again = unpacked(tensors, metadata)
    assert again.card == made.card
    white = metric.whitened(x.flatten(1))
    gram, same = white @ white.mT, again.metric.whitened(x.flatten(1))
    assert float((same @ same.mT - gram).norm() / gram.norm()) < 0.02
    y = white / white.square().mean(1, keepdim=True).sqrt()
    answers = [one.interference(y, x.flatten(1)) for one in (made, again)]
    assert torch.allclose(*answers, atol=1e-4)


def test_a_file_that_is_not_what_its_card_says() -> None:
    tensors, metadata = packed(_untrained(_card(), _tiles(300)[:, :1]))
    card = json.loads(metadata[METADATA])

    def refused(why: str, tensors: dict[str, Tensor] = tensors, **changed: object) -> None:
        told = {METADATA: json.dumps(card | changed)}
        with pytest.raises(ValueError, match=why) as refusal:
            unpacked(tensors, told)
        assert "\n" not in str(refusal.value)

    refuses("it is no separator", unpacked, tensors, {})
    refused("a metric of 256 numbers", shape=[1, 20, 20])
    refused("separators are for pictures", shape=[1, 200, 200])
    refused("size mismatch|Error", widths=[8, 16])
    refused("unknown entries", better=1)
    refused("Error.* in loading state_dict for UNet", widths=[])
    refused("not finite", tensors | {"own": tensors["own"] / 0})
    refused("is of no part", tensors | {"more": tensors["own"]})
    refused("mean", {name: t for name, t in tensors.items() if name != "mean"})
    refuses("do not agree", unpacked, tensors, {METADATA: "{"})


def test_cards_tell_whether_a_network_is_better() -> None:
    card = _card()
    assert card.beats_filters(60)
    assert not card.beats_filters(300)
    assert not replace(card, separated=()).beats_filters(60)


class _Knows(nn.Module):
    """Knows the images: what of a picture is not the nearest of them is interference."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images / images.square().mean(1, keepdim=True).sqrt()

    def forward(self, both: Tensor, _noise: Tensor, _labels: Tensor) -> Tensor:
        assert len(both)
        c, h, w = both.shape[1] // 2, *both.shape[2:]
        y = both[:, c:].flatten(1)
        alike = y @ self.images.mT / y.shape[1]
        target = alike.gather(1, alike.abs().argmax(1)[:, None])
        target = target * self.images[alike.abs().argmax(1)]
        share = (1 - alike.abs().amax(1).square()).clamp(1e-4, 1 - 1e-4)[:, None]
        told = ((y - target) - share * y) / (share * (1 - share)).sqrt()
        logit = (share / (1 - share)).log() / STEEPEST
        return torch.cat([told, logit.expand(-1, h * w)], 1).view(-1, c + 1, h, w)


def test_who_knows_the_interference_takes_a_span_apart() -> None:
    """From random rotations, of a span alone and of two at once, and it ends early."""
    x = torch.randn(2, 12, 256, generator=generator(3))
    white = Metric((1, 16, 16), torch.ones(1, 256), torch.eye(256)[None], torch.zeros(1, 256))
    for rows in (slice(0, 1), slice(1, 2), slice(0, 2)):
        knows = _Knows(x[rows].flatten(0, 1))
        separator = Separator(_card(), knows, white, torch.zeros(256))
        z = torch.stack([whitening(some) @ some for some in x[rows]])
        own, heard = [generator(9) for _ in z], list[int]()
        ended = separated(separator, z, own, n_iterations=200, report=heard.append)
        assert ended.settled
        assert SHORT_PATIENCE + OVER < ended.n_iterations < 150
        assert heard == list(range(1, ended.n_iterations + 1))
        for sources, images in zip(ended.w @ z, x[rows], strict=True):
            alike = torch.corrcoef(torch.cat([sources, images]))[:12, 12:].abs()
            assert float(alike.amax(0).min()) > 0.999
        assert float(ended.sparsity.sum(1).min()) > -0.3
    assert not separated(separator, z, own, n_iterations=3).settled


def test_searches_go_on_until_sources_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three rotations later searches find what the first missed, also beside a victim whose
    images the network does not know."""
    x = torch.randn(2, 30, 256, generator=generator(4))
    white = Metric((1, 16, 16), torch.ones(1, 256), torch.eye(256)[None], torch.zeros(1, 256))
    knows = _Knows(x[0])
    separator = Separator(_card(alone=0.005), knows, white, torch.zeros(256))
    z = torch.stack([whitening(some) @ some for some in x])
    monkeypatch.setattr("recon_core.attacks.span.guided.N_FREE", 4)

    def right(n_searches: int, own: Tensor) -> int:
        monkeypatch.setattr("recon_core.attacks.span.guided.N_SEARCHES", n_searches)
        ended = separated(separator, own, [generator(i) for i in range(len(own))], n_iterations=3)
        alike = torch.corrcoef(torch.cat([(ended.w @ own)[0], x[0]]))[:30, 30:].abs()
        return int((alike.amax(0) > 0.99).sum())

    assert right(1, z[:1]) < 30
    assert right(12, z[:1]) == right(12, z) == 30


def test_biases_tell_images_from_their_sum_and_difference() -> None:
    """A network that knows these as images does not: without biases they stay, and images do."""
    x = torch.randn(20, 256, generator=generator(5)).pow(3)  # sparse, as images are
    white = Metric((1, 16, 16), torch.ones(1, 256), torch.eye(256)[None], torch.zeros(1, 256))
    knows = _Knows(torch.cat([x, x[:1] + x[1:2], x[:1] - x[1:2]]))
    separator = Separator(_card(spread=0.6), knows, white, torch.zeros(256))
    ones, right, mixed = torch.ones(1, 20), torch.eye(20), torch.eye(20)
    mixed[:2, :2] = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    for last, w, wanted in ((None, mixed, mixed), (ones, mixed, right), (ones, right, right)):
        search = _Search(separator, x[None], x[None], last, report=lambda _n: None)
        turned = torch.nn.functional.normalize(search.turned(w[None])[0].abs(), dim=1)
        turned = turned[turned.argmax(1).argsort()]
        torch.testing.assert_close(turned, wanted.abs(), rtol=0, atol=0.2)


def test_rows_are_joined_by_what_is_new_in_them() -> None:
    rows = torch.tensor([[2.0, 0, 0, 0], [1, 0.1, 0, 0], [1, 1, 0, 0], [-1, -3, 0, 0]])
    found = joined(rows, generator(0))
    torch.testing.assert_close(
        found[:2], torch.tensor([[1.0, 0, 0, 0], [0.5**0.5, 0.5**0.5, 0, 0]])
    )
    torch.testing.assert_close(found[2:] @ found[2:].mT, torch.eye(2))
    assert float((found[2:] @ found[:2].mT).abs().max()) < 1e-6


def _strokes(n: int) -> Tensor:
    """Pictures 1x28x28 of three joined strokes of a pen."""
    drawn, grid = (
        generator(0),
        torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij"),
    )
    pictures = torch.zeros(n, 1, 28, 28)
    for picture in pictures[:, 0]:
        corners = 6 + 16 * torch.rand(4, 2, generator=drawn)
        for (i, j), (down, right) in zip(corners, corners.diff(dim=0), strict=False):
            along = (grid[0] - i) * down + (grid[1] - j) * right
            along = (along / (down**2 + right**2)).clamp(0, 1)
            away = torch.hypot(grid[0] - i - along * down, grid[1] - j - along * right)
            picture.copy_(torch.maximum(picture, (2.2 - away).clamp(0, 1)))
    return pictures


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_separator_takes_apart_what_it_never_saw(name: str) -> None:
    """Tiles of photographs, or strokes, from a random rotation."""
    separator = shipped_separator(name)
    assert separator is shipped_separator(name)
    pictures = _tiles(30, 32) if name == "cifar" else _strokes(20)
    x = pictures.flatten(1) - separator.mean * separator.card.centred
    directions = torch.linalg.qr(x.mT).Q.mT.unflatten(1, separator.card.shape)
    flat = directions.flatten(1)
    begun = rotation_start(len(x), generator(1)).float() @ flat
    attack = SpanAttack(sources="network", n_network=60)
    ended = searched(attack, directions[None], separator, [generator(1)]).w[0] @ flat
    before, after = (
        torch.corrcoef(torch.cat([some, x]))[: len(x), len(x) :].abs().amax(0)
        for some in (begun, ended)
    )
    assert float(before.median()) < 0.75
    assert float(after.median()) > 0.9


def test_what_a_separator_is_not_for_is_refused() -> None:
    made = _untrained(_card(), _tiles(300)[:, :1])
    with pytest.raises(ValueError, match="knows images of 1x16x16, and not of 3x16x16"):
        checked(SpanAttack(sources="network"), 4, (3, 16, 16), made)
    refuses("separator='faces': the package has", shipped_separator, "faces")
    refuses("n_network=0", replace, SpanAttack(), n_network=0)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Bfloat16 there moves the interference by little."""
    x = _tiles(40, 32).flatten(1)
    here = shipped_separator("cifar")
    there = here.to(torch.device("cuda"))
    seen = here.metric.whitened(x)
    y = seen / seen.square().mean(1, keepdim=True).sqrt()
    a = here.interference(y, x)
    b = there.interference(y.cuda(), x.cuda()).cpu()
    assert float((a - b).norm() / a.norm()) < 0.05
