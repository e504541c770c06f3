"""The whole attack on small victims and restoration inside the span: what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.span import attack as attack_module
from recon_core.attacks.span import search
from recon_core.attacks.span.attack import Separated, SpanAttack, in_span, separate
from recon_core.attacks.span.learning import Mixtures
from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.attacks.span.search import sources_for
from recon_core.attacks.span.separation import Descent, rotation_start
from recon_core.attacks.span.separator import Card, Separator, build_network
from recon_core.attacks.span.subspace import subspace_of
from recon_core.victims.network import Architecture, Conv, Network, Parameters
from tests.recon_core.drawing import generator, normal
from tests.recon_core.tiles import photograph_tiles

N, WIDTH, SIDE = 10, 40, 16
QUICK = SpanAttack(n_independent=100, surplus=0.0, overcomplete=1.0)


def _images(seed: int = 0, *, centred: bool = True) -> Tensor:
    tiles = photograph_tiles(SIDE, shrink=2)
    rows = torch.randperm(len(tiles), generator=generator(seed))[:N]
    images = tiles[rows].double().flatten(1) / 255
    return images - images.mean(0) if centred else images - 0.5


def _network(**settings: Any) -> Architecture:
    return Network(widths=(WIDTH, WIDTH), **settings).on((3, SIDE, SIDE))


def _victim(x: Tensor, architecture: Architecture, seed: int) -> tuple[Parameters, Parameters]:
    """(weights, start): W_0 + M X with M as the KKT condition has it at the images x."""
    start = architecture.initial([generator(seed)], dtype=torch.float64)
    first, lam = start.weights[0][0], 0.5 + normal(len(x), seed=seed).sigmoid()
    lam[::2] *= -1
    for _ in range(3):  # the pattern of activity that the weights themselves have
        weights = (first[None], *start.weights[1:])
        passed = architecture.forward(replace(start, weights=weights), x[None])
        back = (start.weights[2][0] * (passed.pre[1][0] > 0)) @ start.weights[1][0]
        mixing = ((passed.pre[0][0] > 0) * back * lam[:, None]).mT
        first = start.weights[0][0] + mixing @ x
    bias = start.biases[0]
    if bias is not None:
        bias = bias + mixing.sum(1)
    weights = (first[None], *start.weights[1:])
    return Parameters(weights, (bias, *start.biases[1:])), start


def _separated(
    attack: SpanAttack,
    architecture: Architecture,
    victim: Parameters,
    start: Parameters | None = None,
) -> Separated:
    rows = [weight_rows(victim, start)]
    return separate(attack, architecture, victim, [generator(0)], rows=rows)[0]


def _signed(found: Separated, x: Tensor) -> Tensor:
    """Each image's correlation with the source that is most like it, sign included."""
    n = len(found.sources.x)
    table = torch.corrcoef(torch.cat([found.sources.x, x]))[:n, n:]
    return table.gather(0, table.abs().argmax(0, keepdim=True))[0]


@pytest.mark.parametrize("known", [False, True])
def test_images_come_back_from_a_first_layer(known: bool) -> None:
    architecture, x = _network(), _images()
    victim, start = _victim(x, architecture, seed=1)
    attack = replace(QUICK, start="known" if known else "unknown")
    found = _separated(attack, architecture, victim, start if known else None)
    assert found.subspace.n_signal == N - 1  # the mean is missing
    assert int((_signed(found, x).abs() > 0.8).sum()) >= N - 2
    trust = found.sources.trust
    assert torch.equal(trust, trust.sort(descending=True).values)


@pytest.mark.parametrize(("bias", "released"), [("none", 0), ("first", 0), ("none", 0.03)])
def test_sources_are_denoised_where_the_start_or_what_was_added_to_weights_is_noise(
    bias: str, released: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, x = _network(bias=bias, init_std_first=0.03), _images()
    victim, start = _victim(x, architecture, seed=1)
    first, *others = victim.weights
    noisy = replace(victim, weights=(first + released * normal(*first.shape, seed=5), *others))
    attack = replace(QUICK, start="known" if released else "unknown")

    def both() -> tuple[Separated, Separated]:
        known = _separated(replace(QUICK, start="known"), architecture, victim, start)
        return _separated(attack, architecture, noisy, start if released else None), known

    unknown, known = both()
    assert not unknown.subspace.ends_sharply
    monkeypatch.setattr("recon_core.attacks.span.sources.denoised", lambda x, *_, **_named: x)
    noisy_sources, same = both()
    assert torch.equal(known.sources.x, same.sources.x)
    gain = _signed(unknown, x).abs() - _signed(noisy_sources, x).abs()
    assert float(gain.mean()) > 0.005
    assert unknown.objective == noisy_sources.objective


def test_biases_settle_sign_and_scale() -> None:
    architecture, x = _network(bias="first", init_std_first=1e-6), _images(centred=False)
    victim, start = _victim(x, architecture, seed=1)
    found = _separated(replace(QUICK, start="known"), architecture, victim, start)
    assert found.subspace.n_signal == N  # (x, 1) keep the mean
    signed = _signed(found, x)
    right = signed.abs() > 0.9
    assert int(right.sum()) >= N - 2
    assert bool((signed[right] > 0).all())
    like = torch.corrcoef(torch.cat([found.sources.x, x]))[:N, N:].abs()
    sizes = found.sources.x[like.argmax(0)].norm(dim=1) / x.norm(dim=1)
    assert float(sizes[right].median()) == pytest.approx(1.0, rel=0.2)


def test_rotating_and_scaling_the_neurons_changes_nothing() -> None:
    """The rows of W enter by their span alone; only signs and labels look at the network."""
    architecture, x = _network(), _images()
    victim, start = _victim(x, architecture, seed=1)
    turn = torch.linalg.qr(normal(WIDTH, WIDTH, seed=3))[0]
    moved, begun = (
        replace(p, weights=(3.0 * turn @ p.weights[0], *p.weights[1:])) for p in (victim, start)
    )
    attack = replace(QUICK, start="known")
    one = _separated(attack, architecture, victim, start)
    other = _separated(attack, architecture, moved, begun)
    like = torch.corrcoef(torch.cat([one.sources.x, other.sources.x]))[: N - 1, N - 1 :].abs()
    assert bool((like.amax(1) > 0.999).all())


def test_a_victim_is_separated_alike_whatever_it_is_batched_with() -> None:
    architecture = _network()
    victims = [_victim(_images(seed), architecture, seed)[0] for seed in (1, 2)]
    pairs = zip(*(v.tensors() for v in victims), strict=True)
    both = victims[0].like([torch.cat(pair) for pair in pairs])
    together = separate(QUICK, architecture, both, [generator(0), generator(1)])
    for r, victim in enumerate(victims):
        (alone,) = separate(QUICK, architecture, victim, [generator(r)])
        assert torch.equal(alone.sources.x, together[r].sources.x)
        assert torch.equal(alone.sources.label, together[r].sources.label)
        assert alone.objective == together[r].objective


def test_a_frame_has_more_sources_than_directions_and_every_image_among_them() -> None:
    architecture, x = _network(init_std_first=0.01), _images()
    victim, start = _victim(x, architecture, seed=1)
    attack = replace(QUICK, overcomplete=3.0)
    reported: list[float] = []
    (separated,) = separate(attack, architecture, victim, [generator(0)], progress=reported.append)
    found = separated.sources
    assert not separated.subspace.ends_sharply
    assert len(found.x) == 3 * len(separated.subspace.vectors) == 3 * (N - 1)
    assert reported == sorted(reported)
    assert reported[-1] == 1.0
    assert int((_signed(separated, x).abs() > 0.8).sum()) >= N - 2
    like = torch.corrcoef(torch.cat([found.x, x]))[: len(found.x), len(found.x) :].abs()
    assert int((like[: 2 * N].amax(0) > 0.8).sum()) >= N - 2  # images are the sparsest
    sharp = _separated(replace(attack, start="known"), architecture, victim, start)
    assert sharp.subspace.ends_sharply
    assert len(sharp.sources.x) == len(sharp.subspace.vectors)


def test_what_does_not_fit_is_refused() -> None:
    architecture = _network()
    victim, start = _victim(_images(), architecture, seed=1)
    conv = Network(widths=(WIDTH,), conv=Conv()).on((3, SIDE, SIDE))
    digits = replace(QUICK, sources="network", separator="digits")
    for attack, of, begun, message in (
        (replace(QUICK, start="known"), architecture, None, "start='known' with rows .* without a"),
        (QUICK, architecture, start, "start='unknown' with rows of weights less a start"),
        (replace(QUICK, sources="network"), architecture, None, "other shapes, and not of 3x16x16"),
        (digits, architecture, None, "knows images of 1x28x28, and not of 3x16x16"),
        (QUICK, conv, None, r"convolution .*attack.kind=kkt"),
    ):
        with pytest.raises(ValueError, match=message):
            _separated(attack, of, victim, begun)


def test_a_network_searches_twice_where_noise_hides_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a metric that bears noise, and the best trusted of both searches come first."""
    architecture = _network(init_std_first=0.01)
    tiles = photograph_tiles(SIDE, shrink=2).float() / 255
    victim, _start = _victim(_images(), architecture, seed=1)
    victim = victim.like([t.float() for t in victim.tensors()])
    card = Card(
        shape=(3, SIDE, SIDE), widths=(8,), patch=2, centred=True, mirrored=False, shifted=0,
        floor=1e-2, source="tiles", n_pictures=len(tiles), sha256="", n_steps=0, alone=0.0,
        spread=1.0,
    )  # fmt: skip
    mixtures, noise = Mixtures(tiles, card), list[float]()
    separator = Separator(card, build_network(card), mixtures.metric, mixtures.mean)

    def separated(
        separator: Separator, z: Tensor, own: Any, _n: int, _report: Any, *, ones: None
    ) -> Descent:
        noise.append(separator.noise)
        w = rotation_start(z.shape[1], own[0]).to(z)[None]
        return Descent(w, torch.arange(float(z.shape[1]))[None], 5, True)

    monkeypatch.setattr("recon_core.attacks.span.search.separated", separated)
    attack = replace(QUICK, sources="network", overcomplete=2.0)
    own = [generator(0)]
    (found,) = separate(attack, architecture, victim, own, separator=separator)
    assert noise == [attack_module.HIDDEN] * 2
    assert found.n_iterations == 10
    assert len(found.sources.x) == 2 * len(found.subspace.vectors)
    assert found.sources.trust.tolist() == sorted(found.sources.trust.tolist(), reverse=True)
    assert float((found.sources.x[0] - found.sources.x[1]).norm()) > 0


N_PHOTOGRAPHS = 24


def _photographs() -> Tensor:
    return photograph_tiles(32, shrink=2)[:N_PHOTOGRAPHS].float() / 255


def _rows(images: Tensor, std: Tensor | float = 1.0) -> SpanRows:
    """A first layer that moved by random multiples of the images less their mean."""
    start = 0.01 * torch.randn(3 * N_PHOTOGRAPHS, 3072, generator=generator(0))
    mixing = torch.randn(3 * N_PHOTOGRAPHS, len(images), generator=generator(1))
    return SpanRows(start + mixing @ ((images - images.mean(0)) / std).flatten(1), start)


def test_what_is_projected_lies_in_the_span_and_stays_there() -> None:
    images = _photographs()
    allowed, _span = in_span(_rows(images), images.mean(0))
    assert allowed.share(images) == pytest.approx(1.0, abs=1e-4)
    assert torch.allclose(allowed.nearest(images), images, atol=1e-4)
    noisy = images + 0.1 * torch.randn(images.shape, generator=generator(2))
    assert allowed.share(noisy) < 0.95
    once = allowed.nearest(noisy)
    assert allowed.share(once) == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(allowed.nearest(once), once, atol=1e-5)
    stack = torch.stack([images, noisy])
    assert torch.allclose(allowed.nearest(stack)[1], once, atol=1e-6)
    assert allowed.share(images.mean(0)[None]) == 0.0


def test_a_networks_own_scale_of_channels_is_taken_off() -> None:
    images, std = _photographs(), torch.tensor([0.2, 0.25, 0.3])[:, None, None]
    known, unknown = (
        in_span(_rows(images, std), images.mean(0), std=given)[0] for given in (std, None)
    )
    assert known.share(images) == pytest.approx(1.0, abs=1e-4)
    assert unknown.share(images) < 0.999
    eye = torch.eye(len(known.directions))
    assert torch.allclose(known.directions @ known.directions.mT, eye, atol=1e-5)


def test_sources_that_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    images, shape = _photographs(), (3, 32, 32)
    frame = SpanAttack(start="known", overcomplete=2.0)
    blurred = subspace_of(torch.randn(40, 3072, generator=generator(9)), n_directions=9)
    decided = sources_for(frame, blurred, shape)  # a span without an end
    assert (decided.sources, decided.overcomplete) == ("independent", 2.0)
    mixing = torch.randn(40, len(images), generator=generator(9))
    sharp = subspace_of(mixing @ (images - images.mean(0)).flatten(1))
    assert sharp.ends_sharply
    for fewest, sources in ((23, "network"), (24, "independent")):
        monkeypatch.setattr(search, "FEWEST", fewest)
        counted = SpanAttack(source="state", n_images=23, overcomplete=2.0)
        state = subspace_of(torch.randn(40, 3072, generator=generator(9)), n_directions=23)
        for attack, span in ((frame, sharp), (counted, state)):
            decided = sources_for(attack, span, shape)
            assert (decided.sources, decided.overcomplete) == (sources, 1.0)
    monkeypatch.setattr(search, "FEWEST", 9)
    for most, sources in ((9, "network"), (8, "independent")):
        monkeypatch.setattr(search, "MOST", most)
        decided = sources_for(frame, blurred, shape)
        assert (decided.sources, decided.overcomplete) == (sources, 2.0)


def test_an_attack_says_how_many_directions_a_span_has() -> None:
    images = _photographs()
    few = SpanAttack(start="known", n_images=5)
    allowed, span = in_span(_rows(images), images.mean(0), attack=few)
    assert allowed.directions.shape == (5, 3 * 32 * 32)
    assert span.n_signal > 5
