"""The contract of every attack family. A newcomer is tested by being added to `FAMILIES`.

It also needs a line in `SMALL`: settings with which a run takes well under a second. The family
`kkt` has one for each of its attacks.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from recon_core.attacks.autoencoder.run import AutoencoderRecovery
from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.instahide.natural_fit import Refinement
from recon_core.attacks.instahide.practical import Practical
from recon_core.attacks.instahide.run import InstaHideRecovery
from recon_core.attacks.inversion.run import Inversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.kkt.settings import Attack
from recon_core.attacks.plug_and_play import UnknownMask
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import FAMILIES, Experiment
from recon_core.sampling import Sampling
from recon_core.types import N_AUGMENT, STATS, Outcome, RunResult, RunSpec
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.network import Network
from recon_core.victims.separability import MixCon
from recon_core.victims.split import LeNet5
from recon_core.victims.split_training import SplitTraining
from recon_core.victims.training import Training
from tests.recon_core.small_runs import assert_all_equal, assert_equal_results
from tests.recon_core.tiles import photograph_tiles

pytestmark = pytest.mark.usefixtures("one_thread")

R, N, SIDE = 3, 4, 16
CPU = torch.device("cpu")
TILES = photograph_tiles(SIDE, shrink=4)
GUARDED = KKT(
    victim=Network(widths=(16, 16)),
    training=Training(epochs=40),
    attack=KKTAttack(n_candidates=6, save_at=(5, 23)),
    keep="all",
)
SPAN = SpanAttack(n_images=3, n_independent=20, overcomplete=1.0)
KNOWN = dataclasses.replace(SPAN, start="known", n_images=None)
SMALL: dict[str, Experiment] = {
    "kkt": GUARDED,
    "span": dataclasses.replace(GUARDED, attack=SPAN),
    "span, start known": dataclasses.replace(GUARDED, attack=KNOWN),
    "autoencoder": AutoencoderRecovery(
        victim=FullyConnected(depth=3, width=32),
        training=AutoencoderTraining(epochs=60, lr=3e-3, levels=(0.05, 0.02)),
        masks=("random", "half"),
        sigma=0.01,
        attack=UnknownMask(n_admm=5, n_alternations=3),
        keep="all",
    ),
    "inversion": Inversion(
        n_classes=2,
        victim=LeNet5(cut=1),
        training=SplitTraining(epochs=3, per_class=1),
        defence=MixCon(lam=0.1),
        held_out=1,
        attack=StrongInversion(n_steps=10, starts=("noise", "noise")),
        keep="all",
    ),
    "instahide": InstaHideRecovery(
        n_public=1,
        scheme=InstaHide(k_pub=1, n_epochs=8),
        attack=Practical(refinement=Refinement(n_rounds=2)),
        keep="all",
    ),
}


def specs() -> list[RunSpec]:
    return [
        RunSpec(
            run=10 + run,
            root_seed=3,
            image_ids=tuple(range(N * run, N * run + N)),
            labels=(0, 0, 1, 1),
        )
        for run in range(R)
    ]


def images(some: list[RunSpec]) -> Tensor:
    return torch.stack([TILES[list(spec.image_ids)] for spec in some])


def run(family: str, some: list[RunSpec]) -> list[RunResult]:
    return SMALL[family].run_batch(some, images(some), device=CPU)


def nested_settings(settings: Any) -> list[tuple[str, ...]]:
    """Paths to `settings` itself and to every dataclass within it."""
    paths: list[tuple[str, ...]] = [()]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            paths += [(field.name, *path) for path in nested_settings(value)]
    return paths


families = pytest.mark.parametrize("family", sorted(SMALL))


def test_every_family_and_every_attack_on_weights_has_small_settings_here() -> None:
    assert {small.family for small in SMALL.values()} == set(FAMILIES)
    kinds = {small.attack.kind for small in SMALL.values() if isinstance(small, KKT)}
    union, tag = typing.get_args(Attack)
    assert kinds == set(tag.by_tag(union))


@families
def test_settings_are_hashable_and_survive_json(family: str) -> None:
    adapter: TypeAdapter[Experiment] = TypeAdapter(Experiment)
    for settings in (type(SMALL[family])(), SMALL[family]):
        assert adapter.validate_json(adapter.dump_json(settings)) == settings
    assert hash(SMALL[family]) == hash(dataclasses.replace(SMALL[family]))


@families
def test_unknown_keys_are_refused_at_every_level(family: str) -> None:
    adapter: TypeAdapter[Experiment] = TypeAdapter(Experiment)
    paths = nested_settings(SMALL[family])
    assert () in paths
    for path in paths:
        raw = adapter.dump_python(SMALL[family], mode="json")
        inner = raw
        for name in path:
            inner = inner[name]
        inner["learning_rat"] = 1
        with pytest.raises(ValidationError, match=r"learning_rat\n.*Unexpected keyword argument"):
            adapter.validate_python(raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"family": "kkt", "masks": ["half"]}, "kkt.masks\n  Unexpected keyword argument"),
        ({"family": "autoencoder", "n_classes": 2}, "autoencoder.n_classes\n  Unexpected"),
        ({"family": "autoencoder", "attack": {"kind": "known", "start": "nothing"}}, "known.start"),
        ({"family": "autoencoder", "attack": {"kind": "guess"}}, "kind must be one of unknown, "),
        ({"family": "autoencoder", "victim": {"kind": "unet", "depth": 3}}, "victim.unet.depth"),
        ({"family": "kkt", "defence": {"kind": "mixcon"}}, "kkt.defence\n  Unexpected keyword"),
        ({"family": "inversion", "masks": ["half"]}, "inversion.masks\n  Unexpected keyword"),
        ({"family": "inversion", "attack": {"kind": "strong", "norm": "l2"}}, "strong.norm"),
        ({"family": "inversion", "attack": {"kind": "guess"}}, "kind must be one of sgd, strong"),
        ({"family": "inversion", "victim": {"kind": "mlp", "depth": 3}}, "victim.mlp.depth"),
        ({"family": "inversion", "victim": {"kind": "vgg"}}, "kind must be one of lenet5, mlp"),
        ({"family": "inversion", "defence": {"kind": "unicon", "beta": 1}}, "unicon.beta"),
        ({"family": "inversion", "defence": {"kind": "x"}}, "kind must be one of mixcon, unicon"),
        ({"family": "instahide", "scheme": {"kind": "theory", "n_epochs": 3}}, "theory.n_epochs"),
        ({"family": "instahide", "scheme": {"kind": "x"}}, "kind must be one of instahide, theory"),
        ({"family": "instahide", "n_public": 1}, "n_public=1 must be at least 1 and"),
        ({"attack": {"kind": "span", "save_at": [1]}}, "kkt.attack.span.save_at\n  Unexpected"),
        ({"attack": {"kind": "ica"}}, "kind must be one of kkt, span"),
        ({"attack": {"n_images": 3}}, "kkt.attack.kkt.n_images\n  Unexpected keyword"),
        ({"victim": {"conv": {}}, "attack": {"kind": "span"}}, "is a convolution of 3x3"),
        ({"victim": {"widths": [9]}, "attack": {"kind": "span", "n_images": 10}}, "it has 9 at"),
        (3, "family must be one of kkt, autoencoder, inversion, instahide"),
    ],
)
def test_what_is_wrong_is_said_of_the_family_that_was_meant_and_of_no_other(
    raw: Any, said: str
) -> None:
    with pytest.raises(ValidationError, match=said) as refusal:
        TypeAdapter(Experiment).validate_python(raw)
    assert refusal.value.error_count() == 1


@pytest.mark.parametrize(
    "raw", [{"images_per_rum": 4}, {"phases": [{"sampler": "uniform", "runs": 4}]}]
)
def test_sampling_refuses_unknown_keys(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Unexpected keyword argument"):
        TypeAdapter(Sampling).validate_python(raw)


@families
def test_one_complete_result_per_spec_in_order(family: str) -> None:
    results = run(family, specs())
    assert [r.spec for r in results] == specs()
    for result in results:
        assert result.outcome in set(Outcome)
        assert tuple(result.stats) == STATS
        assert result.targets.shape == (N, 3, SIDE, SIDE)
        assert result.augment.shape == (N, N_AUGMENT)
        assert 0 <= float(result.mean_image.min()) <= float(result.mean_image.max()) <= 1
        pairs = result.pairs
        assert len(pairs) > 0
        assert pairs.reconstruction.shape == (len(pairs), 3, SIDE, SIDE)
        assert bool(pairs.reconstruction.isfinite().all())
        assert 0 <= int(pairs.target_row.min()) <= int(pairs.target_row.max()) < N
        assert bool(((pairs.ssim_best > pairs.ssim_second) | ~pairs.confident).all())
        for value in (result.targets, result.mean_image, *vars(pairs).values()):
            assert value.device == CPU


@families
def test_a_run_is_a_pure_function_of_its_spec(family: str) -> None:
    """Of all of it: other seeds and run numbers give other pairs. Images are left alone, progress
    rises to one."""
    fractions: list[float] = []
    given = images(specs())
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = SMALL[family].run_batch(specs(), given, device=CPU, progress=fractions.append)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator was used"
    assert torch.equal(given, images(specs()))
    assert (fractions[-1], fractions) == (1.0, sorted(fractions))
    assert 0 <= fractions[0] < 1
    torch.manual_seed(1)
    assert_all_equal(first, run(family, specs()))
    for changed in ({"root_seed": 4}, {"run": 11}):
        (other,) = run(family, [dataclasses.replace(specs()[0], **changed)])
        assert not torch.equal(first[0].pairs.reconstruction, other.pairs.reconstruction)


@families
def test_a_batch_that_does_not_fit_its_specs_is_refused(family: str) -> None:
    one = specs()[:1]
    for some, given, said in (
        (one, images(one)[:, :3], "run 10 plans 4 images, the batch has 3"),
        (one * 2, images(one), "2 specs came with images of 1 runs"),
    ):
        with pytest.raises(ValueError, match=said):
            SMALL[family].run_batch(some, given, device=CPU)


@families
@pytest.mark.parametrize("tolerance", [0.0, 1e-4], ids=["cpu", "stacked as on a gpu"])
def test_a_run_does_not_depend_on_its_place_or_its_neighbours(
    family: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tolerance:
        at = "recon_core.attacks.family_run.stack_size"
        monkeypatch.setattr(at, lambda _device, n_runs: n_runs)
    together = run(family, specs())
    assert_all_equal(together, reversed(run(family, specs()[::-1])), tolerance=tolerance)
    strangers = [dataclasses.replace(s, root_seed=9) for s in specs()]
    mixed = [strangers[0], specs()[1], strangers[2]]
    assert_equal_results(together[1], run(family, mixed)[1])
    for one, spec in zip(together, specs(), strict=True):
        (alone,) = run(family, [spec])
        assert_equal_results(one, alone, tolerance=tolerance)
