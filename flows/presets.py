"""The named recipes, each named after what it reproduces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from flows.naming import unknown_name
from flows.papers import EXPERIMENTS, gradient_descent, restoration_evaluate
from flows.recipe import Recipe, RestorerPlan, one_phase
from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.attacks.span.attack import SpanAttack
from recon_core.balance import Curation
from recon_core.duplicates import THRESHOLD as NEAR_DUPLICATE
from recon_core.experiments import KKT, AutoencoderRecovery, InstaHideRecovery
from recon_core.restore import (
    CPU_RESTORERS,
    CPU_TRAININGS,
    EDM,
    PAPER_TRAININGS,
    BFDnCNN,
    RegressionUNet,
    Restorer,
    Training,
)
from recon_core.sampling import Phase, Sampling
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.network import Network
from recon_core.victims.training import Training as VictimTraining
from tasks.evaluation.settings import Evaluation
from tasks.training.validation import Validation

PRESETS: dict[str, Callable[[], Recipe]] = {}
"""The builders of this module by their names, with dashes."""


def _preset(build: Callable[[], Recipe]) -> Callable[[], Recipe]:
    name = build.__name__.replace("_", "-")

    @functools.wraps(build)
    def named() -> Recipe:
        return replace(build(), name=name)

    PRESETS[name] = named
    return named


def small_restorers(longer: int = 1, *, fitted: bool = False) -> dict[str, RestorerPlan]:
    """Both restorers at the size that a CPU trains in about `longer` minutes. `fitted`: they go as
    far from a picture as helps images that they have not seen."""
    plans = {}
    for name in ("bf_dncnn", "edm"):
        training = CPU_TRAININGS[name]
        training = replace(training, n_steps=longer * training.n_steps)
        validation = Validation()
        if fitted:
            validation = Validation(every=training.n_steps, n_samples=8, strength="fitted")
        plans[name] = RestorerPlan(
            restorer=CPU_RESTORERS[name], training=training, validation=validation
        )
    return plans


def half_hour_restorers(
    *, fitted: bool = False, regress: bool = False, mirror: bool = True
) -> dict[str, RestorerPlan]:
    """Both restorers as one core trains them in half an hour each, on tens of thousands of pairs;
    `fitted` as of `small_restorers`. `regress`: EDM's network as a regression, too, and both
    regressions answer over mirror sides. `mirror`: mirrored images are like the others.

    They work on patches of 2x2 pixels, which makes them see the whole picture. BF-DnCNN is half as
    deep as the paper's and wider, since it learns faster so. EDM diffuses residuals (.33 of [-1, 1]
    in these pairs); it sees more of the high noise levels, where the reconstruction says what the
    noisy residual does not, and samples from 15 times the residuals on. Mirrored pairs and the best
    of the validations keep both from learning these few pairs by heart.
    """
    training = Training(
        n_steps=5_000,
        batch_size=64,
        lr=2e-3,
        warmup_images=6_400,
        decay="cosine",
        ema_halflife_images=10_000,
        mirror=mirror,
    )
    validation = Validation(every=1000, n_pairs=256, n_parts=2, n_samples=4, keep="best")
    if fitted:
        validation = replace(validation, strength="fitted")
    restorers: dict[str, Restorer] = {
        "bf_dncnn": BFDnCNN(
            depth=10,
            n_channels=96,
            patch=2,
            loss_terms="mse+ssim",
            ssim_weight=0.3,
            mirrored=regress and mirror,
        ),
        "edm": EDM(
            size="mini", target="residual", sigma_data=0.33, P_mean=0.0, sigma_max=5.0, n_steps=12
        ),
    }
    if regress:
        restorers["unet"] = RegressionUNet(
            size="mini", loss_terms="mse+ssim", ssim_weight=0.3, mirrored=mirror
        )
    return {
        name: RestorerPlan(restorer=restorer, training=training, validation=validation)
        for name, restorer in restorers.items()
    }


def kkt(width: int, n_images: int, *, epochs: int, save_at: tuple[int, ...]) -> KKT:
    """The generation run of the image restoration paper at another size, with twice as many
    candidates as images."""
    return KKT(
        victim=Network(widths=(width, width)),
        training=VictimTraining(epochs=epochs),
        attack=KKTAttack(n_candidates=2 * n_images, save_at=save_at),
    )


def sweep(n_attacks: int, *, images: int, per_part: int) -> Sampling:
    """One victim of `images` images, attacked `n_attacks` times."""
    return Sampling(
        images_per_run=images,
        phases=(Phase(n_runs=n_attacks),),
        runs_per_part=per_part,
        attacks_per_victim=n_attacks,
    )


@_preset
def demo() -> Recipe:
    """Minutes on two cores: small victims of 20 tiles of photographs, small restorers.

    Victims that are evaluated are attacked both ways. The separation looks at twice as many
    directions as there are images, as the search has candidates; it counts a hundred, since
    Adadelta leaves the images' span, and takes twenty times as long for as many good images.
    """
    return Recipe(
        experiment=kkt(128, 20, epochs=1000, save_at=(100, 200, 400, 800)),
        sampling=one_phase(24, images=20, per_part=4),
        heldout=one_phase(4, images=20, per_part=2),
        further_attacks=(SpanAttack(n_images=40, sources="independent"),),
        curation=Curation(n_subsets=20),
        restorers=small_restorers(fitted=True),
        evaluation=Evaluation(n_samples=8),
    )


@_preset
def cifar_small() -> Recipe:
    """Victims of 20 CIFAR-10 images at width 200: most images come back well. An hour on two
    cores; give the images with `--data`."""
    return Recipe(
        data="folder:cifar10",
        experiment=kkt(200, 20, epochs=3000, save_at=(100, 200, 300, 500, 800, 1400, 2000)),
        sampling=one_phase(48, images=20, per_part=4),
        heldout=one_phase(8, images=20, per_part=2),
        restorers=small_restorers(longer=4),
    )


@_preset
def cifar_hundred() -> Recipe:
    """Victims of 100 CIFAR-10 images at width 200: most images come back badly, as in the image
    restoration paper, so there is something to restore. Three hours on two cores; give the images
    with `--data`.

    These runs bring back some 3,900 different images, so nine of ten examples are mixtures of all
    others. Restored are pictures of iteration 1,400, where the training pairs are best.
    """
    return Recipe(
        data="folder:cifar10",
        experiment=kkt(200, 100, epochs=3000, save_at=(100, 200, 300, 500, 800, 1400, 2000)),
        sampling=one_phase(176, images=100, per_part=4),
        heldout=one_phase(12, images=100, per_part=2),
        curation=Curation(min_iteration=500, mixture_fraction=9.0, mixture_strength=1.3),
        restorers=half_hour_restorers(),
        evaluation=Evaluation(restore_iterations=(1400,)),
    )


@_preset
def digits() -> Recipe:
    """Victims of 50 digits at width 200, even against odd: two of five images are identified from
    the attack alone, given the weights, and 100,000 pairs take some forty minutes of a core.
    Give the images with `--data`, such as `folder:PATH` of MNIST's pictures; they are read in grey.

    A mirrored digit is no digit, so restorers do not learn mirrored pairs.
    """
    return Recipe(
        data="folder:digits",
        channels=1,
        experiment=kkt(200, 50, epochs=3000, save_at=(100, 200, 300, 500, 800, 1400, 2000)),
        sampling=one_phase(300, images=50, per_part=4),
        heldout=one_phase(20, images=50, per_part=2),
        curation=Curation(min_iteration=300, mixture_fraction=1.0),
        restorers=half_hour_restorers(regress=True, mirror=False),
        evaluation=Evaluation(restore_iterations=(1400,), span=True, rounds=5),
    )


@_preset
def smoke() -> Recipe:
    """Every stage in seconds, for tests: nothing it produces means anything."""
    return Recipe(
        experiment=kkt(32, 4, epochs=200, save_at=(50, 100)),
        sampling=one_phase(4, images=4, per_part=2),
        heldout=one_phase(2, images=4, per_part=1),
        curation=Curation(n_subsets=4),
        restorers=small_restorers(),
        evaluation=Evaluation(n_samples=2),
    )


@_preset
def restoration() -> Recipe:
    """The image restoration paper at its own size: 150,000 runs, one 500-image victim that is
    attacked 303 times, and restorers trained as in sections 3 and 4, but for what `PAPER_TRAININGS`
    names."""
    paper: dict[str, Restorer] = {"bf_dncnn": BFDnCNN(), "edm": EDM()}
    return Recipe(
        data="cifar10:cifar-10-batches-py",
        heldout_experiment=restoration_evaluate(),
        heldout=sweep(303, images=500, per_part=3),
        near_duplicates=NEAR_DUPLICATE,
        restorers={
            name: RestorerPlan(restorer=restorer, training=PAPER_TRAININGS[name])
            for name, restorer in paper.items()
        },
        evaluation=Evaluation(restore_iterations="all"),
    )


@_preset
def restoration_small() -> Recipe:
    """Every step of `restoration` in a night on one GPU: 600 runs, smaller restorers, and a victim
    of 500 images that is attacked 30 times, in float32 where the paper has float64."""
    evaluated = restoration_evaluate()
    return replace(
        restoration(),
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


@_preset
def restoration_cpu() -> Recipe:
    """Every step of `restoration` in five hours on two cores: the pairs and restorers of
    `cifar-hundred`, and a victim of 100 images that is attacked 32 times.

    The victim is trained as in the paper, for 1e6 epochs of gradient descent, but has width 200 and
    is trained and attacked in float32, where the paper has float64. Attacks have a twentieth of the
    paper's iterations, which lam reaches only at higher rates.
    """
    evaluated = restoration_evaluate()
    assert isinstance(evaluated.attack, KKTAttack)
    return replace(
        cifar_hundred(),
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


@_preset
def span_hundred() -> Recipe:
    """The victims of `cifar-hundred`, attacked by separating the span of their first layer: nearly
    all images come back. Two hours on two cores; give the images with `--data`.

    What a separated picture lacks is neither noise nor blur but that parts of other images are left
    in it; mixtures of images show restorers the same, which go as far as helps images that they
    have not seen. They are also evaluated inside the span, beside the most that is to be had there.
    """
    start = cifar_hundred()
    assert isinstance(start.experiment, KKT)
    return replace(
        start,
        experiment=replace(start.experiment, attack=SpanAttack(sources="independent")),
        curation=replace(start.curation, min_iteration=0, mixture_fraction=1.0),
        restorers=half_hour_restorers(fitted=True),
        evaluation=Evaluation(span=True),
    )


@_preset
def span_pairs() -> Recipe:
    """Pairs by the hundred thousand: victims of 100 images that are trained for a hundred epochs,
    which leave the same span as whole trainings, with a start of three times the size, so that the
    separation brings back four of ten images and restorers have something to learn. It is cut
    short, a third of the iterations for nearly as many images. A million pairs are
    `--set sampling.phases.0.n_runs=25000`; give the images with `--data`.

    Victims that are evaluated are trained for 3,000 epochs and attacked as they give most, by twice
    as many sources as directions: what restores them must not know how pairs were made.
    """
    start = span_hundred()
    brief = KKT(
        augment_p=0.0,
        victim=Network(widths=(200, 200), init_std_first=3e-4),
        training=VictimTraining(epochs=100, optimiser=gradient_descent(0.5), span="auto"),
        attack=SpanAttack(sources="independent", n_independent=100, overcomplete=1.0, surplus=0.1),
    )
    whole = replace(brief.training, epochs=3000, optimiser=gradient_descent(0.2))
    return replace(
        start,
        experiment=brief,
        sampling=one_phase(200, images=100, per_part=4),
        heldout_experiment=replace(brief, training=whole, attack=SpanAttack(sources="independent")),
        restorers=half_hour_restorers(fitted=True, regress=True),
    )


@_preset
def span_paper() -> Recipe:
    """The span attack at the size of the image restoration paper: victims 3072-1000-1000-1 of 300
    images, and one of 500 held-out images, which the paper attacked 303 times. For a GPU.

    Victims are trained by gradient descent, which stays in the span of the images and is computed
    in it: hours each on two cores, where the paper's Adadelta takes days. Restorers learn and are
    evaluated as in `span-hundred`.
    """
    evaluated = restoration_evaluate()
    experiment = replace(
        evaluated,
        training=replace(evaluated.training, epochs=200_000, span="auto"),
        attack=SpanAttack(sources="independent"),
        dtype="float32",
    )
    return Recipe(
        data="cifar10:cifar-10-batches-py",
        experiment=replace(experiment, keep="confident"),
        sampling=one_phase(40, images=300, per_part=1),
        heldout=one_phase(1, images=500, per_part=1),
        curation=Curation(mixture_fraction=1.0, mixture_strength=1.3),
        near_duplicates=NEAR_DUPLICATE,
        restorers=half_hour_restorers(fitted=True),
        evaluation=Evaluation(span=True),
    )


def paper_experiment(name: str) -> Recipe:
    """One victim of an experiment of the papers and its attacks; no restorer.

    Days on a CPU: it is for a GPU, and a base for `--set` at smaller sizes.
    """
    experiment, n_images, n_attacks = EXPERIMENTS[name]
    per_part = next(n for n in (4, 3, 1) if n_attacks % n == 0)
    runs = sweep(n_attacks, images=n_images, per_part=per_part)
    return Recipe(
        name=name,
        data="cifar10:cifar-10-batches-py",
        experiment=experiment(),
        sampling=runs,
        heldout=runs,
    )


PRESETS |= {name: functools.partial(paper_experiment, name) for name in EXPERIMENTS}


@_preset
def autoencoder_demo() -> Recipe:
    """The recovery of the autoencoder paper from images to a report, in minutes on two cores:
    autoencoders of 20 tiles of photographs, all six masks, our method for unknown masks, small
    restorers.

    Restorers learn from recoveries alone: noise around a mean image is not what an attack on an
    autoencoder gives.
    """
    return Recipe(
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


@_preset
def autoencoder_paper() -> Recipe:
    """Autoencoder paper, section 4 and appendix C.1, D, at its own size: a fully connected
    autoencoder of 10 layers on 600 Tiny ImageNet images of 64x64, to a loss of 1e-8, six masks, the
    paper's method; no restorer. Open: the widths, Adam's rates, how often the method alternates.

    Hours on a GPU: it is a base for `--set`. Another of the paper's cells:
    `--set experiment.victim.depth=20 --set experiment.attack.gamma=0.1`.
    """
    runs = one_phase(1, images=600, per_part=1)
    return Recipe(
        data="tiny-imagenet:tiny-imagenet-200",
        encoding="float32",
        experiment=AutoencoderRecovery(keep="all"),
        sampling=runs,
        heldout=runs,
        curation=Curation(noise_fraction=0.0),
    )


@_preset
def instahide_small() -> Recipe:
    """InstaHide on photographs, in minutes on two cores: 20 private tiles a run, recovered from 240
    encodings of 12 epochs with two of 40 public tiles each; no restorer."""
    return Recipe(
        encoding="float32",
        experiment=InstaHideRecovery(n_public=40, scheme=InstaHide(k_pub=2, n_epochs=12)),
        sampling=one_phase(8, images=60, per_part=1),
        heldout=one_phase(2, images=60, per_part=1),
        curation=Curation(noise_fraction=0.0),
    )


@_preset
def instahide_challenge() -> Recipe:
    """The InstaHide challenge, which the InstaHide paper describes, at its size: 100 private
    CIFAR-10 images in 5,000 encodings of 50 epochs with four public images each, and mixed labels;
    no restorer.

    The public images, 1,000 of CIFAR-10, are known; the challenge's are ImageNet's. For a GPU.
    """
    runs = one_phase(1, images=1100, per_part=1)
    return Recipe(
        data="cifar10:cifar-10-batches-py",
        encoding="float32",
        experiment=InstaHideRecovery(n_public=1000, scheme=InstaHide(k_pub=4, n_epochs=50)),
        sampling=runs,
        heldout=runs,
        curation=Curation(noise_fraction=0.0),
    )


def preset(name: str) -> Recipe:
    """The named recipe; ValueError with the nearest name if there is none."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]()
