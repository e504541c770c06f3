"""The paper's program for public images: beside the search that needs none, and its limits."""

from __future__ import annotations

import pytest
import torch

from recon_core.attacks.instahide import public_images
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.public_images import MAX_PUBLIC, by_sdp, find_publics
from recon_core.attacks.instahide.recover import Status, recover
from tests.recon_core.attacks.instahide.cases import gaussian_case


@pytest.mark.slow
@pytest.mark.parametrize("k_pub", [2, 3, 4])
def test_the_program_finds_what_the_search_finds(k_pub: int) -> None:
    mixing = Mixing.by_parts(k_pub)
    case = gaussian_case(mixing, n=8, p=12, d=1500, m=70, seed=k_pub)
    ours = find_publics(case.encodings.y, case.public, mixing)
    shares: list[float] = []
    theirs = by_sdp(case.encodings.y, case.public, mixing, progress=shares.append)
    assert torch.equal(ours, theirs)
    assert torch.equal(theirs, case.encodings.public.sort(1).values)
    assert shares == sorted(shares)
    assert (len(shares), shares[-1]) == (70, 1.0)


def test_images_come_back_with_public_images_by_the_program() -> None:
    mixing = Mixing.by_parts(2)
    case = gaussian_case(mixing, n=5, p=12, d=1500, m=30, seed=1)
    found = recover(
        case.encodings.y, mixing, public=case.public, n_private=5, semidefinite=True,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert found.public is not None
    assert torch.equal(found.public, case.encodings.public.sort(1).values)
    assert set(found.status) == {Status.RECOVERED}


def test_without_public_images_there_are_none() -> None:
    assert by_sdp(torch.ones(3, 5), torch.zeros(0, 5), Mixing.by_parts(0)).shape == (3, 0)


def test_more_than_it_takes_and_what_it_does_not_solve_are_refused(monkeypatch) -> None:
    mixing = Mixing.by_parts(2)
    with pytest.raises(ValueError, match="41 public images are too many for the semidefinite"):
        by_sdp(torch.ones(3, 5), torch.zeros(MAX_PUBLIC + 1, 5), mixing)
    with pytest.raises(ValueError, match="1 public images are too few"):
        by_sdp(torch.ones(3, 5), torch.zeros(1, 5), mixing)
    monkeypatch.setattr(public_images, "_program", lambda p, k: lambda spiked: None)
    with pytest.raises(ValueError, match="encoding 0 has no solution to this accuracy"):
        by_sdp(torch.ones(3, 5), torch.zeros(4, 5), mixing)
