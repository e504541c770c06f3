"""Findings on whether the span attack can work on a network's weights, as fast as an SVD is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.attack import check_victim
from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.attacks.span.search import FEWEST, sources_for, views_of
from recon_core.attacks.span.separator import Separator
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.sources import biases_tell
from recon_core.attacks.span.subspace import Subspace
from recon_core.victims.evidence import Finding
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.preflight import Outlook, Preflight, broken_weights

FULL = 0.9
"""Share of the neurons from which on as many directions say nothing about the number of images."""
MANY = 300
"""Images up to which most came back when measured."""
STANDARD = 0.3
"""Share of torch's default standard deviation, 1 / sqrt(3 d), from which on a start is no small
one."""
SHRUNK, FITS = 0.98, 1.02
"""Share of the start that is left: below the first, weight decay shrank it; no training leaves more
than the second."""
STRANGER = 0.05
UNMOVED = 1e-6
HELD = 0.9
"""Share of the images' energy in the span above which most came back when measured."""


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
    given = rows or weight_rows(parameters)
    check = _Check(attack, architecture, parameters, given, separator)
    findings = [*check.layers(unknown_layers), *check.first_layer()]
    if check.span is not None:
        findings += check.directions(check.span)
        findings += check.start_of(check.span) if check.rows.source == "weights" else []
        findings.append(check.sign(check.span))
        findings += [] if images is None else [*check.held(check.span, images)]
    levels = {finding.level for finding in findings}
    outlook: Outlook = "none" if "stop" in levels else "open" if "warning" in levels else "good"
    return Preflight(tuple(findings), outlook, check.numbers), check.span


@dataclass
class _Check:
    attack: SpanAttack
    architecture: Architecture
    parameters: Parameters
    rows: SpanRows
    separator: Separator | None
    span: Subspace | None = None
    numbers: dict[str, float] = field(default_factory=dict)

    def layers(self, unknown_layers: Sequence[tuple[str, str]]) -> Iterator[Finding]:
        for name, kind in unknown_layers:
            what = {"normalisation": "a normalisation layer", "activation": "a learned activation"}
            text = (
                f"{name} is {what.get(kind, 'no layer that the engine knows')}. Behind the first "
                "layer it does not touch the span, but signs and labels are read from a network "
                "without it and may be wrong; in front of it, what comes back are no images."
            )
            yield Finding("warning", "unknown layers", text)

    def first_layer(self) -> Iterator[Finding]:
        try:
            check_victim(self.architecture)
        except ValueError:
            text = (
                "the first layer is a convolution, whose weights span patches and not images; "
                "use --method kkt, which can work if the network was trained with weight decay."
            )
            yield Finding("stop", "a convolution", text)
            return
        stops = list(broken_weights(self.parameters))
        yield from stops
        if stops:
            return
        rows, start = self.rows.rows, self.rows.start
        if start is not None and start.shape == rows.shape and self.rows.source == "weights":
            moved = float((rows.double() - start).norm() / rows.double().norm())
            if moved <= UNMOVED:
                text = (
                    "--initial holds the trained weights themselves: nothing is left to take "
                    "apart. Give the weights from before training, or leave --initial out."
                )
                yield Finding("stop", "the start", text)
                return
        try:
            self.span = self.rows.subspace(
                self.architecture.shape,
                n_directions=self.attack.n_images,
                surplus=self.attack.surplus,
            )
        except ValueError as error:
            yield Finding("stop", "first layer", f"{error}.")

    def directions(self, span: Subspace) -> Iterator[Finding]:
        (width, d), n_rows = self.parameters.weights[0].shape[1:], len(self.rows.rows)
        k, n_signal = len(span.vectors), span.n_signal
        self.numbers |= {
            "width": float(width),
            "d": float(d),
            "directions_above_noise": float(n_signal),
            "directions_taken": float(k),
            "noise_std": span.noise,
            "noise_edge": span.edge,
            "largest_singular_value": float(span.values[0]),
        }
        asked = self.attack.n_images
        said = (
            f"width {width}, {d:,} inputs, {n_signal} directions above the noise (standard "
            f"deviation {span.noise:.2g}, edge {span.edge:.2g}), {k} taken"
        )
        subject = "directions"
        if max(n_signal, k) < 2:
            text = (
                f"{said}: one direction is one picture, and nothing to take apart. Training moved "
                "the first layer in one direction only, or its start hides the others: give the "
                "start (--initial)."
            )
            yield Finding("stop", subject, text)
        elif asked is not None and asked >= n_rows:
            text = (
                f"{said}: as many images as neurons, so everything is within the span and only "
                "mixtures come back. Use --method kkt, or a lower --n-images-guess."
            )
            yield Finding("stop", subject, text)
        elif n_signal >= FULL * n_rows:
            left = "the training rule (Adam, Adadelta) has left the images' span"
            if self.rows.source != "weights":
                left = "half precision or added noise hides their end"
            text = (
                f"{said}: either there are as many images as neurons, and only mixtures come back, "
                f"or {left}. "
            )
            text += (
                "If you know how many images there are, give --n-images-guess."
                if asked is None
                else "That there are fewer images is --n-images-guess's word."
            )
            yield Finding("warning", subject, text)
        elif self.rows.source != "weights" and not span.ends_sharply and asked is None:
            text = (
                f"{said}: their end is hidden, as by L2 weight decay in Adam, half precision or "
                "noise. If you know how many images there are, give --n-images-guess."
            )
            yield Finding("warning", subject, text)
        elif n_signal > MANY:
            text = f"{said}: of so many images a part comes back, with mixtures beside them."
            yield Finding("warning", subject, text)
        else:
            text = f"{said}: about so many images, or a few more, can be told apart."
            yield Finding("ok", subject, text)
        yield from self._features(span)

    def _features(self, span: Subspace) -> Iterator[Finding]:
        shape = self.architecture.shape
        pictures = span.vectors[:, : self.architecture.d].unflatten(1, shape)
        subject, given = "images are told apart", self.separator
        try:
            decided = sources_for(self.attack, span, shape, given)
            views = views_of(decided, pictures[None], given)
        except ValueError as error:
            yield Finding("stop", "features", f"{error}.")
            return
        better = "`palimpsest train separator` learns one from public images of the same kind"
        if views.separator is not None:
            card = views.separator.card
            text = (
                f"by a network that learned from {card.n_pictures:,} pictures ({card.source}). Of "
                f"images of another kind fewer come back; {better}."
            )
            yield Finding("ok", subject, text)
        elif self.attack.sources == "auto" and span.ends_sharply and len(pictures) >= FEWEST:
            size = "x".join(map(str, shape))
            text = (
                f"by plain filters: no separator for images of {size} comes with the package. More "
                f"would come back with one: {better} (--separator)."
            )
            yield Finding("ok", subject, text)

    def start_of(self, span: Subspace) -> Iterator[Finding]:
        subject = "the start"
        standard = (3 * self.parameters.weights[0].shape[2]) ** -0.5
        if not span.start_shares:
            text = f"unknown: noise of standard deviation {span.noise:.2g} hides what is weaker. "
            if span.noise > STANDARD * standard:
                text += (
                    f"That is a standard start (torch's has {standard:.2g}), and large: few images "
                    "come back without it. Give --initial, the weights before training."
                )
                yield Finding("warning", subject, text)
            else:
                yield Finding("ok", subject, text + "With it (--initial) more would come back.")
            return
        share = sum(span.start_shares) / len(span.start_shares)
        self.numbers["start_share"] = share
        said = f"{share:.1%} of --initial is left in the first layer and was taken off"
        if abs(share) < STRANGER:
            text = (
                f"{said}: nearly nothing. Weight decay has removed it, or it is the start of "
                "another training; either way it does not help."
            )
            yield Finding("warning", subject, text)
        elif not 0 < share <= FITS:
            text = (
                f"{said}, which no training leaves: it is the start of another training, another "
                "checkpoint, or the first layer spans all there is to compare with. Leave it out "
                "if the pictures are poor."
            )
            yield Finding("warning", subject, text)
        else:
            why = " (weight decay shrinks it)" if share < SHRUNK else ""
            yield Finding("ok", subject, f"{said}{why}.")

    def sign(self, span: Subspace) -> Finding:
        subject = "sign and scale"
        if self.parameters.biases[0] is not None and biases_tell(span.vectors):
            text = "told by the first layer's biases; labels by the network."
            return Finding("ok", subject, text)
        why = "no biases in the first layer"
        if self.parameters.biases[0] is not None:
            why = "the biases do not tell (their start, or a mean that was subtracted, hides it)"
        text = (
            f"{why}: signs and labels are read from the network, some of them wrongly, and scales "
            "from the range of pixels."
        )
        return Finding("ok", subject, text)

    def held(self, span: Subspace, images: Float[Tensor, "n d"]) -> Iterator[Finding]:
        basis = torch.linalg.qr(span.vectors[:, : images.shape[1]].double().mT).Q
        x = images.to(basis)
        share = float((x @ basis).square().sum() / x.square().sum().clamp_min(1e-300))
        self.numbers["images_in_span"] = share
        text = f"{share:.1%} of the energy of the {len(images)} images given is in the span."
        if share >= HELD:
            yield Finding("ok", "images in the span", text)
            return
        text += (
            " The rest cannot come back: other images, another mean, or a start that hides them."
        )
        yield Finding("warning", "images in the span", text)
