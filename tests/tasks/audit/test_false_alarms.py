"""Networks that give nothing away, on pictures with black ground: no audit finds a leak in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from flows.audit import given
from recon_core.leakage import exchangeable_p
from storage.sources.load import load_images
from tasks.audit.attacks import best_matches, pictures_on
from tasks.audit.given import GivenPlan
from tasks.audit.settings import GivenWeights
from tests.tasks.audit.small import record_of, run

N = 16
SEEDS = 30


def digits(seed: int) -> Tensor:
    """2N digits, of which the first N are members."""
    images = load_images("digits", split="train").images
    rows = np.random.default_rng(seed).choice(len(images), 2 * N, replace=False)
    return torch.from_numpy(images[rows].copy()).float() / 255


@pytest.mark.parametrize("as_they_are", [False, True])
def test_pictures_of_nothing_score_members_no_higher_than_decoys(as_they_are: bool) -> None:
    member = np.arange(2 * N)[None] < N
    found = []
    for seed in range(SEEDS):
        pool, generator = digits(seed), torch.Generator().manual_seed(seed)
        x = torch.randn(6, *pool.shape[1:], generator=generator)
        pictures = pictures_on(pool, x, pool[:N].mean(0), as_they_are=as_they_are)
        row, scores = best_matches(pictures, pool, mirrored=False)
        ssim = scores[row, torch.arange(len(pool))].double().numpy()[None]
        rng = np.random.default_rng(seed)
        found.append(exchangeable_p(ssim, member, n_draws=199, generator=rng))
    assert (
        sum(p <= 0.05 for p in found) <= 6
    )  # of 30; 7 or more happen less than once in a thousand
    assert np.mean(found) > 0.35


def photographs_on_black() -> Tensor:
    """2N grey photographs in a disc, on black ground."""
    photos = torch.from_numpy(load_images("photos", split="train").images[: 40 * N : 20].copy())
    at = torch.linspace(-1, 1, photos.shape[2])
    return photos.float().mean(1, keepdim=True) / 255 * (torch.hypot(at[:, None], at) < 0.9)


def audited(
    folder: Path, images: Tensor, net: nn.Module, begun: dict[str, Tensor] | None = None
) -> GivenPlan:
    """The audit of a network with the limit of the documents, nothing said of its mean."""
    for side, some in (("data", images[:N]), ("decoys", images[N:])):
        (folder / side).mkdir()
        for k, image in enumerate(some):
            pixels = (image[0] * 255).round().byte().numpy()
            Image.fromarray(pixels).save(folder / side / f"{k:02d}.png")
    save_file(dict(net.state_dict()), folder / "net.safetensors")
    initial = None
    if begun is not None:
        initial = str(folder / "begun.safetensors")
        save_file(begun, initial)
    facts = GivenWeights(file=str(folder / "net.safetensors"), decoys=f"folder:{folder / 'decoys'}",
                         shape=(1, 32, 32), initial=initial)  # fmt: skip
    made = dataclasses.replace(
        given(), data=f"folder:{folder / 'data'}", weights=facts, defences=(),
        attacks=("span" if initial is None else "span_known",),
        fail_above=("good>0.05@fpr=0.01", "found>0.05@fpr=0.01"),
    )  # fmt: skip
    return GivenPlan(made, folder / "store", device="cpu")


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1))


def test_an_untrained_network_exceeds_no_limit(tmp_path: Path) -> None:
    plan = audited(tmp_path, digits(0)[:, :1], network(0))
    assert not run(plan).failed
    record = record_of(plan)
    assert "fails" not in {check["outcome"] for check in record["checks"]}
    assert record["verdict"]["level"] == "nothing found"
    attack = record["cells"][0]["attacks"]["span"]
    assert attack["identified"]["mean"] - attack["identified_decoys"]["mean"] < 0.2


@pytest.mark.parametrize("centred", [True, False])
def test_a_network_that_leaks_is_found(centred: bool, tmp_path: Path) -> None:
    images = photographs_on_black()
    net, x = network(0), images[:N] - (images[:N].mean(0) if centred else 0)
    begun = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    y = (torch.arange(N) % 2).float()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(600):
        optimiser.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], y).backward()
        optimiser.step()
    plan = audited(tmp_path, images, net, begun)
    assert not run(plan).failed
    record = record_of(plan)
    assert [check["outcome"] for check in record["checks"]] == ["fails", "fails"]
    attack = record["cells"][0]["attacks"]["span_known"]
    assert attack["identified"]["mean"] > 0.7
    assert attack["identified_decoys"]["mean"] < 0.3
    assert record["verdict"]["level"] == "leaks"
