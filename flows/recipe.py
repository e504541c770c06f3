"""The recipe: every setting of a job in one object, the only configuration there is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import BeforeValidator

from recon_core.attacks.kkt.attacks import Attack
from recon_core.balance import Curation
from recon_core.experiments import KKT, Experiment
from recon_core.restore import Restorer
from recon_core.restore import Training as RestorerTraining
from recon_core.sampling import Phase, Sampling
from recon_core.strict import Strict
from storage.pairs.layout import Encoding
from storage.sources.load import ImageSet, Split, cached_images
from tasks.campaign.plan import Campaign
from tasks.evaluation.settings import Evaluation, check_span
from tasks.training.validation import Validation

HELDOUT_SEED_OFFSET = 1_000_003
"""Victims that are evaluated start from other weights than those the restorers learned from."""


FurtherAttack = Annotated[
    Attack, BeforeValidator(lambda given: {"kind": given} if isinstance(given, str) else given)
]
"""Settings of an attack on weights; its kind alone stands for the defaults of that kind."""


@dataclass(frozen=True, kw_only=True)
class RestorerPlan(Strict):
    """One restorer, how it is trained and how it is watched."""

    restorer: Restorer
    training: RestorerTraining = field(default_factory=RestorerTraining)
    validation: Validation = field(default_factory=Validation)


@dataclass(frozen=True, kw_only=True)
class Recipe(Strict):
    """A job from images to a report: what is attacked, what learns from it, how it is judged.

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
    training image (`tasks.dataset.curate`) are left out; None keeps all.
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

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if self.evaluation.span:
            check_span(self.heldout_experiment or self.experiment)

    def images(self, split: Split) -> ImageSet:
        """Return the images of one split, near copies included (`flows.generate` leaves them out).
        They are read once for as long as somebody holds them. Raises SourceError if they cannot
        be read."""
        skip, channels = self.skip_corrupt, self.channels
        return cached_images(self.data, split=split, skip_corrupt=skip, channels=channels)

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

    def with_sampling(self, split: Split, sampling: Sampling) -> Recipe:
        """The same, with other runs of one split."""
        if split == "train":
            return replace(self, sampling=sampling)
        return replace(self, heldout=sampling)

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
    saved = experiment.saved_iterations
    return saved if 0 in saved else ()


def one_phase(n_runs: int, *, images: int, per_part: int) -> Sampling:
    """Uniform runs of `images` images, `per_part` of them batched."""
    return Sampling(images_per_run=images, phases=(Phase(n_runs=n_runs),), runs_per_part=per_part)
