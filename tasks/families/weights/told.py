"""The order of a given network's inputs and what was subtracted from them, as its first layer and
pictures beside it tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.inputs import (
    InputOrder,
    better_order,
    orders_of,
    shares_in_span,
    smoother_order,
    subtracted,
)
from recon_core.attacks.span.normalisation import channel_scales
from recon_core.attacks.span.search import separator_for
from recon_core.attacks.span.separator import Separator
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace
from recon_core.victims.network import Parameters
from recon_core.victims.preflight import Finding
from tasks.attack_file.pictures import Named, Shape
from tasks.families.weights.inputs import Victim, binary_signs, read_mean

RIGHT = 0.9
"""Accuracy on its training images from which a network is taken to have them in the right order."""
GAP = 0.25
"""Least gain in accuracy by which another order is told; 1.5 / sqrt(n) of few images."""
SAME_MEAN = 2 / 255
FAIR = "that of the training images and decoys together, which favours neither in the scores"


@dataclass(frozen=True)
class Mean:
    """`subtracted`: what the network is taken to subtract from images; `shown`: what pictures stand
    on, in scores too, and `source`, what that is. None where nothing is known."""

    subtracted: Tensor | None
    shown: Tensor | None
    source: str
    finding: Finding


def span_of(victim: Victim, attack: SpanAttack | None = None) -> Subspace | None:
    """The span of what an attack takes apart, by default of the weights; None without any."""
    attack = attack or SpanAttack()
    if victim.architecture.network.conv is not None:
        return None
    try:
        return victim.sources[attack.source].subspace(attack.n_images, attack.surplus)
    except ValueError:  # fewer directions than asked for, too
        return None


def directions_of(span: Subspace | None, shape: Shape) -> Float[Tensor, "k d"] | None:
    """Its directions over flat images (c, h, w), without biases."""
    if span is None:
        return None
    pixels = span.vectors[:, : math.prod(shape)].double()
    directions: Tensor = torch.linalg.qr(pixels.mT).Q.mT
    return directions


def std_told(
    span: Subspace | None, shape: Shape, attack: SpanAttack, given: Separator | None
) -> Float[Tensor, "c 1 1"] | None:
    """What channels were divided by, up to a common factor, where a span without noise tells."""
    if span is None or not span.ends_sharply or shape[0] == 1:
        return None
    separator = separator_for(replace(attack, sources="auto"), shape, given=given)
    if separator is None:
        return None
    scales = channel_scales(separator, span.vectors).float()[:, None, None]
    return None if bool((scales == 1).all()) else scales


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
        better = _better(shares, accuracy, taken, len(truth))
        if better is not None:
            text = _why(better, taken, shares, accuracy)
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
            return [
                Finding(
                    "warning", subject, f"{better} fits better than {taken}: {text}; give {fix}."
                )
            ]
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


def _better(
    shares: dict[InputOrder, Tensor],
    accuracy: Mapping[InputOrder, float],
    taken: InputOrder,
    n_images: int,
) -> InputOrder | None:
    best = max(accuracy, key=lambda order: accuracy[order]) if accuracy else taken
    gain = accuracy[best] - accuracy[taken] if accuracy else 0.0
    better = better_order(shares, taken) if shares else None
    if better is not None and accuracy and accuracy[taken] >= RIGHT > accuracy[better]:
        return None
    if better is None and gain >= max(GAP, 1.5 / n_images**0.5) and accuracy[best] >= RIGHT:
        return best
    return better


def _why(
    better: InputOrder,
    taken: InputOrder,
    shares: Mapping[InputOrder, Tensor],
    accuracy: Mapping[InputOrder, float],
) -> str:
    said = []
    if shares:
        inside = [float(shares[order].mean()) for order in (better, taken)]
        said.append(
            f"so {inside[0]:.0%} of the images' energy is in the first layer's span, "
            f"else {inside[1]:.0%}"
        )
    if accuracy:
        said.append(f"{accuracy[better]:.0%} are classified right, else {accuracy[taken]:.0%}")
    return ", ".join(said)


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
    """The mean that is taken, by what was said, by the file, or by the first layer. One of the
    training images alone is nearer to them than to decoys, so that beside decoys (`pictures` are
    those two) pictures stand on the mean of both."""
    shape, (truth, decoys) = victim.architecture.shape, pictures
    if text is not None:
        given = read_mean(text, None, shape)
        assert given is not None
        return _said(given, f"--mean {text}", truth, decoys)
    if victim.own_mean is not None:
        return _mean(victim.own_mean, victim.own_mean, "the file's own constant")
    if truth is None:
        return _mean(
            None, None, "unknown", "not known, so that pictures stand on grey; say --mean."
        )
    scale = torch.ones(shape[0], 1, 1) if std is None else std
    told = None if directions is None else subtracted(directions, truth.images / scale)
    if isinstance(told, Tensor):
        level = (told[:, None, None] * scale).clamp(0, 1).expand(shape).contiguous()
        listed = ",".join(f"{number:.2f}" for number in level[:, 0, 0].tolist())
        source = f"{listed if level.any() else 'none'}, by the first layer"
        why = f"a constant was subtracted, by the first layer: about {listed}."
        if not level.any():
            why = "nothing was subtracted, by the first layer: the images' own mean is in its span."
        return _mean(level, level, source, why)
    own, both = _means(truth, decoys)
    source = "that of the training images" if decoys is None else FAIR
    if told == "own":
        why = f"one like that of these images was subtracted, by the first layer. Taken: {source}."
        return _mean(own, both, source, why)
    why = (
        f"what was subtracted is not known, and the first layer does not tell. Taken: {source}. "
        "Say --mean, none if nothing was."
    )
    return Mean(own, both, source, Finding("warning", "mean", why))


def _said(given: Tensor, source: str, truth: Named | None, decoys: Named | None) -> Mean:
    if truth is not None and decoys is not None and not is_flat(given):
        own, both = _means(truth, decoys)
        if float((given - own).abs().max()) <= SAME_MEAN:
            return _mean(given, both, f"{FAIR} ({source} is that of the training images alone)")
    return _mean(given, given, source)


def _means(truth: Named, decoys: Named | None) -> tuple[Tensor, Tensor]:
    """(the mean of the training images, that of all pictures)."""
    own = truth.mean
    return own, own if decoys is None else torch.cat([truth.images, decoys.images]).mean(0)


def is_flat(mean: Float[Tensor, "c h w"]) -> bool:
    """True for one number per channel, which holds nothing of single images."""
    return bool((mean == mean[:, :1, :1]).all())


def _mean(taken_off: Tensor | None, shown: Tensor | None, source: str, why: str = "") -> Mean:
    return Mean(taken_off, shown, source, Finding("ok", "mean", why or f"{source}."))
