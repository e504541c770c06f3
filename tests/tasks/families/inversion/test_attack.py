"""Scores of an attack on a given classifier: against the own image, against others, and by maps."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.strong_inversion import ZETAS, StrongInversion
from recon_core.metrics import ssim_matrix
from tasks.families.inversion import attack as inversion_attack
from tasks.families.inversion.attack import attack_all, inversion_record, own_maps
from tasks.families.inversion.inputs import InversionJob, PreparedCut, prepare_cut
from tasks.families.inversion.report import shown_rows
from tests.tasks.families.inversion.classifier_files import (
    N_IMAGES,
    ClassifierFiles,
    make_classifier,
)

FEW = StrongInversion(n_steps=150, zeta=0.001, starts=("grey",))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ClassifierFiles:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def job(files: ClassifierFiles) -> InversionJob:
    return InversionJob(
        weights=files.exported, out=files.exported.parent / "out", cut="first",
        data=f"folder:{files.pictures}", public=f"folder:{files.public}", trust=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(job: InversionJob) -> PreparedCut:
    return prepare_cut(job)


def test_images_come_back_from_a_layer_that_hides_nothing(job: InversionJob, prepared: PreparedCut):
    (found,) = attack_all(job, prepared, [FEW], tuned=False, device="cpu")
    assert float(found.ssim.min()) > 0.9
    assert float(found.others.max()) < float(found.ssim.min())
    assert bool(found.identified.all())
    expected = ssim_matrix(found.found.x, prepared.data.images).double()
    torch.testing.assert_close(found.ssim, expected.diagonal(), atol=1e-5, rtol=0)
    others = (expected.sum(1) - expected.diagonal()) / (N_IMAGES - 1)
    torch.testing.assert_close(found.others, others, atol=1e-5, rtol=0)
    assert float((found.psim - found.psim_other).min()) > 0
    record = inversion_record(found, prepared.data.names)
    ssim = record["summary"]["ssim"]
    best = max(record["images"], key=lambda image: image["ssim"])
    assert (ssim["worst"], ssim["worst_image"]) == (best["ssim"], best["name"])
    assert ssim["mean"] == pytest.approx(float(found.ssim.mean()), rel=1e-5)
    assert record["n_identified"] == N_IMAGES
    order = shown_rows([found], 3)
    ranks = [found.order().index(row) for row in order]
    assert (ranks[0], ranks[-1], len(ranks)) == (0, N_IMAGES - 1, 3)


def test_features_that_say_nothing_score_as_chance(job: InversionJob, prepared: PreparedCut):
    """The features of one image sent for all: nothing can be identified beyond that one."""
    same = dataclasses.replace(prepared, z=prepared.z[:1].expand_as(prepared.z).contiguous())
    (found,) = attack_all(job, same, [FEW], tuned=False, device="cpu")
    assert int(found.identified.sum()) == 1
    wrong = found.ssim[1:] - found.others[1:]
    assert abs(float(wrong.mean())) < 0.3
    assert float(found.ssim[0] - found.others[0]) > 0.5


def test_groups_of_images_are_solved_as_if_they_were_alone(
    job: InversionJob, prepared: PreparedCut, monkeypatch: pytest.MonkeyPatch
):
    method = dataclasses.replace(FEW, n_steps=10, starts=("noise",))
    (whole,) = attack_all(job, prepared, [method], tuned=False, device="cpu")
    monkeypatch.setattr(inversion_attack, "VALUES_AT_ONCE", 2 * 3 * 16 * 16)
    (parts,) = attack_all(job, prepared, [method], tuned=False, device="cpu")
    torch.testing.assert_close(parts.found.x, whole.found.x, atol=1e-4, rtol=0)


def test_zeta_is_tuned_on_public_images_and_said(
    job: InversionJob, prepared: PreparedCut, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    real = inversion_attack.errors_by_zeta

    def spied(method, h, public, zetas, **more):
        seen.append(public)
        return real(method, h, public, zetas, **more)

    monkeypatch.setattr(inversion_attack, "errors_by_zeta", spied)
    start = dataclasses.replace(FEW, n_steps=30, zeta=777.0)
    (tuned,) = attack_all(job, prepared, [start], tuned=True, device="cpu")
    assert prepared.public is not None
    assert torch.equal(seen[0], prepared.public.images)
    assert isinstance(tuned.method, StrongInversion)
    assert tuned.method.zeta in ZETAS
    assert f"zeta = {tuned.method.zeta:g} was best" in tuned.notes[0]
    alone = dataclasses.replace(prepared, public=None)
    (untuned,) = attack_all(job, alone, [start], tuned=True, device="cpu")
    assert "No --public images" in untuned.notes[0]
    assert "zeta is the default, 777" in untuned.notes[1]


def test_a_descent_that_diverges_is_said_and_scored(job: InversionJob, prepared: PreparedCut):
    method = GradientInversion(lr=1e30, n_steps=20)
    (found,) = attack_all(job, prepared, [method], tuned=False, device="cpu")
    record = inversion_record(found, prepared.data.names)
    assert record["endings"]["nonfinite"] == N_IMAGES
    assert f"{N_IMAGES} of {N_IMAGES} descents diverged" in record["notes"][0]
    assert all(image["ssim"] is not None for image in record["images"])


def test_own_maps_are_the_outermost_modules_in_their_order(prepared: PreparedCut):
    maps = own_maps(prepared)(prepared.data.images)
    shapes = [tuple(layer.shape[1:]) for layer in maps]
    assert shapes == [(12, 16, 16), (4, 2, 2), (16,), (2,)]
    torch.testing.assert_close(maps[0].flatten(1), prepared.z)
