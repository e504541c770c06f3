"""The preprocessing of a given network's inputs, as its first layer and pictures beside it show:
their order, the mean that was subtracted, and the standard deviation they were divided by."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.inputs import (
    InputOrder,
    better_order,
    channel_scales,
    orders_of,
    shares_in_span,
    smoother_order,
    subtracted,
)
from recon_core.attacks.span.search import SpanAttack, separator_for
from recon_core.attacks.span.separator import Separator
from recon_core.sampling import binary_labels
from recon_core.victims.network import Parameters
from recon_core.victims.preflight import Finding
from storage.documents import read_array
from storage.errors import SourceError
from storage.sources.load import CIFAR_CLASSES
from storage.sources.pictures import CorruptPictureError, read_picture
from tasks.attack_file.pictures import (
    Named,
    Shape,
    by_channel,
    default_split,
    in_channels,
    read_source,
)
from tasks.families.weights.inputs import Victim

RIGHT = 0.9
"""Accuracy on its training images that shows that a network sees them in the right order."""
GAP = 0.25
"""Least gain in accuracy that shows another order; 1.5 / sqrt(n) for few images."""
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


def binary_signs(
    truth: Named, output: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"] | None, str]:
    """(-1 or +1 per picture, what they mean), by class; None if the classes do not say.

    Which class is +1 is nowhere written, so it is the way round that the network agrees with.
    """
    two = len(truth.class_names) == 2 or set(truth.class_names) <= set(CIFAR_CLASSES)
    if truth.labels is None or not two:
        return None, "labels are the network's own answers: the folders are not two classes"
    if len(truth.class_names) < 2:
        return None, "labels are the network's own answers: there is one class"
    labels, task = binary_labels(np.array(truth.labels), truth.class_names)
    signs = torch.from_numpy(labels).to(output.dtype) * 2 - 1
    agree = float((signs * output > 0).double().mean())
    return (signs if agree >= 0.5 else -signs), f"labels: {task}"


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
    splits: tuple[tuple[str | None, Literal["train", "heldout"]], ...]
    splits = ((data, "train"), (decoys, "heldout"))
    truth, others = (
        None
        if source is None
        else read_pictures(source, shape, skip_corrupt=skip_corrupt, of_sets=split)
        for source, split in splits
    )
    if truth is not None:
        truth.check_disjoint(others, SHARED)
    scale = read_std(std, shape)
    scale = victim.own_std if scale is None else scale
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
                scales = channel_scales(network, span.vectors).float()[:, None, None]
                is_estimated = not bool((scales == 1).all())
                scale = scales if is_estimated else None
    findings = check_order(victim, truth, scale, directions, said=order_given)
    chosen = choose_mean(mean, victim, (truth, others), scale, directions)
    return Known(truth, others, scale, is_estimated, chosen, findings)


def check_order(
    victim: Victim,
    truth: Named | None,
    std: Tensor | None,
    directions: Float[Tensor, "k d"] | None,
    *,
    said: bool,
) -> list[Finding]:
    """Findings on the order of inputs. Raises ValueError where training images show that it is
    another than the usual and none was `said`."""
    subject, shape, taken = "order of inputs", victim.architecture.shape, victim.order
    inputs = None if directions is None else taken.to_inputs(directions, shape)
    if truth is not None:
        shares: dict[InputOrder, Tensor] = {}
        if inputs is not None:
            shares = shares_in_span(inputs, truth.images / (1.0 if std is None else std))
        accuracy = _accuracies(victim, truth, std)
        better = better_order(shares, taken) if shares else None
        if accuracy:
            best = max(accuracy, key=lambda order: accuracy[order])
            least = max(GAP, 1.5 / len(truth) ** 0.5)
            if better is not None and accuracy[taken] >= RIGHT > accuracy[better]:
                better = None
            elif better is None and accuracy[best] >= max(RIGHT, accuracy[taken] + least):
                better = best
        if better is not None:
            why = []
            if shares:
                inside, before = (float(shares[order].mean()) for order in (better, taken))
                why.append(
                    f"so {inside:.0%} of the images' energy is in the first layer's span, else "
                    f"{before:.0%}"
                )
            if accuracy:
                right = f"{accuracy[better]:.0%} are classified right"
                why.append(f"{right}, else {accuracy[taken]:.0%}")
            text = ", ".join(why)
            options: dict[str, tuple[str, str]] = {
                "--pixel-order": (better.pixels, taken.pixels),
                "--channel-order": (better.channels, taken.channels),
            }
            fix = " ".join(f"{name} {new}" for name, (new, old) in options.items() if new != old)
            if not said:
                raise ValueError(
                    f"the inputs of {victim.file.path} are {better}, not {taken}: {text}; "
                    f"give {fix} (or --pixel-order {taken.pixels}, to go on as it is)"
                )
            text = f"{better} fits better than {taken}: {text}; give {fix}."
            return [Finding("warning", subject, text)]
    if inputs is not None and not said and 1 not in shape[1:]:
        smooth = smoother_order(inputs, shape, taken)
        if smooth is not None:
            text = (
                f"the first layer's directions are rough as {taken}, and pictures as {smooth}. "
                "If images were flattened so, as by Keras and numpy, give --pixel-order "
                f"{smooth.pixels}. Weights do not show transposed images or BGR (--channel-order)."
            )
            return [Finding("warning", subject, text)]
    return []


def _accuracies(victim: Victim, truth: Named, std: Tensor | None) -> dict[InputOrder, float]:
    """Share of the images that the network classifies right, by the order of its inputs, whether
    their mean is subtracted or not; empty where their classes are not its own."""
    n_outputs, shape = victim.architecture.n_outputs, victim.architecture.shape
    if truth.labels is None or (n_outputs > 1 and len(truth.class_names) != n_outputs):
        return {}
    conv = victim.architecture.network.conv
    weight = victim.parameters.weights[0]
    inner = shape if conv is None else (shape[0], conv.kernel, conv.kernel)
    plain = victim.order.to_inputs(weight, inner)
    found = {}
    for order in orders_of(shape):
        if conv is not None and order.pixels != "chw":
            continue
        weights = (order.to_images(plain, inner), *victim.parameters.weights[1:])
        parameters = Parameters(weights, victim.parameters.biases)
        right = []
        for mean in (torch.zeros(()), truth.mean):
            x = ((truth.images - mean) / (1.0 if std is None else std)).flatten(1)[None]
            output = victim.architecture.forward(parameters, x.to(weight)).output[0]
            if n_outputs > 1:
                right.append(float((output.argmax(1) == torch.tensor(truth.labels)).float().mean()))
                continue
            signs, _said = binary_signs(truth, output[:, 0])
            if signs is None:
                return {}
            right.append(float((signs * output[:, 0] > 0).float().mean()))
        found[order] = max(right)
    return found


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

    def mean(subtracted: Tensor | None, shown: Tensor | None, source: str, why: str = "") -> Mean:
        return Mean(subtracted, shown, source, Finding("ok", "mean", why or f"{source}."))

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
        return mean(given, shown, source)
    if truth is None:
        return mean(None, None, "unknown", "not known, so that pictures stand on grey; say --mean.")
    scale = torch.ones(shape[0], 1, 1) if std is None else std
    about = None if directions is None else subtracted(directions, truth.images / scale)
    if isinstance(about, Tensor):
        level = (about[:, None, None] * scale).clamp(0, 1).expand(shape).contiguous()
        listed = ",".join(f"{number:.2f}" for number in level[:, 0, 0].tolist())
        source = f"{listed if level.any() else 'none'}, by the first layer"
        why = f"a constant was subtracted, by the first layer: about {listed}."
        if not level.any():
            why = "nothing was subtracted, by the first layer: the images' own mean is in its span."
        return mean(level, level, source, why)
    source = "that of the training images" if decoys is None else FAIR
    if about == "own":
        why = f"one like that of these images was subtracted, by the first layer. Taken: {source}."
        return mean(own, both, source, why)
    why = (
        f"what was subtracted is not known, and the first layer does not tell. Taken: {source}. "
        "Say --mean, none if nothing was."
    )
    return Mean(own, both, source, Finding("warning", "mean", why))
