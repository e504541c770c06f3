"""Before an attack: everything it starts from, read and checked; what was subtracted from inputs,
and what they were divided by, as the first layer and pictures beside it show; which rows of the
network the span attack takes apart; and the chances of an attack."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.kkt.objective import Condition, KKTAttack
from recon_core.attacks.span.inputs import channel_scales as scales_by_span
from recon_core.attacks.span.inputs import subtracted
from recon_core.attacks.span.preflight import FULL, span_preflight
from recon_core.attacks.span.rows import Source
from recon_core.attacks.span.search import SpanAttack, separator_for
from recon_core.attacks.span.separator import Separator
from recon_core.attacks.span.subspace import Subspace
from recon_core.victims.diagnostics import channel_scales
from recon_core.victims.preflight import Finding, Preflight, preflight
from storage.documents import read_array
from storage.errors import SourceError
from storage.sources.pictures import CorruptPictureError, read_picture
from tasks.attack_file.comparison import chances
from tasks.attack_file.pictures import (
    Named,
    Shape,
    by_channel,
    default_split,
    in_channels,
    read_source,
)
from tasks.devices import check_memory
from tasks.families.weights.attack import WeightsJob
from tasks.families.weights.inputs import (
    DTYPES,
    Victim,
    binary_signs,
    check_order,
    read_victim,
)
from tasks.families.weights.separators import given_separator

PER_CANDIDATE = 6
"""Numbers that an attack keeps at least for each number of a candidate: itself, its gradient, the
optimiser's state."""
ONE_SCALE = 1.1
"""Channels whose scales differ by less look the same in pictures."""
PUBLISH = (
    "The checkpoint gives back what its weights hide: publish weights alone, without the "
    "optimiser's state"
)
"""Advice to whoever gives away a checkpoint whose state shows training images."""
NAMES: dict[Source, str] = {
    "gradients": "the gradients (--gradients)",
    "state": "the optimiser's state",
    "weights": "the weights",
}
MISSING: dict[Source, str] = {
    "gradients": "give --gradients FILE, the gradients of a batch by their tensors' names",
    "state": "give a checkpoint that holds one as --weights, or its file as --optimizer",
    "weights": "",
}
SAME_MEAN = 2 / 255
SHARED = (
    "decoys in SOURCE are training images, too; decoys must be pictures that the network never saw"
)
FAIR = "that of the training images and decoys together, which favours neither in the scores"


@dataclass(frozen=True)
class Mean:
    """`subtracted`: the mean that the network is assumed to subtract from images; `shown`: the mean
    that is added to pictures, in scores too, and `source`, its origin. None where unknown."""

    subtracted: Tensor | None
    shown: Tensor | None
    source: str
    finding: Finding


def read_pictures(
    source: str,
    shape: Shape,
    *,
    skip_corrupt: bool = False,
    of_sets: Literal["train", "heldout"] = "train",
) -> Named:
    """Read the pictures of a source in a victim's shape: the split `of_sets` if it has splits, else
    all. Raises SourceError if there are none or one cannot be read, ValueError for shapes that no
    picture has."""
    channels, height, width = shape
    if channels not in (1, 3) or 1 in (height, width):
        raise ValueError(
            f"pictures cannot be compared with images of {channels}x{height}x{width}: expected 1 "
            "or 3 channels; give --shape, or leave out --data and --decoys"
        )
    split = default_split(source, of_sets)
    return replace(read_source(source, split, shape, skip_corrupt=skip_corrupt), source=source)


def read_mean(text: str, shape: Shape) -> Tensor:
    """Read the mean image (c, h, w) in [0, 1] that was subtracted in training.

    `text`: "none" (nothing was subtracted: zeros), numbers like "0.49,0.48,0.45" per channel, an
    .npy file, or a picture. Raises SourceError if it cannot be read, ValueError if it does not fit.
    """
    channels, height, width = shape
    if text == "none":
        return torch.zeros(shape)
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) in (1, channels):
        mean = torch.tensor(numbers)[:, None, None].expand(shape).contiguous()
    elif numbers:
        raise ValueError(f"--mean {text} has {len(numbers)} numbers for {channels} channels")
    elif Path(text).suffix == ".npy":
        array = read_array(Path(text), "the mean image of --mean", at_most=math.prod(shape))
        if array.shape == (height, width, channels) != shape:
            array = array.transpose(2, 0, 1)
        if array.size != math.prod(shape) or array.shape not in (shape, shape[1:], (array.size,)):
            raise ValueError(f"--mean {text} has shape {array.shape}; expected {shape}")
        mean = torch.from_numpy(np.ascontiguousarray(array, np.float32)).reshape(shape)
    else:
        if height != width:
            raise ValueError(f"--mean {text}: for images of {height}x{width} give an .npy file")
        try:
            picture, is_resized = read_picture(Path(text), height)
        except CorruptPictureError as error:
            raise SourceError(f"--mean {text} cannot be read as a picture ({error})") from error
        if is_resized:
            raise ValueError(f"--mean {text} has another size than the inputs, {height}x{width}")
        mean = in_channels(picture.transpose(2, 0, 1)[None], channels)[0]
    if not bool(((mean >= 0) & (mean <= 1)).all()):
        raise ValueError(f"--mean {text} has values outside [0, 1]; expected images in [0, 1]")
    return mean


def read_std(numbers: tuple[float, ...] | None, shape: Shape) -> Tensor | None:
    """The standard deviation (c, 1, 1) that inputs were divided by in training, None if unknown.

    Raises ValueError for another number of them than one or one per channel.
    """
    if numbers is None:
        return None
    return by_channel(numbers, "std", torch.empty(1, *shape))[0].expand(shape[0], 1, 1)


@dataclass(frozen=True)
class Known:
    """Everything known beside the weights: pictures, `std` (c, 1, 1), and the mean; None where
    unknown. `is_estimated`: the span shows `std`. `findings` on the order of inputs."""

    truth: Named | None
    decoys: Named | None
    std: Tensor | None
    is_estimated: bool
    mean: Mean
    findings: list[Finding]


def read_known(
    victim: Victim,
    *,
    data: str | None,
    decoys: str | None,
    mean: str | None,
    std: tuple[float, ...] | None,
    order_given: bool,
    attack: SpanAttack | None = None,
    separator: Separator | None = None,
    skip_corrupt: bool = False,
) -> Known:
    """Read what is known beside the weights, and infer the rest from the first layer.

    `std` is inferred for a span `attack` alone; `separator`: one of the user's own. Raises
    SourceError for pictures that cannot be read, ValueError for what does not fit the network.
    """
    shape = victim.architecture.shape
    read = partial(read_pictures, shape=shape, skip_corrupt=skip_corrupt)
    truth = None if data is None else read(data)
    others = None if decoys is None else read(decoys, of_sets="heldout")
    if truth is not None:
        truth.check_disjoint(others, SHARED)
    scale = victim.own_std if std is None else read_std(std, shape)
    span = directions = None
    is_estimated, rows = False, attack or SpanAttack()
    if victim.architecture.network.conv is None:
        with suppress(ValueError):  # no span, or fewer directions than asked for
            span = victim.sources[rows.source].subspace(rows.n_images, rows.surplus)
    if span is not None:
        pixels = span.vectors[:, : math.prod(shape)].double()  # without biases
        directions = torch.linalg.qr(pixels.mT).Q.mT
        if scale is None and attack is not None and span.ends_sharply and shape[0] > 1:
            network = separator_for(replace(attack, sources="auto"), shape, given=separator)
            if network is not None:
                scales = scales_by_span(network, span.vectors).float()[:, None, None]
                is_estimated = not bool((scales == 1).all())
                scale = scales if is_estimated else None
    findings = check_order(victim, truth, scale, directions, said=order_given)
    chosen = choose_mean(mean, victim, (truth, others), scale, directions)
    return Known(truth, others, scale, is_estimated, chosen, findings)


def choose_mean(
    text: str | None,
    victim: Victim,
    pictures: tuple[Named | None, Named | None],
    std: Tensor | None,
    directions: Float[Tensor, "k d"] | None,
) -> Mean:
    """Choose the mean by `--mean`, by the file's own constant, or by the first layer.

    The mean of the training images alone is nearer to them than to decoys. So beside decoys
    (`pictures` are training images and decoys) pictures are shown on the mean of both.
    """
    shape, (truth, decoys) = victim.architecture.shape, pictures
    own = both = None
    if truth is not None:
        own = both = truth.mean
        if decoys is not None:
            both = torch.cat([truth.images, decoys.images]).mean(0)
    given = victim.own_mean if text is None else read_mean(text, shape)
    if given is not None:
        source = "the file's own constant" if text is None else f"--mean {text}"
        of_images = not bool((given == given[:, :1, :1]).all())  # not one number per channel
        shown: Tensor | None = given
        is_own = own is not None and float((given - own).abs().max()) <= SAME_MEAN
        if text is not None and decoys is not None and of_images and is_own:
            shown, source = both, f"{FAIR} ({source} is that of the training images alone)"
        return Mean(given, shown, source, Finding("ok", "mean", f"{source}."))
    if truth is None:
        why = "not known, so that pictures stand on grey; say --mean."
        return Mean(None, None, "unknown", Finding("ok", "mean", why))
    scale = torch.ones(shape[0], 1, 1) if std is None else std
    about = None if directions is None else subtracted(directions, truth.images / scale)
    if isinstance(about, Tensor):
        level = (about[:, None, None] * scale).clamp(0, 1).expand(shape).contiguous()
        listed = ",".join(f"{number:.2f}" for number in level[:, 0, 0].tolist())
        source = f"{listed if level.any() else 'none'}, by the first layer"
        why = f"a constant was subtracted, by the first layer: about {listed}."
        if not level.any():
            why = "nothing was subtracted, by the first layer: the images' own mean is in its span."
        return Mean(level, level, source, Finding("ok", "mean", why))
    source = "that of the training images" if decoys is None else FAIR
    if about == "own":
        why = f"one like that of these images was subtracted, by the first layer. Taken: {source}."
        return Mean(own, both, source, Finding("ok", "mean", why))
    why = (
        f"what was subtracted is not known, and the first layer does not tell. Taken: {source}. "
        "Say --mean, none if nothing was."
    )
    return Mean(own, both, source, Finding("warning", "mean", why))


@dataclass(frozen=True)
class PreparedWeights:
    """Checked inputs of an attack. `mean`, `std` and the pictures are None where unknown, `span`
    where there is no span attack or it cannot work, `source` (`source_record`) where there is no
    span attack."""

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
    victim, attack = victim_of(job), job.attack
    span_attack = attack if isinstance(attack, SpanAttack) else None
    if isinstance(attack, KKTAttack):
        attack.classes(victim.architecture.n_outputs, torch.device("cpu"))  # or ValueError
        numbers = attack.n_candidates * (PER_CANDIDATE + len(attack.save_at))
        check_memory(
            numbers * victim.architecture.d * DTYPES[job.dtype].itemsize,
            f"an attack with {attack.n_candidates:,} candidates",
            "lower --n-images-guess",
        )
    elif attack.source not in victim.sources:
        unused = f": {victim.unused_state}" if attack.source == "state" else ""
        raise ValueError(
            f"--source {attack.source}: {victim.file.path} comes without"
            f"{unused if victim.unused_state else ''}; {MISSING[attack.source]}"
        )
    file = given_separator(attack)
    separator = None if file is None else file[0]
    known = read_known(
        victim, data=job.data, decoys=job.decoys, mean=job.mean, std=job.std,
        order_given=(job.pixel_order, job.channel_order) != (None, None), attack=span_attack,
        separator=separator, skip_corrupt=job.skip_corrupt,
    )  # fmt: skip
    truth, std, mean = known.truth, known.std, known.mean
    centred = images = None
    if truth is not None and mean.subtracted is not None:
        centred = truth.images - mean.subtracted
        images, centred = (centred / (1.0 if std is None else std)).flatten(1), centred.flatten(1)
    unknown = [(layer.name, layer.kind) for layer in victim.layers.unknown]
    span, labels, said = None, None, ""
    if isinstance(attack, SpanAttack):
        found, span = span_preflight(
            attack, victim.architecture, victim.parameters, victim.sources[attack.source],
            separator=separator, unknown_layers=unknown, images=images,
        )  # fmt: skip
    else:
        if truth is not None and images is not None:
            labels, said = _labels(victim, truth, images, attack.condition)
        found = preflight(
            victim.architecture, victim.parameters, condition=attack.condition,
            unknown_layers=unknown, images=images, labels=labels,
        )  # fmt: skip
    if not found.stopped:
        scale = _scale(victim, centred, std, is_estimated=known.is_estimated)
        more = [*known.findings, mean.finding, *([] if scale is None else [scale])]
        found = replace(found, findings=(*found.findings, *more))
    source = None
    if span_attack is not None and victim.architecture.network.conv is None:
        source = source_record(victim, span_attack)
        found = replace(found, findings=(source_finding(victim, source), *found.findings))
    return PreparedWeights(
        victim, mean.shown, mean.source, std, truth, known.decoys, found, said,
        "kkt" if span_attack is None else "span", span, source,
    )  # fmt: skip


def victim_of(job: WeightsJob) -> Victim:
    """Read the job's network and the files beside it."""
    return read_victim(
        job.weights, arch=job.arch, shape=job.shape, activation=job.activation, leak=job.leak,
        dtype=job.dtype, initial=job.initial, optimizers=job.optimizers,
        checkpoints=job.checkpoints, gradients=job.gradients, order=job.order, pictures=job.data,
    )  # fmt: skip


def _labels(
    victim: Victim, truth: Named, images: Tensor, condition: Condition
) -> tuple[Tensor | None, str]:
    """Labels of the training images for the condition, and their origin."""
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


def _scale(
    victim: Victim, images: Tensor | None, std: Tensor | None, *, is_estimated: bool
) -> Finding | None:
    """Whether inputs were divided by a standard deviation per channel, `std` if it is known;
    `images` (n, d) are the training images less the mean."""
    subject, channels = "scale of the channels", victim.architecture.shape[0]
    if std is not None and is_estimated:
        listed = " : ".join(f"{scale:.3f}" for scale in std.flatten().tolist())
        text = f"by the span itself, channels were divided by {listed}, which is undone."
        return Finding("ok", subject, text)
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


def spans_of(victim: Victim, attack: SpanAttack) -> dict[Source, Subspace]:
    """The span of each source that has one."""
    found: dict[Source, Subspace] = {}
    for source, rows in victim.sources.items():
        with suppress(ValueError):  # without a direction, or with fewer than asked for
            found[source] = rows.subspace(attack.n_images, attack.surplus)
    return found


def best_source(victim: Victim, attack: SpanAttack) -> Source:
    """The source with most directions of those whose spans end sharply; gradients if there are any,
    since they are given to be attacked. Without a sharp end the first that has a span.

    An end behind nearly as many directions as there are neurons does not count: Adam's weights have
    one where neurons that hardly moved begin."""
    if victim.architecture.network.conv is not None or len(victim.sources) == 1:
        return "weights"
    if victim.gradients:
        return "gradients"
    rows, spans = victim.sources, spans_of(victim, attack)
    sharp = [
        source
        for source, span in spans.items()
        if span.ends_sharply and span.n_signal < FULL * len(rows[source].rows)
    ]
    if sharp:
        return max(sharp, key=lambda source: spans[source].n_signal)
    return next(iter(spans), "weights")


def source_record(victim: Victim, attack: SpanAttack) -> dict[str, Any]:
    """The source that is used, where it is from, and the directions of each, as JSON."""
    directions: dict[str, Any] = dict.fromkeys(victim.sources)
    for source, span in spans_of(victim, attack).items():
        directions[source] = {"n": span.n_signal, "ends_sharply": span.ends_sharply}
    used = {"state": victim.states, "gradients": victim.gradients}.get(attack.source, ())
    return {
        "used": attack.source,
        "from": [given.said for given in used],
        "less_start": attack.start == "known",
        "directions": directions,
        "publish_weights_alone": directions.get("state") is not None
        and any(given.is_own for given in victim.states),
    }


def source_finding(victim: Victim, record: Mapping[str, Any]) -> Finding:
    """What is taken apart, what the others would give, and what else would help."""
    start = " less --initial" if victim.start is not None else ""
    said: dict[Source, str] = {}
    directions: Mapping[Source, Any] = record["directions"]
    for source, span in directions.items():
        count = "no direction"
        if span is not None:
            sharply = "that end sharply" if span["ends_sharply"] else "above the noise"
            count = f"{span['n']} directions {sharply}"
        said[source] = f"{NAMES[source]}{start if source == 'weights' else ''}, {count}"
    text = said.pop(record["used"])
    others = list(said.values())
    text += f" ({'; '.join(record['from'])})" if record["from"] else ""
    text += f". Not used: {'; '.join(others)}." if others else "."
    if victim.unused_state:
        text += f" {victim.unused_state}."
    if record["publish_weights_alone"]:
        text += f" {PUBLISH}."
    wanted = [] if victim.start is not None else ["the start or an earlier checkpoint (--initial)"]
    wanted += [] if victim.states else ["an optimiser's state (--optimizer, --checkpoint)"]
    wanted += [] if victim.gradients else ["gradients of batches (--gradients)"]
    is_sharp = (directions[record["used"]] or {}).get("ends_sharply")
    if wanted and not is_sharp:
        text += f" More would come back with {', or '.join(wanted)}."
    return Finding("ok", "what is taken apart", text)
