"""Settings of the family `kkt`: victims, their training, and the attacks on their weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from recon_core.attacks.family_run import FamilyRun
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.search import SpanAttack
from recon_core.matching import CLIPPED, check_clipped
from recon_core.precision import Precision
from recon_core.sampling import binary_labels
from recon_core.strict import Count, Share, Tagged
from recon_core.victims.network import Network, Released
from recon_core.victims.training import Training

Attack = Annotated[KKTAttack | SpanAttack, Tagged("kind")]
"""Any attack on a victim's weights."""


@dataclass(frozen=True, kw_only=True)
class KKTSettings(FamilyRun):
    """Settings of a run. Defaults: dataset generation of the image restoration paper, section 2.

    `n_classes`: what the victim tells apart; 2 is one output with labels 0 and 1, unless it is
    trained with the loss "ce", which has an output per class. `released`: how the attacker is
    given the weights; statistics and margins are those of the victim as it was trained. `attack`: a
    span attack with `start` "known" is given the weights that the victim started from. `n_attacks`:
    how often a victim is attacked, each time from its own start and hyperparameters; candidates are
    numbered attack after attack. `keep`: a candidate is confident if it is at some saved iteration.
    `clipped`: the share of a picture's values that may leave [0, 1] (`matching.fit_to_range`).
    `precision`: of float32 matrix products.
    """

    family: Literal["kkt"] = "kkt"
    augment_p: Share = 0.12
    n_classes: int = 2
    victim: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)
    released: Released = field(default_factory=Released)
    attack: Attack = field(default_factory=KKTAttack)
    n_attacks: Count = 1
    clipped: float = CLIPPED
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "ieee"
    after_victims: ClassVar[tuple[str, ...]] = ("released", "n_attacks", "clipped")
    attacker_knows: ClassVar[str] = (
        "The attack is given a network (its architecture and weights) and the average of its "
        "training pictures, nothing else. It searches for pictures that explain those weights "
        "as the end of training."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clipped(self.clipped)
        loss = self.training.loss.kind
        if self.n_classes < 2 or (self.n_classes > 2 and loss != "ce"):
            raise ValueError(
                f"n_classes={self.n_classes} with training.loss.kind={loss!r}; more than two "
                "classes need 'ce', two are the least"
            )
        attack, conv = self.attack, self.victim.conv
        if isinstance(attack, KKTAttack):
            if (loss == "ce") != (attack.condition == "multiclass"):
                raise ValueError(
                    f"training.loss.kind={loss!r} with attack.condition={attack.condition!r}; a "
                    "victim that is trained with 'ce' has an output per class and needs "
                    "'multiclass', others must not have it"
                )
            return
        if conv is not None:
            raise ValueError(
                "attack.kind='span' on a victim whose first layer is a convolution of "
                f"{conv.kernel}x{conv.kernel}: its weights span patches, not images; use "
                "attack.kind=kkt, or set victim.conv to null"
            )
        optimiser = self.training.optimiser
        if attack.source == "state" and not optimiser.averages_gradients:
            raise ValueError(
                f"attack.source='state' with training.optimiser.rule={optimiser.rule!r}, which "
                "keeps no average of gradients; use adam, or gd with momentum"
            )
        width = self.victim.widths[0]
        if attack.n_images is not None and attack.n_images > width:
            raise ValueError(
                f"attack.n_images={attack.n_images} directions of a first layer of {width} "
                f"neurons; it has {width} at most: lower it, or widen victim.widths"
            )

    def labels_of(
        self, labels: npt.NDArray[np.int64], names: tuple[str, ...]
    ) -> tuple[npt.NDArray[np.int64], str]:
        if self.n_outputs == 1:
            return binary_labels(labels, names)
        return super().labels_of(labels, names)

    def check_sweep(self, attacks_per_victim: int) -> None:
        if attacks_per_victim > 1 and self.n_attacks > 1:
            raise ValueError(
                f"attacks_per_victim={attacks_per_victim} with n_attacks={self.n_attacks}; in a "
                "sweep every run is one attack: set n_attacks to 1"
            )

    @property
    def n_labels(self) -> int:
        return self.n_classes

    @property
    def n_outputs(self) -> int:
        return self.n_classes if self.training.loss.kind == "ce" else 1

    @property
    def saved_iterations(self) -> tuple[int, ...]:
        return self.attack.save_at if isinstance(self.attack, KKTAttack) else (0,)


def most_candidates(experiment: KKTSettings) -> int:
    """An upper bound for the candidates of an attack."""
    attack = experiment.attack
    if isinstance(attack, KKTAttack):
        return attack.n_candidates
    return 2 * attack.n_sources(most_directions(experiment, attack))


def most_directions(experiment: KKTSettings, span: SpanAttack) -> int:
    """An upper bound for the directions of a victim. There are about as many as images, but rules
    that move every weight at its own rate (Adadelta) leave their span."""
    return span.n_images or experiment.victim.widths[0]
