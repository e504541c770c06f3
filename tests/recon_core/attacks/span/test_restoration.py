"""Restoration inside the span: what is put back there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recon_core.attacks.span import search
from recon_core.attacks.span.restoration import in_span
from recon_core.attacks.span.rows import SpanRows
from recon_core.attacks.span.search import sources_for
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import subspace_of
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import photograph_tiles

N = 24


def _images() -> Tensor:
    return photograph_tiles(32, shrink=2)[:N].float() / 255


def _rows(images: Tensor, std: Tensor | float = 1.0) -> SpanRows:
    """A first layer that moved by random multiples of the images less their mean."""
    start = 0.01 * torch.randn(3 * N, 3072, generator=generator(0))
    mixing = torch.randn(3 * N, len(images), generator=generator(1))
    return SpanRows(start + mixing @ ((images - images.mean(0)) / std).flatten(1), start)


def test_what_is_projected_lies_in_the_span_and_stays_there() -> None:
    images = _images()
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
    images, std = _images(), torch.tensor([0.2, 0.25, 0.3])[:, None, None]
    known, unknown = (
        in_span(_rows(images, std), images.mean(0), std=given)[0] for given in (std, None)
    )
    assert known.share(images) == pytest.approx(1.0, abs=1e-4)
    assert unknown.share(images) < 0.999
    eye = torch.eye(len(known.directions))
    assert torch.allclose(known.directions @ known.directions.mT, eye, atol=1e-5)


def test_sources_that_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    images, shape = _images(), (3, 32, 32)
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
    images = _images()
    few = SpanAttack(start="known", n_images=5)
    allowed, span = in_span(_rows(images), images.mean(0), attack=few)
    assert allowed.directions.shape == (5, 3 * 32 * 32)
    assert span.n_signal > 5
