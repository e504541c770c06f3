"""The settings of an evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from recon_core.experiments import KKT, Experiment
from recon_core.strict import Count, Natural, Strict, Within

Baseline = Literal["nlm", "tv", "wavelet"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""Restorers that learned nothing (`recon_core.restore.generic`), at their default settings."""

CONTROL = "mean_image"
"""The method whose only picture is the mean of the victim's training images, which shows none."""
ORACLE = "oracle"
"""The method whose pictures are the images' own projections on the victim's span."""
PROJECTED = "_projected"
"""End of the name of a method whose pictures are another's, projected on the span."""
WITHOUT_SPAN = "set evaluation.span to false"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Strict):
    """Settings of the scores. Defaults are the image restoration paper's, section 5.

    `good_threshold`: an SSIM above it is a good reconstruction (Buzaglo et al. 2023).
    `restore_iterations`: which saved iterations restorers see, "all" or "last" or some by number.
    The image restoration paper restores all of them; the last one alone costs a fraction.
    `vote_ratio`: candidates at most so many times as far as the nearest vote (KKT paper, A.1: 1.1,
    for convolutional victims 1.5). `baselines`: the classical denoisers that are scored too.
    `external`: ONNX files of restorers that were trained on something else, by the name that the
    method gets; the image restoration paper compares with Restormer. `n_samples`: of a diffusion
    model, averaged. `span`: every method of pictures also projected on the span of its victim's
    first layer, and the images' own projections beside them (`find_span`); of the
    family `kkt` alone. `rounds`: how often a restorer with one answer restores, each time what the
    last answer has in the span, before its projection is scored. `grid_rows`: images kept as
    pictures for the report, of targets and of decoys; `appendix_rows`: of all targets, the best
    first.
    """

    good_threshold: Annotated[float, Within("[-1, 1]")] = 0.4
    restore_iterations: Literal["last", "all"] | tuple[int, ...] = "last"
    vote_ratio: Annotated[float, Within("[1, inf)", fix="1 is the nearest alone")] = 1.1
    baselines: tuple[Baseline, ...] = BASELINES
    external: dict[str, str] = field(default_factory=dict)
    n_samples: Count = 20
    span: bool = False
    rounds: Count = 1
    decoy_seed: int = 0
    grid_rows: Natural = 45
    appendix_rows: Natural = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.restore_iterations:
            raise ValueError(
                "restore_iterations=(); expected 'last', 'all' or saved iterations like [800, 1400]"
            )
        if len(set(self.baselines)) < len(self.baselines):
            raise ValueError(f"baselines={self.baselines!r} names one twice; name each once")
        if self.rounds > 1 and not self.span:
            raise ValueError(
                f"rounds={self.rounds} needs span=True, in which pictures are put between them"
            )
        for name, path in self.external.items():
            if not path.lower().endswith(".onnx"):
                raise ValueError(
                    f"external.{name}={path!r} is not an .onnx file; export the restorer to ONNX"
                )
        check_names(self.external)


def check_names(restorers: Iterable[str], taken: Iterable[str] = ()) -> None:
    """Raises ValueError for a restorer whose name cannot be a method's, or is one of `taken`."""
    for name in restorers:
        reserved = name.startswith("plain") or name.endswith(PROJECTED)
        reserved |= name in (*BASELINES, "vote", "criteria", CONTROL, ORACLE)
        if not re.fullmatch("[a-z0-9_]+", name) or reserved:
            raise ValueError(
                f"restorer name {name!r} cannot name a method; use lower-case letters, digits and "
                f"'_', not a name that starts with 'plain' or ends in {PROJECTED!r} and none of "
                f"{list(BASELINES)}, 'vote', 'criteria', {CONTROL!r} and {ORACLE!r}"
            )
        if name in taken:
            raise ValueError(
                f"{name!r} names both a trained and an external restorer; rename the external one"
            )


def check_span(experiment: Experiment) -> None:
    """Raises ValueError if the victims of an experiment have no first layer whose weights span
    their images."""
    if not isinstance(experiment, KKT):
        raise ValueError(
            f"evaluation.span of experiment.family={experiment.family!r}: only victims of 'kkt' "
            f"have a dense first layer whose weights span their images; {WITHOUT_SPAN}"
        )
    conv = experiment.victim.conv
    if conv is not None:
        raise ValueError(
            f"evaluation.span of victims whose first layer is a convolution of {conv.kernel}x"
            f"{conv.kernel}: its weights span patches, not images; {WITHOUT_SPAN}, or victim.conv "
            "to null"
        )
