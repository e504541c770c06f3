"""Check in the time of an SVD whether the span attack can work on a network's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.attacks.span.search import FEWEST, SpanAttack, checked, sources_for
from recon_core.attacks.span.separator import Separator
from recon_core.attacks.span.sources import biases_tell
from recon_core.attacks.span.subspace import Subspace
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.preflight import Finding, Level, Outlook, Preflight, broken_weights

FULL = 0.9
"""Share of the neurons from which the number of directions says nothing of the number of images."""
MANY = 300  # images up to which most came back when measured
SMALL = 0.3  # share of torch's default standard deviation up to which a start is small
FEW_LEFT, MOST_LEFT = 0.05, 1.02  # shares of its start between which training leaves a layer
HELD = 0.9  # share of the images' energy in the span above which most came back when measured
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
    """(findings on the attack on one network, the span if there is one).

    `rows`: what is to be taken apart, by default the weights. `separator`: one that is given.
    `unknown_layers`: (name, kind) of tensors beside the layers. `images`: the training images as
    the network saw them, mean subtracted.
    """
    rows, numbers, span = rows or weight_rows(parameters), dict[str, float](), None
    findings = list(broken_weights(parameters))
    if architecture.network.conv is not None:
        text = "the first layer is one, whose weights span patches, not images; use --method kkt."
        findings.append(Finding("stop", "a convolution", text))
    elif rows.source == "weights" and rows.start is not None and torch.equal(rows.start, rows.rows):
        text = "--initial holds the trained weights themselves: give those from before training."
        findings.append(Finding("stop", "the start", text))
    if not findings:
        try:
            span = rows.subspace(attack.n_images, attack.surplus)
        except ValueError as error:
            findings.append(Finding("stop", "first layer", f"{error}."))
    for name, kind in unknown_layers:
        text = f"{name} ({kind}) is no layer that the engine knows. Behind the first layer it may "
        text += "make signs and labels wrong; in front of it, no images come back."
        findings.append(Finding("warning", "unknown layers", text))
    if span is not None:
        numbers |= {
            "width": float(parameters.weights[0].shape[1]),
            "d": float(architecture.d),
            "directions_above_noise": float(span.n_signal),
            "directions_taken": float(len(span.vectors)),
            "noise_std": span.noise,
            "noise_edge": span.edge,
            "largest_singular_value": float(span.values[0]),
        }
        if span.start_shares and rows.source == "weights":
            numbers["start_share"] = sum(span.start_shares) / len(span.start_shares)
        findings.append(_directions(attack, span, rows))
        findings.append(_telling_apart(attack, span, architecture, separator))
        if rows.source == "weights":
            findings.append(_start(span, numbers.get("start_share"), architecture.d))
        text = "told by the first layer's biases; labels by the network."
        if span.vectors.shape[1] == architecture.d or not biases_tell(span.vectors):
            text = "no biases, or they do not tell (their start or a subtracted mean hides it): "
            text += "signs and labels are the network's, some of them wrong, scales the range of "
            text += "pixels'."
        findings.append(Finding("ok", "sign and scale", text))
        if images is not None:
            basis = torch.linalg.qr(span.vectors[:, : architecture.d].double().mT).Q
            x = images.to(basis)
            share = float((x @ basis).square().sum() / x.square().sum().clamp_min(1e-300))
            numbers["images_in_span"] = share
            text = f"{share:.1%} of the energy of the {len(images)} images given is in the span."
            level: Level = "ok" if share >= HELD else "warning"
            text += "" if share >= HELD else " Check the images, the mean and the start."
            findings.append(Finding(level, "images in the span", text))
    levels = {finding.level for finding in findings}
    outlook: Outlook = "none" if "stop" in levels else "open" if "warning" in levels else "good"
    return Preflight(tuple(findings), outlook, numbers), span


def _directions(attack: SpanAttack, span: Subspace, rows: SpanRows) -> Finding:
    k, n, asked, (width, e) = len(span.vectors), span.n_signal, attack.n_images, rows.rows.shape
    is_open = rows.source != "weights" and not span.ends_sharply and asked is None
    level: Level = "ok"
    text = "about so many images, or a few more, can be told apart."
    if max(n, k) < 2:
        level, text = "stop", "nothing to take apart. Give the start (--initial), if it hides more."
    elif asked is not None and asked >= width:
        level, text = "stop", "only mixtures come back of as many images as neurons. Use --method "
        text += "kkt, or a lower --n-images-guess."
    elif n >= FULL * width or is_open:
        level, text = "warning", "their end is hidden by Adam or Adadelta, half precision or "
        text += "noise, or by as many images as neurons, of which only mixtures come back. "
        known = "That there are fewer is the assumption of --n-images-guess."
        text += known if asked else "If you know their number, give --n-images-guess."
    elif n > MANY:
        level, text = "warning", "of so many images a part comes back, and mixtures beside them."
    seen = f"width {width}, {e:,} inputs, {n} directions above the noise (standard deviation "
    seen += f"{span.noise:.2g}, edge {span.edge:.2g}), {k} taken"
    return Finding(level, "directions", f"{seen}: {text}")


def _telling_apart(
    attack: SpanAttack, span: Subspace, architecture: Architecture, given: Separator | None
) -> Finding:
    shape, k = architecture.shape, len(span.vectors)
    try:
        separator = checked(sources_for(attack, span, shape, given), k, shape, given)
    except ValueError as error:
        return Finding("stop", "features", f"{error}.")
    text = "by plain filters."
    if separator is not None:
        text = f"by a network that learned from {separator.card.n_pictures:,} pictures "
        text += f"({separator.card.source}). Of images of another kind fewer come back; {LEARN}."
    elif attack.sources == "auto" and span.ends_sharply and k >= FEWEST:
        text = f"by plain filters. A separator of such images would find more: {LEARN}."
    return Finding("ok", "images are told apart", text)


def _start(span: Subspace, share: float | None, d: int) -> Finding:
    if share is None:
        is_good = span.noise <= SMALL * (3 * d) ** -0.5
        text = f"unknown: noise of standard deviation {span.noise:.2g} hides what is weaker. Give "
        text += "--initial, the weights before training, and more comes back."
    else:
        is_good = FEW_LEFT <= share <= MOST_LEFT
        text = f"{share:.1%} of --initial is left in the first layer and was taken off."
        more = " Unless weight decay removed it, it is of another training: then leave it out."
        text += "" if is_good else more
    return Finding("ok" if is_good else "warning", "the start", text)
