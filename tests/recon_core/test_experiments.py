"""The contract of every attack family. A newcomer is tested by being added to `FAMILIES`.

It also needs a line in `SMALL`: settings with which a run takes well under a second. The family
`kkt` has one for each of its attacks.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.autoencoder.run import AutoencoderRecovery
from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.natural_fit import Practical
from recon_core.attacks.instahide.run import InstaHideRecovery
from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.run import Inversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.attacks import Attack
from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.plug_and_play import KnownMask, UnknownMask
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import FAMILIES, Experiment, bytes_per_run
from recon_core.optimisers import Optimiser
from recon_core.restore.edm import EDM
from recon_core.restore.fit import Training as Fitting
from recon_core.restore.inpaint import DDNM
from recon_core.sampling import Phase
from recon_core.types import N_AUGMENT, STATS, Outcome, RunResult, RunSpec, no_progress
from recon_core.victims import split, split_training
from recon_core.victims.autoencoder import Autoencoder, FullyConnected, UNet
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.losses import Loss
from recon_core.victims.network import Conv, Network
from recon_core.victims.noisy_training import Noise
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split import LeNet5, SplitMLP, SplitNetwork
from recon_core.victims.split_training import SplitTraining
from recon_core.victims.training import Training
from tests.recon_core.drawing import refuses
from tests.recon_core.small_runs import assert_all_equal, assert_equal_results
from tests.recon_core.tiles import photograph_tiles

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
        attack=Practical(n_rounds=2),
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
        ({"family": "autoencoder", "attack": {"kind": "known", "start": "nothing"}}, "known.start"),
        ({"family": "autoencoder", "victim": {"kind": "unet", "depth": 3}}, "victim.unet.depth"),
        ({"family": "inversion", "attack": {"kind": "strong", "norm": "l2"}}, "strong.norm"),
        ({"family": "inversion", "defence": {"kind": "unicon", "beta": 1}}, "unicon.beta"),
        ({"family": "instahide", "scheme": {"kind": "theory", "n_epochs": 3}}, "theory.n_epochs"),
        ({"family": "instahide", "n_public": 1}, "n_public=1 must be at least 1 and"),
        ({"attack": {"kind": "span", "save_at": [1]}}, "kkt.attack.span.save_at\n  Unexpected"),
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
        refuses(said, SMALL[family].run_batch, some, given, device=CPU)


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


SHAPE = (3, 16, 16)


class LiveTensors(TorchDispatchMode):
    """The most bytes that were alive at once in tensors made inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn:  # only CPUs have such copies
                storage = leaf.untyped_storage()
                ref = StorageWeakRef(storage)
                self.alive[ref.cdata] = (ref, storage.nbytes())
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(n for _ref, n in self.alive.values()))
        return out


def kkt(widths: tuple[int, ...], n_images: int, n_saved: int, conv: Conv | None = None) -> KKT:
    return KKT(
        victim=Network(widths=widths, conv=conv),
        training=Training(epochs=2),
        attack=KKTAttack(n_candidates=2 * n_images, save_at=tuple(range(1, n_saved + 1))),
    )


def span(widths: tuple[int, ...], n_images: int, overcomplete: float) -> KKT:
    attack = SpanAttack(n_images=n_images, n_independent=12, overcomplete=overcomplete)
    return KKT(victim=Network(widths=widths), training=Training(epochs=2), attack=attack)


def recovery(victim: Autoencoder) -> AutoencoderRecovery:
    return AutoencoderRecovery(
        victim=victim,
        training=AutoencoderTraining(epochs=2),
        masks=("random", "half", "window"),
        attack=UnknownMask(n_admm=2),
        keep="all",
    )


def inversion(
    victim: SplitNetwork, per_class: int, held_out: int, attack: Any, defence: Any = None
) -> Inversion:
    """In float64, for which a CPU convolves as a GPU does."""
    return Inversion(
        n_classes=2,
        victim=victim,
        training=SplitTraining(epochs=1, per_class=per_class),
        held_out=held_out,
        attack=replace(attack, n_steps=2),
        defence=defence,
        dtype="float64",
    )


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
SGD, STRONG = GradientInversion(), StrongInversion()
CASES: list[tuple[Experiment, int, tuple[int, int, int], int, float]] = [
    (kkt((600, 600), 8, 2), 8, SHAPE, 2, 2.5),
    (kkt((32, 32), 40, 6), 40, SHAPE, 2, 2.5),
    (kkt((32,), 10, 2, Conv(kernel=3, channels=8)), 10, SHAPE, 2, 2.5),
    (span((300,), 20, 1.0), 20, SHAPE, 1, 2.5),
    (span((64, 64), 40, 4.0), 40, SHAPE, 1, 2.5),
    (recovery(FullyConnected(depth=4, width=300)), 6, SHAPE, 2, 2.8),
    (recovery(FullyConnected(depth=10, width=64, activation="prelu")), 40, SHAPE, 1, 2.8),
    (recovery(UNet(channels=(8, 16))), 12, SHAPE, 1, 2.8),
    (inversion(LeNet5(cut=1), 20, 2, SGD, MixCon()), 80, GREY, 2, 2.8),
    (inversion(LeNet5(cut=2), 2, 15, STRONG), 40, COLOUR, 2, 2.8),
    (inversion(SplitMLP(widths=(600, 500), cut=1), 8, 2, STRONG, UniCon()), 20, SHAPE, 1, 2.8),
]


@pytest.mark.parametrize(("experiment", "n_images", "shape", "n_runs", "most"), CASES)
def test_the_estimate_is_above_what_is_alive_and_not_far_above(
    experiment: Experiment,
    n_images: int,
    shape: tuple[int, int, int],
    n_runs: int,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all runs of a stack at once."""
    monkeypatch.setattr(split_training, "NETWORKS_ON_CPU", n_runs)
    monkeypatch.setattr(split, "NETWORKS_ON_CPU", n_runs)
    labels = (0, 1) * (n_images // 2)
    specs = [
        RunSpec(run=k, root_seed=0, image_ids=tuple(range(n_images)), labels=labels)
        for k in range(n_runs)
    ]
    images = torch.randint(0, 256, (n_runs, n_images, *shape), dtype=torch.uint8)
    with LiveTensors() as live:
        experiment.run_stack(specs, images, torch.device("cpu"), no_progress)
    estimate = bytes_per_run(experiment, n_images, shape)
    assert 1.0 <= estimate / (live.most / n_runs) < most


INF, NAN = math.inf, math.nan
REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (Noise, {"noise_multiplier": 1.0}, "noise_multiplier=1.0 with clip=None"),
    (AutoencoderRecovery, {"level": 0.123}, r"level=0.123 is not one of training.levels=\("),
    (
        AutoencoderRecovery,
        {"masks": ("half", "holes")},
        "masks='half,holes' must be different ones",
    ),
    (AutoencoderRecovery, {"masks": ("half", "half")}, "masks='half,half'"),
    (AutoencoderRecovery, {"masks": ()}, "at least one"),
    (AutoencoderRecovery, {"sigma": 0.1, "attack": KnownMask()}, "set attack.noisy to true"),
    (AutoencoderTraining, {"lr": INF}, "lr=inf"),
    (AutoencoderTraining, {"lr": 1e-3, "lr_end": 1e-2}, "lr_end=0.01 above 0 and at most lr"),
    (AutoencoderTraining, {"lr_end": 0.0}, "lr_end=0.0 above 0"),
    (AutoencoderTraining, {"levels": ()}, r"levels=\(\)"),
    (AutoencoderTraining, {"levels": (1e-4, 1e-3)}, "each below the one before"),
    (AutoencoderTraining, {"levels": (1e-4, NAN)}, "must be positive"),
    (DDNM, {"n_steps": 1}, "n_steps=1"),
    (EDM, {"sigma_min": 0.0}, "sigma_min=0.0 must be above 0"),
    (Fitting, {"accumulate": 5, "batch_size": 4}, "accumulate=5 is more than batch_size=4"),
    (InstaHide, {"k_pub": 4, "largest": 0.1}, "largest=0.1 must be above 1/6"),
    (InstaHideRecovery, {"n_public": 0, "scheme": InstaHide(k_pub=0)}, "n_public=0"),
    (InstaHideRecovery, {"n_public": 3, "scheme": InstaHide(k_pub=4)}, "scheme.k_pub=4"),
    (InstaHideRecovery, {"scheme": Mixing.as_a_whole(2)}, "n_encodings=0: a theory scheme needs"),
    (InstaHideRecovery, {"n_encodings": 7}, "n_encodings=7"),
    (KKT, {"clipped": 1.0}, r"clipped=1\.0 is a share of a picture's values: from 0, below 1"),
    (KKT, {"n_classes": 3}, "n_classes=3 with training.loss.kind='bce'"),
    (KKT, {"n_classes": 1}, "n_classes=1 with"),
    (KKT, {"training": Training(loss=Loss(kind="ce"))}, "kind='ce' with attack.condition='binary'"),
    (
        KKT,
        {"attack": KKTAttack(condition="multiclass")},
        "'bce' with attack.condition='multiclass'",
    ),
    (KKTAttack, {"n_candidates": 7}, "n_candidates=7 must be even and at least 2"),
    (KKTAttack, {"n_candidates": 0}, "n_candidates=0 must be even and at least 2"),
    (
        KKTAttack,
        {"n_candidates": 1, "condition": "multiclass"},
        "n_candidates=1 must be at least 2$",
    ),
    (KKTAttack, {"save_at": ()}, r"save_at=\(\) must be increasing"),
    (KKTAttack, {"save_at": (5, 5)}, r"save_at=\(5, 5\) must be increasing"),
    (MixCon, {"beta": -1e-4}, "beta=.* must be 0, or its balance"),
    (MixCon, {"beta": 1e-17}, "beta=.* must be 0, or its balance"),
    (MixCon, {"beta": INF}, "beta=.* must be 0, or its balance"),
    (Network, {"widths": ()}, r"widths=\(\)"),
    (Network, {"widths": (5, 0)}, r"widths=\(5, 0\)"),
    (NoiseAware, {"fills": (), "gammas": ()}, "both empty"),
    (NoiseAware, {"fills": (INF,)}, "fills="),
    (Optimiser, {"rule": "gd", "momentum": 1.0}, "momentum=1.0 is outside"),
    (Optimiser, {"momentum": 0.9}, "momentum=0.9 has no meaning for adadelta"),
    (Optimiser, {"rule": "adam", "momentum": 0.9}, "momentum=0.9 has no meaning for adam"),
    (Optimiser, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) are not"),
    (Phase, {"prior_back": 0.0}, "prior_back=0.0 must be above 0 and below prior_runs=10.0"),
    (Phase, {"prior_back": 10.0}, "prior_back=10.0 must be above 0 and below"),
    (Phase, {"prior_runs": INF}, "prior_runs=inf"),
    (Phase, {"prior_back": NAN}, "prior_back=nan"),
    (Search, {"lr": (0.0, 1.0)}, r"search\.lr=\(0.0, 1.0\) is not"),
    (Search, {"lam_lr": (2.0, 1.0)}, r"search\.lam_lr=\(2.0, 1.0\) is not"),
    (Search, {"sigma": (0.1, INF)}, r"search\.sigma=\(0.1, inf\) is not"),
    (Search, {"lam_min": (NAN, 1.0)}, r"search\.lam_min=\(nan, 1.0\) is not"),
    (Search, {"alpha": (2.0, 1.0)}, r"search\.alpha=\(2.0, 1.0\) is not"),
    (StrongInversion, {"starts": ()}, "starts is empty"),
    (Training, {"span": True}, "span=True with optimiser.rule='adadelta'"),
    (UNet, {"channels": ()}, r"channels=\(\) must name"),
    (UNet, {"channels": (4, 0)}, r"channels=\(4, 0\)"),
]


@pytest.mark.parametrize(
    ("kind", "settings", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", None)
)
def test_a_setting_out_of_range_is_refused(
    kind: type[Any], settings: dict[str, Any], message: str
) -> None:
    refuses(message, kind, **settings)
