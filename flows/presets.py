"""Recipes: every setting of a job in one object, and the named ones.

A recipe is the only configuration there is: flow parameters, the command line, the store's
fingerprint and the report all use this object. A preset is named after what it reproduces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal
from weakref import WeakValueDictionary

from pydantic import BeforeValidator

from flows.naming import unknown_name
from flows.papers import (
    ATTACKS_PER_VICTIM,
    EXPERIMENTS,
    IMAGES_PER_RUN,
    autoencoder_recovery,
)
from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.kkt.attacks import Attack
from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.attacks.span.attack import SpanAttack
from recon_core.balance import Curation
from recon_core.duplicates import THRESHOLD as NEAR_DUPLICATE
from recon_core.experiments import KKT, AutoencoderRecovery, Experiment, InstaHideRecovery
from recon_core.restore import (
    CPU_RESTORERS,
    CPU_TRAININGS,
    EDM,
    PAPER_TRAININGS,
    BFDnCNN,
    Restorer,
)
from recon_core.restore import Training as RestorerTraining
from recon_core.sampling import Phase, Sampling
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.network import Network
from recon_core.victims.training import Training as VictimTraining
from storage.pairs.layout import Encoding
from storage.sources.load import ImageSet, Split, load_images
from tasks.campaign.plan import Campaign
from tasks.evaluation.evaluate import Evaluation
from tasks.training.log import TensorBoard
from tasks.training.validation import Validation

FORBID = {"extra": "forbid"}
_held: WeakValueDictionary[tuple[object, ...], ImageSet] = WeakValueDictionary()
"""The images that somebody in this process works with, by what they were read from."""
HELDOUT_SEED_OFFSET = 1_000_003
"""Victims that are evaluated start from other weights than those the restorers learned from."""


FurtherAttack = Annotated[
    Attack, BeforeValidator(lambda given: {"kind": given} if isinstance(given, str) else given)
]
"""Settings of an attack on weights; its kind alone stands for the defaults of that kind."""


@dataclass(frozen=True, kw_only=True)
class RestorerPlan:
    """One restorer, how it is trained and how it is watched."""

    restorer: Restorer
    training: RestorerTraining = field(default_factory=RestorerTraining)
    validation: Validation = field(default_factory=Validation)
    tensorboard: TensorBoard = "auto"
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """From images to a report: what is attacked, what learns from it, how it is judged.

    `data`: `photos`, `digits`, `folder:PATH`, `cifar10:PATH`, `cifar100:PATH`, `mnist:PATH`,
    `fashion-mnist:PATH`, `svhn:PATH` or `tiny-imagenet:PATH`; pictures that cannot be read are an
    error, or left out of a folder with `skip_corrupt`. `channels`: 3 for RGB, grey being repeated,
    or 1 for grey, which restorers see three times. `sampling`: the victims whose pairs the
    restorers learn from; `heldout`: the victims that are evaluated, trained on the held-out split;
    `further_attacks`: what else attacks the same victims, each kind once, to be shown beside the
    experiment's own attack, which is the one that restorers restore.
    `threads`: CPU threads per part (part of the result, see `tasks.campaign.plan`). `pairs_at`: a
    folder or s3://bucket/prefix for the stores of pairs, if not in the job's folder. `encoding`:
    how they keep reconstructions. `near_duplicates`: held-out images that are so much like a
    training image (`tasks.dataset.heldout`) are left out; None keeps all.
    """

    name: str = "custom"
    data: str = "photos"
    skip_corrupt: bool = False
    channels: Literal[1, 3] = 3
    seed: int = 0
    threads: int = 1
    pairs_at: str | None = None
    encoding: Encoding = "float16"
    experiment: Experiment = field(default_factory=KKT)
    sampling: Sampling = field(default_factory=Sampling)
    heldout_experiment: Experiment | None = None
    heldout: Sampling = field(default_factory=lambda: one_phase(1, images=500, per_part=1))
    further_attacks: tuple[FurtherAttack, ...] = ()
    curation: Curation = field(default_factory=Curation)
    near_duplicates: float | None = None
    restorers: dict[str, RestorerPlan] = field(default_factory=dict)
    evaluation: Evaluation = field(default_factory=Evaluation)
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    def __post_init__(self) -> None:
        saved = _saved_by_span(self.experiment)
        if saved and self.curation.min_iteration > saved[-1]:
            raise ValueError(
                f"curation.min_iteration={self.curation.min_iteration} leaves out every pair of "
                f"the experiment's attack, which saves at {list(saved)}; set it to 0"
            )
        saved = _saved_by_span(self.heldout_experiment or self.experiment)
        wanted = self.evaluation.restore_iterations
        if saved and isinstance(wanted, tuple) and not set(wanted) <= set(saved):
            raise ValueError(
                f"evaluation.restore_iterations={list(wanted)} of an attack that saves at "
                f"{list(saved)}; choose of these, or set it to last"
            )
        _check_further(self.further_attacks, self.heldout_experiment or self.experiment)

    def images(self, split: Split) -> ImageSet:
        """The images of one split, near copies included (`flows.heldout` leaves them out).

        They are read once for as long as somebody holds them. Raises storage.errors.SourceError if
        they cannot be read.
        """
        key = (self.data, split, self.skip_corrupt, self.channels)
        held = _held.get(key)
        if held is None:
            held = load_images(
                self.data, split=split, skip_corrupt=self.skip_corrupt, channels=self.channels
            )
            _held[key] = held
        return held

    def campaign(self, split: Split) -> Campaign:
        """The campaign of one split. Held-out victims see unaugmented images, and every candidate
        is kept: an evaluation must not see only what matched."""
        if split == "train":
            return Campaign(
                experiment=self.experiment,
                sampling=self.sampling,
                root_seed=self.seed,
                threads=self.threads,
                encoding=self.encoding,
            )
        experiment = self.heldout_experiment or self.experiment
        return Campaign(
            experiment=replace(experiment, keep="all", augment_p=0.0),
            sampling=self.heldout,
            root_seed=self.seed + HELDOUT_SEED_OFFSET,
            threads=self.threads,
            encoding=self.encoding,
        )

    def further_campaigns(self) -> dict[str, Campaign]:
        """By kind, the held-out campaign with another attack: the same victims, seeds and all."""
        own = self.campaign("heldout")
        return {
            attack.kind: replace(own, experiment=replace(own.experiment, attack=attack))
            for attack in self.further_attacks
            if isinstance(own.experiment, KKT)
        }


def _check_further(attacks: tuple[Attack, ...], experiment: Experiment) -> None:
    """Raises ValueError for further attacks that the held-out victims cannot have."""
    kinds = [attack.kind for attack in attacks]
    if not kinds:
        return
    if not isinstance(experiment, KKT):
        raise ValueError(
            f"further_attacks={kinds} of experiment.family={experiment.family!r}, whose victims "
            "they cannot attack; set further_attacks to []"
        )
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"further_attacks={kinds} names a kind twice; name each once")
    if experiment.attack in attacks:
        raise ValueError(
            f"further_attacks={kinds} has the experiment's own attack, {experiment.attack.kind!r}; "
            "leave it out, or give it other settings"
        )
    if experiment.n_attacks > 1:
        raise ValueError(
            f"further_attacks={kinds} with n_attacks={experiment.n_attacks}; set n_attacks to 1, "
            "and heldout.attacks_per_victim to the number"
        )
    for attack in attacks:
        try:
            replace(experiment, attack=attack)
        except ValueError as error:
            raise ValueError(f"further_attacks: {error}; or set further_attacks to []") from error


def _saved_by_span(experiment: Experiment) -> tuple[int, ...]:
    """The iterations of an attack that separates, whose first is 0; () of any other."""
    saved = experiment.saved_iterations if isinstance(experiment, KKT) else ()
    return saved if 0 in saved else ()


def one_phase(n_runs: int, *, images: int, per_part: int) -> Sampling:
    """Uniform runs of `images` images, `per_part` of them batched."""
    return Sampling(images_per_run=images, phases=(Phase(n_runs=n_runs),), runs_per_part=per_part)


def kkt(
    width: int, n_images: int, *, epochs: int, save_at: tuple[int, ...], augment_p: float = 0.12
) -> KKT:
    """The generation run of paper 001 at another size, with twice as many candidates as images."""
    return KKT(
        augment_p=augment_p,
        victim=Network(widths=(width, width)),
        training=VictimTraining(epochs=epochs),
        attack=KKTAttack(n_candidates=2 * n_images, save_at=save_at),
    )


def sweep(n_attacks: int, *, images: int, per_part: int, n_victims: int = 1) -> Sampling:
    """Uniform victims of `images` images, each attacked `n_attacks` times."""
    return Sampling(
        images_per_run=images,
        phases=(Phase(n_runs=n_victims * n_attacks),),
        runs_per_part=per_part,
        attacks_per_victim=n_attacks,
    )


def demo() -> Recipe:
    """Minutes on two cores: small victims of 20 tiles of photographs, small restorers.

    Victims that are evaluated are attacked both ways. The separation looks at twice as many
    directions as there are images, as the search has candidates; it counts a hundred, since
    Adadelta leaves the images' span, and takes twenty times as long for as many good images.
    """
    return Recipe(
        name="demo",
        experiment=kkt(128, 20, epochs=1000, save_at=(100, 200, 400, 800)),
        sampling=one_phase(24, images=20, per_part=4),
        heldout=one_phase(4, images=20, per_part=2),
        further_attacks=(SpanAttack(n_images=40),),
        curation=Curation(n_subsets=20),
        restorers=small_restorers(),
        evaluation=Evaluation(n_samples=8),
    )


def cifar_small() -> Recipe:
    """Victims of 20 CIFAR-10 images at width 200: most images come back well. An hour on two
    cores; give the images with `--data`."""
    return Recipe(
        name="cifar-small",
        data="folder:cifar10",
        experiment=kkt(200, 20, epochs=3000, save_at=(100, 200, 300, 500, 800, 1400, 2000)),
        sampling=one_phase(48, images=20, per_part=4),
        heldout=one_phase(8, images=20, per_part=2),
        restorers=small_restorers(longer=4),
    )


def cifar_hundred() -> Recipe:
    """Victims of 100 CIFAR-10 images at width 200: most images come back badly, as in paper 001, so
    there is something to restore. Three hours on two cores; give the images with `--data`.

    The attack's first pictures show next to nothing of any image and are left out of the pairs.
    These runs bring back some 3,900 different images, so nine of ten examples are mixtures of all
    others. Restored are pictures of iteration 1,400, where the training pairs are best.
    """
    return Recipe(
        name="cifar-hundred",
        data="folder:cifar10",
        experiment=kkt(200, 100, epochs=3000, save_at=(100, 200, 300, 500, 800, 1400, 2000)),
        sampling=one_phase(176, images=100, per_part=4),
        heldout=one_phase(12, images=100, per_part=2),
        curation=Curation(min_iteration=500, mixture_fraction=9.0, mixture_strength=1.3),
        restorers=half_hour_restorers(),
        evaluation=Evaluation(restore_iterations=(1400,)),
    )


def smoke() -> Recipe:
    """Every stage in seconds, for tests: nothing it produces means anything."""
    return Recipe(
        name="smoke",
        experiment=kkt(32, 4, epochs=200, save_at=(50, 100)),
        sampling=one_phase(4, images=4, per_part=2),
        heldout=one_phase(2, images=4, per_part=1),
        curation=Curation(n_subsets=4),
        restorers=small_restorers(),
        evaluation=Evaluation(n_samples=2),
    )


def restoration() -> Recipe:
    """Paper 001 at its own size: 150,000 runs, the paper's restorers, one 500-image victim that is
    attacked 303 times."""
    return Recipe(
        name="restoration",
        data="cifar10:cifar-10-batches-py",
        experiment=EXPERIMENTS["restoration-generate"](),
        sampling=Sampling(),
        heldout_experiment=EXPERIMENTS["restoration-evaluate"](),
        heldout=sweep(303, images=500, per_part=3),
        near_duplicates=NEAR_DUPLICATE,
        restorers=paper_restorers(),
        evaluation=Evaluation(restore_iterations="all"),
    )


def restoration_small() -> Recipe:
    """Every step of `restoration` in a night on one GPU: 600 runs, smaller restorers, and a victim
    of 500 images that is attacked 30 times, in float32 where the paper has float64."""
    evaluated = EXPERIMENTS["restoration-evaluate"]()
    return replace(
        restoration(),
        name="restoration-small",
        sampling=Sampling(phases=(Phase(n_runs=400), Phase(sampler="least_seen", n_runs=200))),
        heldout_experiment=replace(
            evaluated,
            training=replace(evaluated.training, epochs=200_000, span="auto"),
            dtype="float32",
        ),
        heldout=sweep(30, images=500, per_part=3),
        restorers=half_hour_restorers(),
        evaluation=Evaluation(restore_iterations=(49_000,)),
    )


def restoration_cpu() -> Recipe:
    """Every step of `restoration` in five hours on two cores: the pairs and restorers of
    `cifar-hundred`, and a victim of 100 images that is attacked 32 times.

    The victim is trained as in the paper, for 1e6 epochs of gradient descent, but has width 200 and
    is trained and attacked in float32, where the paper has float64. Attacks have a twentieth of the
    paper's iterations, which lam reaches only at higher rates.
    """
    evaluated = EXPERIMENTS["restoration-evaluate"]()
    assert isinstance(evaluated.attack, KKTAttack)
    return replace(
        cifar_hundred(),
        name="restoration-cpu",
        heldout_experiment=replace(
            evaluated,
            victim=Network(widths=(200, 200)),
            training=replace(evaluated.training, span="auto"),
            attack=replace(
                evaluated.attack,
                n_candidates=200,
                save_at=(500, 800, 1400, 2400),
                search=Search(lr=(0.01, 1.0), lam_lr=(0.01, 3.0)),
                stop_after=500,
            ),
            dtype="float32",
        ),
        heldout=sweep(32, images=100, per_part=4),
        near_duplicates=NEAR_DUPLICATE,
        evaluation=Evaluation(restore_iterations=(2400,)),
    )


def span_hundred() -> Recipe:
    """The victims of `cifar-hundred`, attacked by separating the span of their first layer: nearly
    all images come back. Two hours on two cores; give the images with `--data`.

    What a separated picture lacks is neither noise nor blur but that parts of other images are left
    in it; mixtures of images show restorers the same.
    """
    start = cifar_hundred()
    assert isinstance(start.experiment, KKT)
    return replace(
        start,
        name="span-hundred",
        experiment=replace(start.experiment, attack=SpanAttack()),
        curation=replace(start.curation, min_iteration=0, mixture_fraction=1.0),
        evaluation=Evaluation(),
    )


def span_paper() -> Recipe:
    """The span attack at the size of paper 001: victims 3072-1000-1000-1 of 300 images, and one of
    500 held-out images, which the paper attacked 303 times; no restorer.

    Victims are trained by gradient descent, which stays in the span of the images and is computed
    in it: hours each on two cores, where the paper's Adadelta takes days.
    """
    evaluated = EXPERIMENTS["restoration-evaluate"]()
    experiment = replace(
        evaluated,
        training=replace(evaluated.training, epochs=200_000, span="auto"),
        attack=SpanAttack(),
        dtype="float32",
    )
    return Recipe(
        name="span-paper",
        data="cifar10:cifar-10-batches-py",
        experiment=replace(experiment, keep="confident"),
        sampling=one_phase(4, images=300, per_part=1),
        heldout=one_phase(1, images=500, per_part=1),
        near_duplicates=NEAR_DUPLICATE,
    )


def autoencoder_demo() -> Recipe:
    """The recovery of paper 000 from images to a report, in minutes on two cores: autoencoders of
    20 tiles of photographs, all six masks, our method for unknown masks, small restorers.

    Restorers learn from recoveries alone: noise around a mean image is not what an attack on an
    autoencoder gives.
    """
    return Recipe(
        name="autoencoder-demo",
        encoding="float32",
        experiment=AutoencoderRecovery(
            victim=FullyConnected(depth=4, width=128),
            training=AutoencoderTraining(epochs=4000, lr=1e-3, lr_end=1e-5, levels=(1e-3, 1e-4)),
            attack=NoiseAware(fills=(0.5, 0.2, 0.8), gammas=(0.5,)),
            confident_ssim=0.1,
        ),
        sampling=one_phase(24, images=20, per_part=4),
        heldout=one_phase(4, images=20, per_part=2),
        curation=Curation(n_subsets=20, noise_fraction=0.0),
        restorers=small_restorers(),
        evaluation=Evaluation(n_samples=8),
    )


def autoencoder_paper() -> Recipe:
    """Paper 000, section 4, at its own size: a fully connected autoencoder of 10 layers on 600 Tiny
    ImageNet images of 64x64, to a loss of 1e-8, six masks, the paper's method; no restorer.

    Hours on a GPU: it is a base for `--set`. Another of the paper's cells:
    `--set experiment.victim.depth=20 --set experiment.attack.gamma=0.1`.
    """
    runs = one_phase(1, images=600, per_part=1)
    return Recipe(
        name="autoencoder-paper",
        data="tiny-imagenet:tiny-imagenet-200",
        encoding="float32",
        experiment=autoencoder_recovery(),
        sampling=runs,
        heldout=runs,
        curation=Curation(noise_fraction=0.0),
    )


def instahide_small() -> Recipe:
    """InstaHide on photographs, in minutes on two cores: 20 private tiles a run, recovered from 240
    encodings of 12 epochs with two of 40 public tiles each; no restorer."""
    return Recipe(
        name="instahide-small",
        encoding="float32",
        experiment=InstaHideRecovery(n_public=40, scheme=InstaHide(k_pub=2, n_epochs=12)),
        sampling=one_phase(8, images=60, per_part=1),
        heldout=one_phase(2, images=60, per_part=1),
        curation=Curation(noise_fraction=0.0),
    )


def instahide_challenge() -> Recipe:
    """The InstaHide challenge, which paper 004 describes, at its size: 100 private CIFAR-10 images
    in 5,000 encodings of 50 epochs with four public images each, and mixed labels; no restorer.

    The public images, 1,000 of CIFAR-10, are known; the challenge's are ImageNet's. For a GPU.
    """
    runs = one_phase(1, images=1100, per_part=1)
    return Recipe(
        name="instahide-challenge",
        data="cifar10:cifar-10-batches-py",
        encoding="float32",
        experiment=InstaHideRecovery(n_public=1000, scheme=InstaHide(k_pub=4, n_epochs=50)),
        sampling=runs,
        heldout=runs,
        curation=Curation(noise_fraction=0.0),
    )


def paper_experiment(name: str) -> Recipe:
    """One victim of an experiment of the papers and its attacks; no restorer.

    Days on a CPU: it is for a GPU, and a base for `--set` at smaller sizes.
    """
    n_attacks = ATTACKS_PER_VICTIM.get(name, 1)
    per_part = next(n for n in (4, 3, 1) if n_attacks % n == 0)
    runs = sweep(n_attacks, images=IMAGES_PER_RUN[name], per_part=per_part)
    return Recipe(
        name=name,
        data="cifar10:cifar-10-batches-py",
        experiment=EXPERIMENTS[name](),
        sampling=runs,
        heldout=runs,
    )


def small_restorers(longer: int = 1) -> dict[str, RestorerPlan]:
    """Both restorers at the size that a CPU trains in about `longer` minutes."""
    plans = {}
    for name in ("bf_dncnn", "edm"):
        training = CPU_TRAININGS[name]
        training = replace(training, n_steps=longer * training.n_steps)
        plans[name] = RestorerPlan(restorer=CPU_RESTORERS[name], training=training)
    return plans


def half_hour_restorers() -> dict[str, RestorerPlan]:
    """Both restorers as one core trains them in half an hour each, on tens of thousands of pairs.

    They work on patches of 2x2 pixels, which makes them see the whole picture. BF-DnCNN is half as
    deep as the paper's and wider, since it learns faster so. EDM diffuses residuals (.33 of [-1, 1]
    in these pairs); it sees more of the high noise levels, where the reconstruction says what the
    noisy residual does not, and samples from 15 times the residuals on. Mirrored pairs and the best
    of the validations keep both from learning these few pairs by heart.
    """
    training = RestorerTraining(
        n_steps=5_000,
        batch_size=64,
        lr=2e-3,
        warmup_images=6_400,
        decay="cosine",
        ema_halflife_images=10_000,
        mirror=True,
    )
    validation = Validation(every=1000, n_pairs=256, n_parts=2, n_samples=4, keep="best")
    restorers: dict[str, Restorer] = {
        "bf_dncnn": BFDnCNN(
            depth=10, n_channels=96, patch=2, loss_terms="mse+ssim", ssim_weight=0.3
        ),
        "edm": EDM(
            size="mini", target="residual", sigma_data=0.33, P_mean=0.0, sigma_max=5.0, n_steps=12
        ),
    }
    return {
        name: RestorerPlan(restorer=restorer, training=training, validation=validation)
        for name, restorer in restorers.items()
    }


def paper_restorers() -> dict[str, RestorerPlan]:
    """Both restorers as paper 001 trained them (sections 3 and 4), but for what `PAPER_TRAININGS`
    names."""
    return {
        "bf_dncnn": RestorerPlan(restorer=BFDnCNN(), training=PAPER_TRAININGS["bf_dncnn"]),
        "edm": RestorerPlan(restorer=EDM(), training=PAPER_TRAININGS["edm"]),
    }


PRESETS: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "cifar-small": cifar_small,
    "cifar-hundred": cifar_hundred,
    "smoke": smoke,
    "restoration": restoration,
    "restoration-small": restoration_small,
    "restoration-cpu": restoration_cpu,
    "span-hundred": span_hundred,
    "span-paper": span_paper,
    **{name: partial(paper_experiment, name) for name in EXPERIMENTS},
    "autoencoder-demo": autoencoder_demo,
    "autoencoder-paper": autoencoder_paper,
    "instahide-small": instahide_small,
    "instahide-challenge": instahide_challenge,
}


def preset(name: str) -> Recipe:
    """The named recipe; ValueError with the nearest name if there is none."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]()
