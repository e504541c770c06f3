"""Before an attack: everything it starts from, read and checked, and what its chances are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from recon_core.attacks.kkt_objective import Condition
from recon_core.victims.preflight import Preflight, preflight
from tasks.attack import AttackJob
from tasks.attack_inputs import (
    Pictures,
    Victim,
    binary_signs,
    read_mean,
    read_pictures,
    read_victim,
)


@dataclass(frozen=True)
class Prepared:
    """What an attack starts from. `mean` and the pictures are None where they are not known."""

    victim: Victim
    mean: Tensor | None
    mean_source: str
    truth: Pictures | None
    decoys: Pictures | None
    preflight: Preflight
    labels: str

    def record(self) -> dict[str, Any]:
        """The preflight as JSON."""
        found = self.preflight
        return {
            "verdict": found.verdict,
            "outlook": found.outlook,
            "findings": [asdict(finding) for finding in found.findings],
            "numbers": found.numbers,
            "labels": self.labels,
            "victim": self.victim.facts,
        }


def prepare(job: AttackJob) -> Prepared:
    """Read and check the job's files, and look at the weights.

    Raises:
        WeightsError, SourceError: a file cannot be used.
        ValueError: settings that do not fit together.
    """
    victim = read_victim(
        job.weights,
        arch=job.arch,
        shape=job.shape,
        activation=job.activation,
        leak=job.leak,
        dtype=job.dtype,
    )
    architecture = victim.architecture
    job.attack.classes(architecture.n_outputs, torch.device("cpu"))  # condition and outputs fit?
    shape = architecture.shape
    truth = None if job.data is None else read_pictures(job.data, shape)
    decoys = None if job.decoys is None else read_pictures(job.decoys, shape)
    if truth is not None and decoys is not None:
        _check_disjoint(truth, decoys)
    mean = read_mean(job.mean, truth, shape)
    images, labels, said = None, None, ""
    if truth is not None and mean is not None:
        images = (truth.images - mean).flatten(1)
        labels, said = _labels(victim, truth, images, job.attack.condition)
    unknown = [(unknown.name, unknown.kind) for unknown in victim.layers.unknown]
    found = preflight(
        architecture,
        victim.parameters,
        condition=job.attack.condition,
        unknown_layers=unknown,
        images=images,
        labels=labels,
    )
    source = job.mean or ("unknown" if mean is None else "that of the training images")
    return Prepared(victim, mean, source, truth, decoys, found, said)


def _labels(
    victim: Victim, truth: Pictures, images: Tensor, condition: Condition
) -> tuple[Tensor | None, str]:
    """Labels of the training images as the condition has them, and where they are from."""
    wide = victim.parameters.map(lambda tensor: tensor.double())
    output = victim.architecture.forward(wide, images.double().unsqueeze(0)).output[0]
    if condition == "multiclass":
        if len(truth.class_names) == victim.architecture.n_outputs:
            return truth.labels, "labels: the class folders in sorted order"
        said = (
            f"labels are the network's own answers: {len(truth.class_names)} class folders for "
            f"{victim.architecture.n_outputs} outputs"
        )
        return output.argmax(1), said
    signs, said = binary_signs(truth, output[:, 0])
    return signs, "" if signs is None and condition == "regression" else said


def _check_disjoint(truth: Pictures, decoys: Pictures) -> None:
    seen = {picture.numpy().tobytes() for picture in truth.images}
    n_shared = sum(picture.numpy().tobytes() in seen for picture in decoys.images)
    if n_shared:
        raise ValueError(
            f"{n_shared} of {len(decoys)} decoys in {decoys.source} are training images, too; "
            "decoys must be pictures that the network never saw"
        )
