"""What is said before the span attack: planted first layers, one finding at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recon_core.attacks.span.preflight import span_preflight
from recon_core.attacks.span.rows import SpanRows
from recon_core.attacks.span.search import SpanAttack
from recon_core.victims.network import Architecture, Conv, Network, Parameters
from recon_core.victims.preflight import Finding, Preflight
from tests.recon_core.drawing import generator, normal

SHAPE, WIDTH, D = (3, 12, 12), 40, 432


def architecture(bias: str = "none") -> Architecture:
    return Network(widths=(WIDTH, 10), bias=bias).on(SHAPE)  # type: ignore[arg-type]


def network(first: Tensor, bias: str = "none") -> Parameters:
    """A network with this first layer."""
    start = architecture(bias).initial([generator(9)], dtype=torch.float64)
    return Parameters((first[None], *start.weights[1:]), start.biases)


def images(n: int) -> Tensor:
    """Smooth pictures, mean subtracted (n, d)."""
    coarse = torch.rand(n, 3, 5, 5, generator=generator(0)).double()
    fine = torch.nn.functional.interpolate(coarse, size=SHAPE[1:], mode="bicubic")
    return (fine - 0.5).flatten(1)


def noise(std: float, seed: int = 2) -> Tensor:
    return std * normal(WIDTH, D, seed=seed)


def signal(n: int) -> Tensor:
    return normal(WIDTH, n, seed=1) @ images(n)


def said(
    first: Tensor, start: Tensor | None = None, *, n_images: int | None = None, **given: object
) -> Preflight:
    attack = SpanAttack(start="unknown" if start is None else "known", n_images=n_images)
    rows = SpanRows(first, start)
    return span_preflight(attack, architecture(), network(first), rows, **given)[0]  # type: ignore[arg-type]


def on_subject(found: Preflight, subject: str) -> Finding:
    [finding] = [finding for finding in found.findings if finding.subject == subject]
    return finding


def test_a_small_start_and_fewer_images_than_neurons_can_be_taken_apart() -> None:
    found = said(signal(12) + noise(1e-3), images=images(12))
    assert (found.outlook, found.verdict) == ("good", "An attack can work.")
    assert found.numbers["directions_above_noise"] == 12
    assert found.numbers["noise_std"] == pytest.approx(1e-3, rel=0.05)
    assert found.numbers["images_in_span"] > 0.999
    others = said(signal(12) + noise(1e-3), images=noise(1.0)[:9])
    assert on_subject(others, "images in the span").level == "warning"


@pytest.mark.parametrize(
    ("first", "start", "n_images", "subject", "level", "text"),
    [
        (noise(0.02), None, None, "first layer", "stop", "give the start (--initial)"),
        (signal(12) + noise(0.02), None, None, "the start", "warning", "Give --initial"),
        (signal(1) + noise(1e-4), None, None, "directions", "stop", "nothing to take apart"),
        (signal(60), None, None, "directions", "warning", "as many images as neurons"),
        (signal(60), None, 20, "directions", "warning", "assumption of --n-images-guess"),
        (signal(12), None, WIDTH, "directions", "stop", "width 40"),
        (noise(0.02), noise(0.02), None, "the start", "stop", "the trained weights themselves"),
        (signal(12) + noise(0.02), noise(0.02), None, "the start", "ok", "100.0%"),
        (signal(12) + 0.6 * noise(0.02), noise(0.02), None, "the start", "ok", "60.0%"),
        (signal(12) + noise(0.02), noise(0.02, 5), None, "the start", "warning", "another"),
        (signal(12) + 1.5 * noise(0.02), noise(0.02), None, "the start", "warning", "another"),
        (torch.zeros(WIDTH, D), None, None, "a dead layer", "stop", "layer 1 are zero"),
        (torch.full((WIDTH, D), torch.nan), None, None, "weights that are not finite", "stop", ""),
    ],
)
def test_every_finding(
    first: Tensor, start: Tensor | None, n_images: int | None, subject: str, level: str, text: str
) -> None:
    found = said(first.double(), start, n_images=n_images)
    finding = on_subject(found, subject)
    assert finding.level == level, finding.text
    assert text in finding.text
    assert found.stopped == any(f.level == "stop" for f in found.findings)
    assert bool(found.reason) == found.stopped


@pytest.mark.parametrize(("n_images", "level"), [(None, "warning"), (12, "ok")])
def test_a_state_without_an_end_is_asked_about(n_images: int | None, level: str) -> None:
    attack = SpanAttack(source="state", n_images=n_images)
    rows = SpanRows(signal(12) + noise(0.05), source="state")
    found = span_preflight(attack, architecture(), network(signal(12)), rows)[0]
    assert on_subject(found, "directions").level == level
    assert not any(f.subject == "the start" for f in found.findings)
    assert any("--n-images-guess" in f.text for f in found.findings) == (n_images is None)


def test_layers_matter_where_they_stand() -> None:
    given = said(signal(12) + noise(1e-3), unknown_layers=[("norm.weight", "normalisation")])
    assert given.outlook == "open"
    assert "norm.weight (normalisation)" in given.findings[0].text
    convolution = Network(widths=(20,), conv=Conv(kernel=3, channels=4)).on(SHAPE)
    start = convolution.initial([generator(0)], dtype=torch.float32)
    found, span = span_preflight(SpanAttack(), convolution, start)
    assert (found.outlook, span) == ("none", None)
    assert "use --method kkt" in found.reason


@pytest.mark.parametrize(("centred", "text"), [(False, "told by the"), (True, "do not tell")])
def test_biases_tell_signs_unless_the_mean_was_subtracted(centred: bool, text: str) -> None:
    """Rows (x, 1); where the x sum to 0, (0, 1) is among their sums, and free to be added."""
    x = images(12)
    x = x - x.mean(0) if centred else x
    mixing = normal(WIDTH, 12, seed=1)
    given = network(mixing @ x, "first")
    given = Parameters(given.weights, (mixing.sum(1)[None], *given.biases[1:]))
    found = span_preflight(SpanAttack(n_images=12), architecture("first"), given)[0]
    assert text in on_subject(found, "sign and scale").text


def test_pictures_without_enough_features_or_a_separator_are_said() -> None:
    small = Network(widths=(WIDTH, 10)).on((1, 5, 5))
    first = normal(WIDTH, 16, seed=1) @ normal(16, 25, seed=2)
    start = small.initial([generator(9)], dtype=torch.float64)
    given = Parameters((first[None], *start.weights[1:]), start.biases)
    found = span_preflight(SpanAttack(), small, given)[0]
    assert on_subject(found, "features").level == "stop"
    assert "15 features cannot tell 16 images apart" in found.reason
    network_alone = SpanAttack(sources="network")
    unknown = span_preflight(network_alone, architecture(), network(signal(12)))[0]
    assert "palimpsest train separator" in unknown.reason
