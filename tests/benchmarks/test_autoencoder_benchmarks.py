"""The benchmarks of the autoencoder paper, small: what they time is the same on both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.autoencoder import gpu as autoencoder_gpu
from benchmarks.autoencoder import speed as autoencoder
from benchmarks.autoencoder.reference import load, plain_module
from benchmarks.record import parse_lines
from recon_core.attacks.plug_and_play import Iteration, Recovered
from recon_core.degradation import MASKS
from recon_core.types import seeded_generator
from recon_core.victims import autoencoder_training
from recon_core.victims.autoencoder import FullyConnected, UNet, initial_weights

CPU = torch.device("cpu")
SMALL = (
    autoencoder.Case("small FC", FullyConnected(depth=3, width=16)),
    autoencoder.Case("small U-Net", UNet(channels=(4, 6, 8), convolutions=1, skips=False)),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoencoder, "CASES", SMALL)
    monkeypatch.setattr(autoencoder, "SHAPE", (3, 8, 8))
    monkeypatch.setattr(autoencoder, "N_IMAGES", 3)


@pytest.mark.parametrize(
    "network",
    [
        FullyConnected(depth=4, width=16),
        UNet(channels=(4, 8, 6), convolutions=1, skips=False),
        UNet(channels=(8, 8, 4), convolutions=2, skips=False),
        UNet(channels=(5,), skips=False),
    ],
    ids=str,
)
def test_the_reference_is_the_same_network(network: FullyConnected | UNet) -> None:
    model = network.on((3, 8, 8))
    weights = initial_weights(model, [seeded_generator(0, 0, "victim")], dtype=torch.float64)
    module = plain_module(network, (3, 8, 8)).double()
    load(module, weights)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(module(x), model.forward(weights, x.unsqueeze(0))[0])


@pytest.mark.parametrize("network", [UNet(), FullyConnected(activation="prelu")], ids=str)
def test_networks_that_the_reference_has_not_are_refused(network: FullyConnected | UNet) -> None:
    with pytest.raises(ValueError, match="is not one that the reference has"):
        plain_module(network, (3, 8, 8))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_case_is_measured() -> None:
    lines = list(autoencoder.measure(True))
    assert len(lines) == 2 + 2 * 2 * 2
    assert all(line.unit == "s" and line.ratio is not None for line in lines)
    assert "3 images x 6 masks, 40 evaluations of f each" in lines[0].case
    assert {line.reference for line in lines[:2]} == {autoencoder.ONE_BY_ONE}
    assert sum("2 networks" in line.case for line in lines) == 4
    assert sum("fused" in str(line.reference) for line in lines) == 4


@pytest.mark.usefixtures("small")
def test_sides_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = autoencoder.Recovery.of

    def wrong(task: autoencoder.Recovery, rows: range) -> Recovered:
        found = right(task, rows)
        return replace(found, x=found.x + 0.1) if len(rows) == 1 else found

    monkeypatch.setattr(autoencoder.Recovery, "of", wrong)
    with pytest.raises(ValueError, match=r"differ by .* not comparable"):
        autoencoder.recovery(SMALL[0], 1, n_alternations=1, one_in=3)
    monkeypatch.setattr(autoencoder, "load", lambda _module, _weights: None)
    with pytest.raises(ValueError, match=r"differ by .* not comparable"):
        autoencoder.training(SMALL[0], 1, 1, n_epochs=2, fused=False)


def test_parity_is_measured_on_every_step() -> None:
    lines = list(autoencoder_gpu.parity(CPU))
    assert len(lines) == 2 * 2 * 3
    for line in lines:
        assert line.value < (1e-12 if "in float64" in line.case else 1e-4), line.case


def test_what_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = autoencoder_gpu.computed

    def wrong(
        victim: autoencoder_gpu.Victim, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        forward, *rest = right(victim, device, dtype)
        return forward, *(rest if device is autoencoder_gpu.CPU else [2 * t for t in rest])

    monkeypatch.setattr(autoencoder_gpu, "computed", wrong)
    with pytest.raises(SystemExit, match=r"training in float64 .*: 1, more than 1e-09"):
        list(autoencoder_gpu.parity(torch.device("cpu:0")))


@pytest.mark.slow
def test_goes_continue_where_the_last_one_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--quick", "--work", str(tmp_path / "work"), "--json", str(tmp_path / "lines.json")]
    assert autoencoder_gpu.main([*words, "--minutes", "0"]) == 0
    assert "the same command goes on" in capsys.readouterr().out
    first = parse_lines((tmp_path / "lines.json").read_text(), name="x")
    assert not any(m.case.startswith("recovery of") for m in first)
    assert list((tmp_path / "work").glob("*.pt"))
    epochs: list[int] = []
    step = autoencoder_training._Course.step

    def counted(course: autoencoder_training._Course) -> None:
        epochs.append(1)
        step(course)

    monkeypatch.setattr(autoencoder_training._Course, "step", counted)
    assert autoencoder_gpu.main(words) == 0
    n_first = autoencoder_gpu.TINY[0].training.epochs
    assert n_first < len(epochs) < 2 * n_first  # of the first victim, some were done before
    lines = parse_lines((tmp_path / "lines.json").read_text(), name="x")
    assert [m.case for m in lines[: len(first)]] == [m.case for m in first]
    recoveries = [m for m in lines if m.case.startswith("recovery of")]
    assert len(recoveries) == 2 * 4  # the level 0.5 of each victim, four methods
    assert all("; accurate: random 0, blocks 0, " in m.case for m in recoveries)
    capsys.readouterr()
    monkeypatch.setattr(autoencoder_gpu, "recovery", lambda *_: pytest.fail("measured again"))
    assert autoencoder_gpu.main(words) == 0
    assert [m.case for m in parse_lines((tmp_path / "lines.json").read_text(), name="x")] == [
        m.case for m in lines
    ]


def test_what_comes_back_is_counted_by_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    x = autoencoder_gpu.smooth_noise(autoencoder_gpu.TINY[0])
    monkeypatch.setattr(autoencoder_gpu, "errors", lambda a, _b: torch.arange(len(a)) / 1e8)
    line = autoencoder_gpu.recovery("name", lambda x: 0 * x, Iteration(n_iterations=1), x)
    assert line.case.endswith("accurate: random 4, blocks 4, stripes 2, text 0, half 0, window 0")
    y, mask = autoencoder_gpu.degraded(x)
    assert y.shape == mask.shape == (4 * len(MASKS), 3, 8, 8)
    torch.testing.assert_close(y, torch.where(mask, x.repeat(len(MASKS), 1, 1, 1), 0.0))
    assert not bool(mask[16:20, :, 4:].any())  # the lower half of "half"


def test_images_come_from_a_source_that_has_enough(tmp_path: Path) -> None:
    go = autoencoder_gpu.Go(tmp_path, CPU, 1.0, "digits")
    images = go.images(autoencoder_gpu.TINY[0])
    assert images.shape == (4, 3, 8, 8)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    too_many = replace(autoencoder_gpu.TINY[0], n_images=10**6)
    with pytest.raises(SystemExit, match=r"digits has .* images, not 1000000"):
        go.images(too_many)
