"""The family `instahide`: what a run is parted into, what it refuses, what it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.run import InstaHideRecovery, two_sets
from recon_core.experiments import bytes_per_run
from recon_core.types import Outcome, RunSpec
from storage.sources.photographs import photograph_tiles

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = InstaHideRecovery(n_public=20, scheme=InstaHide(k_pub=1, n_epochs=40))


def photographs(n: int) -> torch.Tensor:
    tiles = torch.from_numpy(photograph_tiles("train", 16)[0])
    order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))
    return tiles[order[:n]]


def spec(n: int) -> RunSpec:
    labels = tuple(k % 2 for k in range(n))
    return RunSpec(run=3, root_seed=1, image_ids=tuple(range(n)), labels=labels)


def test_private_and_public_images_are_all_and_none_is_both():
    private, public = two_sets(spec(12), 5)
    assert len(public) == 5
    assert sorted(private.tolist() + public.tolist()) == list(range(12))
    assert two_sets(replace(spec(12), run=4, victim=4), 5)[1].tolist() != public.tolist()


def test_photographs_come_back_as_pairs_of_private_images():
    images = photographs(32)
    (found,) = SMALL.run_batch([spec(32)], images[None], device=torch.device("cpu"))
    assert found.outcome is Outcome.OK
    private, _public = two_sets(spec(32), 20)
    rows = found.pairs.target_row.tolist()
    assert set(rows) <= set(private.tolist())
    assert len(rows) >= 6
    assert len(set(rows)) == len(rows)
    truth = images[found.pairs.target_row].float() / 255
    error = (found.pairs.reconstruction - truth).square().mean((1, 2, 3)).sqrt()
    assert float(error.median()) < 0.1
    assert 0 <= found.stats["train_accuracy"] <= 1
    assert found.stats["n_iterations"] == 12 * 40


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_public": 0, "scheme": InstaHide(k_pub=0)}, "n_public=0"),
        ({"n_public": 3, "scheme": InstaHide(k_pub=4)}, "scheme.k_pub=4"),
        ({"scheme": Mixing.as_a_whole(2)}, "n_encodings=0: a theory scheme needs it"),
        ({"n_encodings": 7}, "n_encodings=7"),
        ({"augment_p": 2.0}, "augment_p=2"),
    ],
)
def test_settings_are_checked(settings, said):
    with pytest.raises(ValueError, match=said):
        InstaHideRecovery(**settings)


def test_what_cannot_be_attacked_is_refused():
    with pytest.raises(ValueError, match="leave 2 private ones"):
        SMALL.check_images(22)
    few = InstaHideRecovery(n_public=2, scheme=Mixing.as_a_whole(2), n_encodings=10)
    with pytest.raises(ValueError, match="10 encodings of 18 private images are too few"):
        few.check_images(20)
    with pytest.raises(ValueError, match="attacks_per_victim=2"):
        SMALL.check_sweep(2)
    SMALL.check_sweep(1)
    with pytest.raises(ValueError, match="images of 8 pixels are too small"):
        SMALL.run_batch([spec(32)], photographs(32)[None, ..., :8, :8], device=torch.device("cpu"))


def test_memory_grows_with_encodings_and_pixels():
    one = bytes_per_run(SMALL, 120, (3, 32, 32))
    assert one > 100 * 40 * 3072 * 4 * 9
    assert bytes_per_run(SMALL, 220, (3, 32, 32)) > 2 * one
    assert bytes_per_run(SMALL, 120, (3, 16, 16)) < one
