"""The contract of every attack family. A newcomer is tested by being added to `FAMILIES`.

It also needs a line in `SMALL`: settings with which a run takes well under a second. The family
`kkt` has one for each of its attacks.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
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
from recon_core.attacks.kkt.settings import Attack, SpanThenKKT
from recon_core.attacks.plug_and_play import UnknownMask
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import FAMILIES, Experiment
from recon_core.sampling import Phase, Sampling
from recon_core.types import N_AUGMENT, STATS, Outcome, RunResult, RunSpec
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.network import Network
from recon_core.victims.separability import MixCon
from recon_core.victims.split import LeNet5
from recon_core.victims.split_training import SplitTraining
from recon_core.victims.training import Training
from tests.recon_core.tiles import photograph_tiles

pytestmark = pytest.mark.usefixtures("one_thread")

R, N, SIDE = 3, 4, 16
CPU = torch.device("cpu")
TILES = photograph_tiles(SIDE, shrink=4)
GUARDED = KKT(
    victim=Network(widths=(16, 16)),
    training=Training(epochs=40),
    defence=MixCon(lam=0.1, beta=1e-3),
    defence_layer=1,
    attack=KKTAttack(n_candidates=6, save_at=(5, 23)),
    keep="all",
)
SPAN = SpanAttack(n_images=3, n_rotations=(5, 5, 5, 5), n_grouped=3, n_likelihood=3)
KNOWN = dataclasses.replace(SPAN, start="known", n_images=None)
SEARCH = KKTAttack(save_at=(5, 23))
SMALL: dict[str, Experiment] = {
    "kkt": GUARDED,
    "span": dataclasses.replace(GUARDED, attack=SPAN),
    "span_then_kkt": dataclasses.replace(GUARDED, attack=SpanThenKKT(span=KNOWN, kkt=SEARCH)),
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_family_is_its_tag_in_the_union(family: str) -> None:
    kind = FAMILIES[family].experiment
    (tag,) = typing.get_args(typing.get_type_hints(kind)["family"])
    assert kind().family == tag == family
    _any, tagged = typing.get_args(Experiment)
    assert tagged.members[family] is kind


@families
def test_settings_are_frozen_keyword_only_and_have_defaults(family: str) -> None:
    def check(settings: Any) -> None:
        fields = dataclasses.fields(settings)
        assert fields
        assert all(field.kw_only for field in fields)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, fields[0].name, None)
        for field in fields:
            if dataclasses.is_dataclass(getattr(settings, field.name)):
                check(getattr(settings, field.name))

    check(type(SMALL[family])())
    check(SMALL[family])
    assert hash(SMALL[family]) == hash(dataclasses.replace(SMALL[family]))


@families
def test_settings_survive_json(family: str) -> None:
    adapter: TypeAdapter[Experiment] = TypeAdapter(Experiment)
    for settings in (type(SMALL[family])(), SMALL[family]):
        assert adapter.validate_json(adapter.dump_json(settings)) == settings


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


@families
def test_wrong_values_are_refused_with_the_settings_own_message(family: str) -> None:
    adapter: TypeAdapter[Experiment] = TypeAdapter(Experiment)
    raw = adapter.dump_python(SMALL[family], mode="json")
    with pytest.raises(ValidationError, match="family"):
        adapter.validate_python(raw | {"family": "no such family"})


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"family": "kkt", "masks": ["half"]}, "kkt.masks\n  Unexpected keyword argument"),
        ({"family": "autoencoder", "n_classes": 2}, "autoencoder.n_classes\n  Unexpected"),
        ({"family": "autoencoder", "attack": {"kind": "known", "start": "nothing"}}, "known.start"),
        ({"family": "autoencoder", "attack": {"kind": "guess"}}, "kind must be one of unknown, "),
        ({"family": "autoencoder", "victim": {"kind": "unet", "depth": 3}}, "victim.unet.depth"),
        ({"family": "kkt", "defence": {"kind": "unicon", "beta": 1}}, "kkt.defence.unicon.beta"),
        ({"family": "kkt", "defence": {"kind": "x"}}, "kind must be one of mixcon, unicon"),
        ({"defence": {"kind": "mixcon"}, "defence_layer": 5}, "defence_layer=5 is no hidden layer"),
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
        ({"attack": {"kind": "span_then_kkt", "sigma": 1}}, "span_then_kkt.sigma\n  Unexpected"),
        ({"attack": {"kind": "ica"}}, "kind must be one of kkt, span, span_then_kkt"),
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


def test_settings_that_name_no_family_are_of_the_first() -> None:
    assert TypeAdapter(Experiment).validate_python({"augment_p": 0.5}) == KKT(augment_p=0.5)


def test_post_init_messages_reach_the_user() -> None:
    with pytest.raises(ValidationError, match="n_candidates=7 must be even"):
        TypeAdapter(KKT).validate_python({"attack": {"n_candidates": 7}})


@pytest.mark.parametrize(
    "raw", [{"images_per_rum": 4}, {"phases": [{"sampler": "uniform", "runs": 4}]}]
)
def test_sampling_refuses_unknown_keys(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Unexpected keyword argument"):
        TypeAdapter(Sampling).validate_python(raw)


def test_sampling_survives_json() -> None:
    sampling = Sampling(images_per_run=4, phases=(Phase(n_runs=100),))
    adapter = TypeAdapter(Sampling)
    assert adapter.validate_json(adapter.dump_json(sampling)) == sampling


@families
def test_run_batch_has_the_contracts_signature(family: str) -> None:
    parameters = inspect.signature(SMALL[family].run_batch).parameters
    assert list(parameters) == ["specs", "images", "device", "progress", "victims"]
    for name in ("device", "progress", "victims"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


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


def assert_equal_results(one: RunResult, other: RunResult, *, tolerance: float = 0.0) -> None:
    assert one.spec == other.spec
    assert one.outcome == other.outcome
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.augment, other.augment)
    assert one.stats == pytest.approx(other.stats, rel=tolerance, abs=tolerance, nan_ok=True)
    assert vars(one.pairs).keys() == vars(other.pairs).keys()
    for name, value in vars(one.pairs).items():
        theirs = getattr(other.pairs, name)
        if value.is_floating_point():
            torch.testing.assert_close(value, theirs, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(value, theirs), name


@families
def test_a_run_is_a_pure_function_of_its_spec(family: str) -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = run(family, specs())
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator was used"
    torch.manual_seed(1)
    for one, other in zip(first, run(family, specs()), strict=True):
        assert_equal_results(one, other)


@families
@pytest.mark.parametrize("tolerance", [0.0, 1e-4], ids=["cpu", "stacked as on a gpu"])
def test_a_run_does_not_depend_on_its_place_or_its_neighbours(
    family: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tolerance:
        at = "recon_core.attacks.family_run.stack_size"
        monkeypatch.setattr(at, lambda _device, n_runs: n_runs)
    together = run(family, specs())
    for one, other in zip(together, reversed(run(family, specs()[::-1])), strict=True):
        assert_equal_results(one, other, tolerance=tolerance)
    strangers = [dataclasses.replace(s, root_seed=9) for s in specs()]
    mixed = [strangers[0], specs()[1], strangers[2]]
    assert_equal_results(together[1], run(family, mixed)[1])
    for one, spec in zip(together, specs(), strict=True):
        (alone,) = run(family, [spec])
        assert_equal_results(one, alone, tolerance=tolerance)


@families
def test_seeds_and_runs_differ(family: str) -> None:
    (spec, *_) = specs()
    (first,) = run(family, [spec])
    for other in (dataclasses.replace(spec, root_seed=4), dataclasses.replace(spec, run=11)):
        (second,) = run(family, [other])
        assert not torch.equal(first.pairs.reconstruction, second.pairs.reconstruction)


@families
def test_progress_rises_to_one(family: str) -> None:
    fractions: list[float] = []
    SMALL[family].run_batch(specs(), images(specs()), device=CPU, progress=fractions.append)
    assert fractions[-1] == 1.0
    assert 0 <= fractions[0] < 1
    assert all(a <= b for a, b in itertools.pairwise(fractions))


@families
def test_the_images_are_left_alone(family: str) -> None:
    given = images(specs())
    SMALL[family].run_batch(specs(), given, device=CPU)
    assert torch.equal(given, images(specs()))
