"""Findings on whether the span attack can work on a network's weights, as fast as an SVD is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.attacks.span.search import FEWEST, sources_for, views_of
from recon_core.attacks.span.separator import Separator
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.sources import biases_tell
from recon_core.attacks.span.subspace import Subspace
from recon_core.victims.evidence import Finding, Level
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.preflight import Outlook, Preflight, broken_weights

FULL = 0.9
"""Share of the neurons from which on as many directions say nothing about the number of images."""
MANY = 300
"""Images up to which most came back when measured."""
STANDARD = 0.3
"""Share of torch's default standard deviation, 1 / sqrt(3 d), from which on a start is no small
one."""
STRANGER, SHRUNK, FITS = 0.05, 0.98, 1.02
"""Share of the start that is left: below the first it is of no help, below the second weight decay
shrank it; no training leaves more than the third."""
UNMOVED = 1e-6
HELD = 0.9
"""Share of the images' energy in the span above which most came back when measured."""
UNKNOWN = {"normalisation": "a normalisation layer", "activation": "a learned activation"}
BEHIND = (
    "Behind the first layer it leaves the span alone, but signs and labels are read from a network "
    "without it and may be wrong; in front of it, what comes back are no images."
)
ELSEWHERE = " The rest cannot come back: other images, another mean, or a start that hides it."
HOW_MANY = "If you know how many images there are, give --n-images-guess."
ONE = (
    "one direction is one picture, and nothing to take apart. Training moved the layer in one "
    "direction only, or its start hides the others: give the start (--initial)."
)
ALL = (
    "as many images as neurons, so all is in the span and only mixtures come back. Use --method "
    "kkt, or a lower --n-images-guess."
)
MIXTURES = "either there are as many images as neurons, and only mixtures come back"
LEFT = "the training rule (Adam, Adadelta) has left the images' span"
HIDDEN = "their end is hidden, as by L2 weight decay in Adam, half precision or noise"
LEARN = "`palimpsest train separator` learns one from public images of the same kind"


def span_preflight(
    attack: SpanAttack,
    architecture: Architecture,
    parameters: Parameters,
    rows: SpanRows | None = None,
    *,
    separator: Separator | None = None,
    unknown_layers: Sequence[tuple[str, str]] = (),
    images: Float[Tensor, "n d"] | None = None,
) -> tuple[Preflight, Subspace | None]:
    """(what speaks for and against the attack on one network, the span if there is one).

    `rows`: what is to be taken apart, by default the weights. `separator`: one that is given.
    `unknown_layers`: (name, kind) of tensors beside the layers. `images`: the training images as
    the network saw them, mean subtracted.
    """
    rows = rows or weight_rows(parameters)
    findings = []
    for name, kind in unknown_layers:
        text = f"{name} is {UNKNOWN.get(kind, 'no layer that the engine knows')}. {BEHIND}"
        findings.append(Finding("warning", "unknown layers", text))
    numbers: dict[str, float] = {}
    span, stops = _span(attack, architecture, parameters, rows)
    findings += stops
    if span is not None:
        width, d = parameters.weights[0].shape[1:]
        numbers |= {
            "width": float(width),
            "d": float(d),
            "directions_above_noise": float(span.n_signal),
            "directions_taken": float(len(span.vectors)),
            "noise_std": span.noise,
            "noise_edge": span.edge,
            "largest_singular_value": float(span.values[0]),
        }
        findings.append(_directions(attack, span, rows, width, d))
        findings += _telling_apart(attack, span, architecture, separator)
        if rows.source == "weights":
            if span.start_shares:
                numbers["start_share"] = sum(span.start_shares) / len(span.start_shares)
            findings.append(_start(span, numbers.get("start_share"), d))
        findings.append(_sign(span, parameters))
        if images is not None:
            basis = torch.linalg.qr(span.vectors[:, :d].double().mT).Q
            x = images.to(basis)
            share = float((x @ basis).square().sum() / x.square().sum().clamp_min(1e-300))
            numbers["images_in_span"] = share
            text = f"{share:.1%} of the energy of the {len(images)} images given is in the span."
            text += "" if share >= HELD else ELSEWHERE
            level: Level = "ok" if share >= HELD else "warning"
            findings.append(Finding(level, "images in the span", text))
    levels = {finding.level for finding in findings}
    outlook: Outlook = "none" if "stop" in levels else "open" if "warning" in levels else "good"
    return Preflight(tuple(findings), outlook, numbers), span


def _span(
    attack: SpanAttack, architecture: Architecture, parameters: Parameters, rows: SpanRows
) -> tuple[Subspace | None, list[Finding]]:
    """The span, or what stands against one."""
    if architecture.network.conv is not None:
        text = "the first layer is a convolution, whose weights span patches and not images; use "
        text += "--method kkt, which can work if the network was trained with weight decay."
        return None, [Finding("stop", "a convolution", text)]
    if stops := list(broken_weights(parameters)):
        return None, stops
    weight, start = rows.rows.double(), rows.start
    moved = torch.inf
    if start is not None and rows.source == "weights" and start.shape == weight.shape:
        moved = float((weight - start).norm() / weight.norm())
    if moved <= UNMOVED:
        text = "--initial holds the trained weights themselves: nothing is left to take apart. "
        text += "Give the weights from before training, or leave --initial out."
        return None, [Finding("stop", "the start", text)]
    try:
        span = rows.subspace(
            architecture.shape, n_directions=attack.n_images, surplus=attack.surplus
        )
    except ValueError as error:
        return None, [Finding("stop", "first layer", f"{error}.")]
    return span, []


def _directions(attack: SpanAttack, span: Subspace, rows: SpanRows, width: int, d: int) -> Finding:
    k, n, full, asked = len(span.vectors), span.n_signal, len(rows.rows), attack.n_images
    is_hidden = rows.source != "weights"
    why = "half precision or added noise hides their end" if is_hidden else LEFT
    ask = HOW_MANY if asked is None else "That there are fewer is --n-images-guess's assumption."
    cases: list[tuple[bool, Level, str]] = [
        (max(n, k) < 2, "stop", ONE),
        (asked is not None and asked >= full, "stop", ALL),
        (n >= FULL * full, "warning", f"{MIXTURES}, or {why}. {ask}"),
        (is_hidden and not span.ends_sharply and asked is None, "warning", f"{HIDDEN}. {ask}"),
        (n > MANY, "warning", "of so many images a part comes back, with mixtures beside them."),
        (True, "ok", "about so many images, or a few more, can be told apart."),
    ]
    level, text = next((level, text) for holds, level, text in cases if holds)
    said = (
        f"width {width}, {d:,} inputs, {n} directions above the noise (standard deviation "
        f"{span.noise:.2g}, edge {span.edge:.2g}), {k} taken"
    )
    return Finding(level, "directions", f"{said}: {text}")


def _telling_apart(
    attack: SpanAttack, span: Subspace, architecture: Architecture, given: Separator | None
) -> Iterator[Finding]:
    shape, subject = architecture.shape, "images are told apart"
    pictures = span.vectors[:, : architecture.d].unflatten(1, shape)
    try:
        views = views_of(sources_for(attack, span, shape, given), pictures[None], given)
    except ValueError as error:
        yield Finding("stop", "features", f"{error}.")
        return
    if views.separator is not None:
        card = views.separator.card
        text = f"by a network that learned from {card.n_pictures:,} pictures ({card.source}). Of "
        yield Finding("ok", subject, f"{text}images of another kind fewer come back; {LEARN}.")
    elif attack.sources == "auto" and span.ends_sharply and len(pictures) >= FEWEST:
        text = f"by plain filters: no separator for images of {'x'.join(map(str, shape))} comes "
        text += f"with the package. More would come back with one: {LEARN} (--separator)."
        yield Finding("ok", subject, text)


def _start(span: Subspace, share: float | None, d: int) -> Finding:
    standard = (3 * d) ** -0.5
    if share is None:
        text = f"unknown: noise of standard deviation {span.noise:.2g} hides what is weaker. "
        if span.noise <= STANDARD * standard:
            return Finding("ok", "the start", f"{text}With it (--initial) more would come back.")
        text += (
            f"That is a standard start (torch's has {standard:.2g}), and large: few images come "
        )
        text += "back without it. Give --initial, the weights before training."
        return Finding("warning", "the start", text)
    text = f"{share:.1%} of --initial is left in the first layer and was taken off"
    if STRANGER <= share <= FITS:
        text += "." if share >= SHRUNK else " (weight decay shrinks it)."
        return Finding("ok", "the start", text)
    if abs(share) < STRANGER:
        text += ": nearly nothing. Weight decay has removed it, or it is the start of another "
        text += "training; either way it does not help."
    else:
        text += ", which no training leaves: it is the start of another training, another "
        text += (
            "checkpoint, or the first layer spans all there is to compare with. Leave it out if "
        )
        text += "the pictures are poor."
    return Finding("warning", "the start", text)


def _sign(span: Subspace, parameters: Parameters) -> Finding:
    text = "told by the first layer's biases; labels by the network."
    if parameters.biases[0] is None or not biases_tell(span.vectors):
        why = "the biases do not tell (their start, or a mean that was subtracted, hides it)"
        text = "no biases in the first layer" if parameters.biases[0] is None else why
        text += ": signs and labels are read from the network, some of them wrongly, and scales "
        text += "from the range of pixels."
    return Finding("ok", "sign and scale", text)
