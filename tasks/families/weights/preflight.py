"""Before an attack: everything it starts from, read and checked, and what its chances are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import Condition, KKTAttack
from recon_core.attacks.span.preflight import span_preflight
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace
from recon_core.victims.diagnostics import channel_scales
from recon_core.victims.preflight import Finding, Preflight, preflight
from tasks.attack_file.pictures import Named
from tasks.attack_file.record import chances
from tasks.devices import check_memory
from tasks.families.weights.attack import WeightsJob
from tasks.families.weights.inputs import (
    DTYPES,
    Victim,
    binary_signs,
    read_pictures,
    read_std,
    read_victim,
)
from tasks.families.weights.separators import given_separator
from tasks.families.weights.sources import check_source, source_finding, source_record
from tasks.families.weights.told import check_order, choose_mean, directions_of, span_of, std_told

PER_CANDIDATE = 6
"""Numbers for each of a candidate's that an attack keeps at the least: itself, its gradient, what
the optimiser remembers."""
SHARED = (
    "decoys in SOURCE are training images, too; decoys must be pictures that the network never saw"
)
ONE_SCALE = 1.1
"""Channels whose scales differ by less look the same in pictures."""


@dataclass(frozen=True)
class PreparedWeights:
    """Start of an attack, checked. `mean`, `std` and the pictures are None where they are not
    known, `span` where no span attack is prepared, or none can be, `source` (`source_record`) where
    none is prepared."""

    victim: Victim
    mean: Tensor | None
    mean_source: str
    std: Tensor | None
    truth: Named | None
    decoys: Named | None
    preflight: Preflight
    labels: str
    method: Literal["kkt", "span"] = "kkt"
    span: Subspace | None = None
    source: dict[str, Any] | None = None

    def spectrum(self) -> dict[str, Any] | None:
        """The first layer's singular values, and the edge of the noise, as JSON."""
        if self.span is None:
            return None
        return {
            "values": [float(f"{value:.4g}") for value in self.span.values.tolist()],
            "edge": self.span.edge,
            "n_above": self.span.n_signal,
            "n_taken": len(self.span.vectors),
        }

    def record(self) -> dict[str, Any]:
        """The preflight as JSON."""
        return chances(self.preflight) | {
            "numbers": self.preflight.numbers,
            "labels": self.labels,
            "source": self.source,
            "victim": self.victim.facts,
        }


def prepare_weights(job: WeightsJob) -> PreparedWeights:
    """Read and check the job's files, and look at the weights. Raises WeightsError or SourceError
    for files that cannot be used, ValueError for settings that do not fit together."""
    victim = victim_of(job)
    shape = victim.architecture.shape
    span_attack = job.attack if isinstance(job.attack, SpanAttack) else None
    if isinstance(job.attack, KKTAttack):
        _check_candidates(job.attack, victim, job.dtype)
    else:
        check_source(victim, job.attack.source)
    truth = (
        None if job.data is None else read_pictures(job.data, shape, skip_corrupt=job.skip_corrupt)
    )
    decoys = (
        None
        if job.decoys is None
        else read_pictures(job.decoys, shape, skip_corrupt=job.skip_corrupt, of_sets="heldout")
    )
    if truth is not None:
        truth.check_disjoint(decoys, SHARED)
    std = read_std(job.std, shape)
    std = victim.own_std if std is None else std
    shown = span_of(victim, span_attack)
    directions, told = directions_of(shown, shape), None
    if std is None and span_attack is not None:
        given = given_separator(span_attack)
        told = std_told(shown, shape, span_attack, None if given is None else given[0])
    std = told if std is None else std
    about_order = check_order(victim, truth, std, directions, said=job.order is not None)
    mean = choose_mean(job.mean, victim, (truth, decoys), std, directions)
    centred = images = None
    if truth is not None and mean.subtracted is not None:
        centred = (truth.images - mean.subtracted).flatten(1)
        images = (centred.unflatten(1, shape) / (1.0 if std is None else std)).flatten(1)
    found, span, said = _outlook(job.attack, victim, truth, images)
    if not found.stopped:
        scale = _scale(victim, centred, std) if told is None else _said(told)
        more = [*about_order, mean.finding, *([] if scale is None else [scale])]
        found = replace(found, findings=(*found.findings, *more))
    source = None
    if span_attack is not None and victim.architecture.network.conv is None:
        source = source_record(victim, span_attack)
        found = replace(found, findings=(source_finding(victim, source), *found.findings))
    method: Literal["kkt", "span"] = "kkt" if span_attack is None else "span"
    return PreparedWeights(
        victim, mean.shown, mean.source, std, truth, decoys, found, said, method, span, source
    )


def victim_of(job: WeightsJob) -> Victim:
    """The job's network, with all that is given beside it."""
    return read_victim(
        job.weights, arch=job.arch, shape=job.shape, activation=job.activation, leak=job.leak,
        dtype=job.dtype, initial=job.initial, optimizers=job.optimizers,
        checkpoints=job.checkpoints, gradients=job.gradients, order=job.order, pictures=job.data,
    )  # fmt: skip


def _check_candidates(attack: KKTAttack, victim: Victim, dtype: str) -> None:
    """ValueError where condition and outputs do not fit, or no machine has room."""
    attack.classes(victim.architecture.n_outputs, torch.device("cpu"))
    numbers = attack.n_candidates * victim.architecture.d * (PER_CANDIDATE + len(attack.save_at))
    check_memory(
        numbers * DTYPES[dtype].itemsize,
        f"an attack with {attack.n_candidates:,} candidates",
        "lower --n-images-guess",
    )


def _outlook(
    attack: KKTAttack | SpanAttack, victim: Victim, truth: Named | None, images: Tensor | None
) -> tuple[Preflight, Subspace | None, str]:
    """(what the weights say, the span they have, where labels are from)."""
    unknown = [(unknown.name, unknown.kind) for unknown in victim.layers.unknown]
    if isinstance(attack, SpanAttack):
        given = given_separator(attack)
        found, span = span_preflight(
            attack,
            victim.architecture,
            victim.parameters,
            victim.sources[attack.source],
            separator=None if given is None else given[0],
            unknown_layers=unknown,
            images=images,
        )
        return found, span, ""
    labels, said = None, ""
    if truth is not None and images is not None:
        labels, said = _labels(victim, truth, images, attack.condition)
    found = preflight(
        victim.architecture,
        victim.parameters,
        condition=attack.condition,
        unknown_layers=unknown,
        images=images,
        labels=labels,
    )
    return found, None, said


def _labels(
    victim: Victim, truth: Named, images: Tensor, condition: Condition
) -> tuple[Tensor | None, str]:
    """Labels of the training images as the condition has them, and where they are from."""
    wide = victim.parameters.map(lambda tensor: tensor.double())
    output = victim.architecture.forward(wide, images.double().unsqueeze(0)).output[0]
    if condition == "multiclass":
        known = truth.labels is not None
        if known and len(truth.class_names) == victim.architecture.n_outputs:
            return torch.tensor(truth.labels), "labels: the class folders in sorted order"
        said = (
            f"labels are the network's own answers: {len(truth.class_names)} class folders for "
            f"{victim.architecture.n_outputs} outputs"
        )
        return output.argmax(1), said
    signs, said = binary_signs(truth, output[:, 0])
    return signs, "" if signs is None and condition == "regression" else said


def _said(told: Tensor) -> Finding:
    listed = " : ".join(f"{scale:.3f}" for scale in told.flatten().tolist())
    text = f"by the span itself, channels were divided by {listed}, which is undone."
    return Finding("ok", "scale of the channels", text)


def _scale(victim: Victim, images: Tensor | None, std: Tensor | None) -> Finding | None:
    """Whether inputs were divided by a standard deviation per channel, `std` if it is given;
    `images` (n, d) are the training images less the mean."""
    subject, channels = "scale of the channels", victim.architecture.shape[0]
    if channels == 1:
        return None  # the scale of all pixels together is lost anyway
    found = None
    if images is not None and victim.architecture.network.conv is None:
        found = channel_scales(victim.parameters.weights[0][0], images, channels)
    if found is None:
        text = (
            "Were inputs divided by a standard deviation per channel, as torchvision's Normalize "
            "does? Weights alone do not show it: if so, give --std, for example 0.247,0.243,0.262."
        )
        return Finding("ok", subject, text) if std is None else None
    said = torch.ones(channels) if std is None else std.flatten()
    ratio, listed = found / said, " : ".join(f"{scale:.2f}" for scale in found.tolist())
    text = f"by the first layer and these images, channels were divided by {listed}"
    if float(ratio.max() / ratio.min()) <= ONE_SCALE:
        return Finding("ok", subject, f"{text}, as is {'assumed' if std is None else 'said'}.")
    numbers = ",".join(f"{scale / 4:.3f}" for scale in found.tolist())
    text += f". Give --std in this ratio, {numbers}, or colours come back distorted. "
    text += "(Training by Adam or Adadelta undoes a division, by gradient descent it does not.)"
    return Finding("warning", subject, text)
