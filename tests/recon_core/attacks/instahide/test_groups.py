"""Independent components of scores are the private images' encodings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.coherence import centred
from recon_core.attacks.instahide.groups import Components, independent_groups
from tests.recon_core.attacks.instahide.cases import random_edges


def planted(n: int, m: int, noise: float, seed: int = 0):
    """Scores of encodings with random weights, and A."""
    rng = np.random.default_rng(seed)
    edges = random_edges(rng, n, m)
    a = np.zeros((m, n))
    np.put_along_axis(a, edges, rng.uniform(0.2, 1.0, (m, 2)), axis=1)
    z = rng.normal(size=(m, m))
    scores = a @ a.T + noise * (z + z.T) / 2**0.5
    return torch.from_numpy(scores), torch.from_numpy(a)


def purity(loads: torch.Tensor, a: torch.Tensor) -> tuple[float, int]:
    """The least share of a group's encodings that have its image, and how many images are found."""
    hits = (loads > 0).double().T @ (a > 0).double()
    share = hits.amax(1) / (loads > 0).sum(0).clamp(min=1)
    return float(share.min()), len(hits.argmax(1).unique())


@pytest.mark.parametrize(("m", "noise"), [(400, 0.1), (400, 0.3), (1200, 0.6)])
def test_every_image_has_a_group_of_its_own_encodings(m, noise):
    scores, a = planted(20, m, noise)
    drawn = torch.Generator().manual_seed(0)
    loads = independent_groups(centred(scores.float()), 20, generator=drawn)
    least, n_found = purity(loads, a)
    assert n_found == 20
    assert least > 0.9
    assert int((loads > 0).sum(0).min()) > m / 20 / 4


def test_loads_follow_the_weights():
    scores, a = planted(10, 400, 0.05)
    drawn = torch.Generator().manual_seed(0)
    loads = independent_groups(centred(scores.float()), 10, generator=drawn)
    ids = ((loads > 0).double().T @ (a > 0).double()).argmax(1)
    for k, image in enumerate(ids.tolist()):
        rows = loads[:, k] > 0
        both = torch.stack([loads[rows, k].double(), a[rows, image]])
        assert float(torch.corrcoef(both)[0, 1]) > 0.8


def test_the_same_generator_gives_the_same_groups():
    scores, _a = planted(10, 300, 0.3)
    first, second = (
        independent_groups(centred(scores.float()), 10, generator=torch.Generator().manual_seed(4))
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_too_few_encodings_are_said():
    with pytest.raises(ValueError, match="5 encodings are too few for the components of 5 images"):
        independent_groups(torch.eye(5), 5, generator=torch.Generator())


@pytest.mark.parametrize("wrong", [{"spare": -0.1}, {"core": 1.0}, {"n_rounds": 0}])
def test_settings_are_checked(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}="):
        Components(**wrong)
