"""Chances of an attack on these weights, in words, before any time is spent on it.

The attack rests on theta = sum_i lam_i y_i grad phi(theta; x_i) (image restoration paper, eq. 1),
which holds for a homogeneous network trained to the end (KKT paper, section 3), or for any network
trained with weight decay (KKT paper, eq. 14); by neither for one trained with a `FeatureDefence`,
which weights do not show.

Thresholds are measured on victims 3072-200-200-1 of 20 or 100 CIFAR images. What decides is the
*first layer*: one that started small, or lost its start to weight decay, gave most images back,
even where the layers above were full of initial noise; one that was mostly initial noise gave
nothing back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from recon_core.victims.diagnostics import (
    Explained,
    all_rivals,
    explained,
    gram_systems,
    homogeneity_gap,
    margin_gradients,
    spectrum,
)
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters

Outlook = Literal["good", "open", "poor", "none"]

SIGNAL_GOOD, SIGNAL_POOR = 0.8, 0.3
"""Share of the first dense layer's squared norm that is signal: above the first most images came
back when measured, below the second none did."""
BALANCED = 2.0
ROUNDING = 1e-6
MIN_WIDTH = 16

Level = Literal["ok", "warning", "stop"]
Condition = Literal["binary", "multiclass", "regression"]

FIRST_GOOD, FIRST_POOR = 0.35, 0.6
"""Unexplained share of the first layer: below the first most images came back when measured, above
the second nearly none."""
MAX_ROWS = 2000
NEAR_MARGIN = 1.1
FITS_REGRESSION = 0.1

UNKNOWN = {
    "normalisation": (
        "normalisation layers",
        "a normalisation layer. It undoes the scale of the weights before it, so phi is not "
        "homogeneous in them and training does not end where the attack looks; the engine has no "
        "such layer. Attack not possible with this engine: train the network without it.",
    ),
    "activation": (
        "learned activations",
        "an activation with learned numbers, which the engine does not have. Attack not possible "
        "with this engine: train with relu, leaky_relu or gelu.",
    ),
    "other": (
        "unknown tensors",
        "no layer that the engine knows. If the network uses it, the attack is not possible with "
        "this engine; if not, save the network without it.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: fine, a reservation, or a reason not to attack."""

    level: Level
    subject: str
    text: str


@dataclass(frozen=True)
class Preflight:
    """All findings, in words, and the numbers behind them. `outlook`: "good", "open" or "poor"
    chances; "none" if any finding is a stop."""

    findings: tuple[Finding, ...]
    outlook: Outlook
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        return self.outlook == "none"

    @property
    def reason(self) -> str:
        stops = [finding for finding in self.findings if finding.level == "stop"]
        return " ".join(f"{finding.subject}: {finding.text}" for finding in stops)

    @property
    def verdict(self) -> str:
        stops = list(dict.fromkeys(f.subject for f in self.findings if f.level == "stop"))
        about = list(dict.fromkeys(f.subject for f in self.findings if f.level == "warning"))
        if self.outlook == "none":
            return f"An attack cannot work here: {', '.join(stops)}."
        if self.outlook == "poor":
            return f"An attack is unlikely to bring anything back: {', '.join(about)}."
        if self.outlook == "open":
            return f"An attack may work, with reservations: {', '.join(about) or 'see below'}."
        return "An attack can work" + (f"; look at {', '.join(about)}." if about else ".")


def preflight(
    architecture: Architecture,
    parameters: Parameters,
    *,
    condition: Condition | None = None,
    unknown_layers: Sequence[tuple[str, str]] = (),
    images: Float[Tensor, "n d"] | None = None,
    labels: Float[Tensor, " n"] | Int[Tensor, " n"] | None = None,
) -> Preflight:
    """A verdict whether an attack on one network (R = 1) can work, and why.

    `unknown_layers`: (name, kind) of tensors beside the layers, kinds as in `UNKNOWN`. `images`:
    the training images with the mean subtracted; `labels`: -1 and +1 for one output, classes for
    several. `condition`: default by the number of outputs. Raises ValueError for more than one
    network or labels that do not fit.
    """
    if parameters.n_runs != 1:
        raise ValueError(f"preflight looks at one network at a time, got {parameters.n_runs}")
    by_outputs: Condition = "binary" if architecture.n_outputs == 1 else "multiclass"
    check = _Check(architecture, parameters, condition or by_outputs)
    findings: list[Finding] = []
    for name, kind in unknown_layers:
        subject, text = UNKNOWN.get(kind, UNKNOWN["other"])
        findings.append(Finding("stop", subject, f"{name} is {text}"))
    if stops := list(broken_weights(parameters)):
        findings += stops
    else:
        findings += [*check.homogeneity(), *check.first_layer(), *check.balance()]
        if images is not None:
            findings += check.images(images, labels)
    stopped = any(f.level == "stop" for f in findings)
    return Preflight(tuple(findings), "none" if stopped else check.outlook(), check.numbers)


def broken_weights(parameters: Parameters) -> Iterator[Finding]:
    """Weights that make every further question meaningless."""
    if not bool(parameters.isfinite().all()):
        text = "some weights are NaN or infinite: training diverged; use an earlier save."
        yield Finding("stop", "weights that are not finite", text)
        return
    for layer, weight in enumerate(parameters.weights, start=1):
        if not bool(weight.any()):
            text = (
                f"all weights of layer {layer} are zero, so the output does not depend on the "
                "image: nothing was learned, or something else was saved."
            )
            yield Finding("stop", "a dead layer", text)


@dataclass
class _Check:
    """Findings about one network (R = 1), and the numbers behind them."""

    architecture: Architecture
    parameters: Parameters
    condition: Condition
    numbers: dict[str, float] = field(default_factory=dict)

    def outlook(self) -> Outlook:
        numbers, network = self.numbers, self.architecture.network
        if "first_layer_unexplained" in numbers:
            unexplained = numbers["first_layer_unexplained"]
            good, possible = unexplained <= FIRST_GOOD, unexplained <= FIRST_POOR
        else:
            signal = numbers.get("signal_share", SIGNAL_POOR)
            good, possible = signal >= SIGNAL_GOOD, signal >= SIGNAL_POOR
        easy = network.activation != "gelu" and network.conv is None
        if good and easy and numbers.get("train_accuracy", 1.0) == 1:
            return "good"
        return "open" if possible else "poor"

    def homogeneity(self) -> Iterator[Finding]:
        gap = homogeneity_gap(self.architecture, self.parameters)
        self.numbers["homogeneity_gap"] = gap
        if self.architecture.homogeneous and gap <= ROUNDING:
            text = f"phi(c theta) = c^{self.architecture.n_layers} phi(theta), as the theory needs."
            yield Finding("ok", "homogeneity", text)
            return
        gelu = self.architecture.network.activation == "gelu"
        text = (
            f"{'GELU' if gelu else 'biases beyond the first layer'}: with all weights doubled the "
            f"output is {gap:.0%} off a homogeneous network's. Without weight decay no theorem "
            "says that training ends where the attack looks; with weight decay it does all the "
            "same (002, eq. 14). Without the theorem "
        )
        text += (
            "4 of 20 images came back where a ReLU network gave 17."
            if gelu
            else "images came back all the same when measured (13 of 20)."
        )
        yield Finding("warning", "homogeneity", text)

    def first_layer(self) -> Iterator[Finding]:
        """The first dense layer: how much of it is signal."""
        index = 0 if self.architecture.network.conv is None else 1
        if index:
            text = (
                "images come back through a convolution only if the network was trained with "
                "weight decay (002, section 6.1), and slowly: after 2,000 iterations 1 of 20 did. "
                "Use many attacks with random hyperparameters."
            )
            yield Finding("warning", "a convolution", text)
        weight = self.parameters.weights[index][0]
        if min(weight.shape) < MIN_WIDTH:
            return
        found = spectrum(weight)
        name = "first layer" if index == 0 else "first dense layer"
        self.numbers |= {
            "signal_share": found.signal_share,
            "signal_directions": found.n_signal,
            "noise_std": found.noise_std,
        }
        noise = (
            f"noise of standard deviation {found.noise_std:.2g} (torch's default start has "
            f"{(3 * weight.shape[1]) ** -0.5:.2g})"
        )
        if found.n_signal == 0:
            text = (
                f"its singular values are those of {noise}, and no direction stands out: the "
                "network is untrained, or training has left no trace that an attack can find."
            )
            yield Finding("stop", f"{name} is pure noise", text)
            return
        share = f"{found.signal_share:.1%} of it is signal"
        start = f"{share}, in {found.n_signal} directions above {noise}"
        if found.signal_share >= SIGNAL_GOOD:
            text = (
                f"{start}: it started small, or weight decay removed its start. Such victims gave "
                "most images back. Training by gradient descent leaves about as many directions "
                "as there are images, Adadelta and Adam leave more."
            )
            yield Finding("ok", name, text)
        elif found.signal_share >= SIGNAL_POOR:
            text = (
                f"{start}: the rest is left from initialisation, which no image explains. Some "
                "images may come back; longer training with weight decay would bring more."
            )
            yield Finding("warning", name, text)
        else:
            text = (
                f"{start}: it is mostly what it was initialised with, as after a standard "
                "initialisation without weight decay. Such victims gave nothing back when measured "
                "(0 of 20 images). Networks leak with weight decay or with a small first layer."
            )
            yield Finding("warning", f"{name} is mostly noise", text)

    def balance(self) -> Iterator[Finding]:
        """At a KKT point of a homogeneous network ||theta_l||^2 = sum_i lam_i y_i phi(x_i)."""
        pairs = zip(self.parameters.weights, self.parameters.biases, strict=True)
        squares = [
            float(sum(t.double().square().sum() for t in pair if t is not None)) for pair in pairs
        ]
        for layer, square in enumerate(squares, start=1):
            self.numbers[f"squared_norm_{layer}"] = square
        ratio = max(squares) / min(squares)
        self.numbers["layer_imbalance"] = ratio
        if not self.architecture.homogeneous:
            return
        listed = " : ".join(f"{square:.3g}" for square in squares)
        if ratio <= BALANCED:
            text = f"the layers' squared norms are {listed}; at a KKT point they are equal."
            yield Finding("ok", "balance of the layers", text)
            return
        heaviest = squares.index(max(squares))
        text = (
            f"the layers' squared norms are {listed}, and at a KKT point they are equal: the "
            "network as a whole is not near one, and the residual of the attack will stay high. "
        )
        if heaviest == 0:
            text += "The first layer, which the attack lives off, is the heaviest: a bad sign."
        else:
            text += (
                f"Layer {heaviest + 1} carries most, probably still its initial weights. By itself "
                "that is harmless: victims with a small first layer are like this, and gave back "
                "16 to 18 of 20 images."
            )
        harmless = heaviest > 0 and self.numbers.get("signal_share", 0.0) >= SIGNAL_GOOD
        yield Finding("ok" if harmless else "warning", "balance of the layers", text)

    def images(self, images: Float[Tensor, "n d"], labels: Tensor | None) -> Iterator[Finding]:
        """Fit, margins and stationarity for images with the mean subtracted. `labels`: -1 and +1
        for one output (default: what the network says), classes for several, targets under
        regression. Raises ValueError if they do not fit or are missing."""
        if labels is not None and len(labels) != len(images):
            raise ValueError(f"{len(labels)} labels for {len(images)} images; give one each")
        if self.condition == "multiclass" and labels is None:
            raise ValueError("images of a multiclass network need labels: classes from 0")
        wide = self.parameters.map(lambda tensor: tensor.double())
        x = images.to(wide.weights[0])
        output = self.architecture.forward(wide, x.unsqueeze(0)).output[0]
        classes = output[:, 0].sign() if labels is None else labels.to(output.device)
        if self.condition == "regression":
            of_margin = torch.ones_like(output)
            if labels is not None:
                yield self._regression(output, classes)
        else:
            of_margin = margin_gradients(output, classes)
            yield self._classifier(output, classes)
        n, n_rivals = len(x), output.shape[1] - 1
        if n > MAX_ROWS:
            text = f"not computed for {n} images; give {MAX_ROWS} or fewer."
            yield Finding("warning", "stationarity", text)
            return
        if n_rivals > 1 and n * n_rivals <= MAX_ROWS:
            # Every rival has its own multiplier; with one each, ties would go unexplained.
            of_margin, x = all_rivals(classes, output.shape[1]), x.repeat_interleave(n_rivals, 0)
        systems = gram_systems(self.architecture, self.parameters, x, of_margin)
        found = explained(systems, free_sign=self.condition == "regression")
        yield self._stationarity(found, n)

    def _regression(self, output: Float[Tensor, "n 1"], targets: Tensor) -> Finding:
        wanted = targets.to(output)
        loss = float(F.mse_loss(output[:, 0], wanted))
        self.numbers["train_loss"] = loss
        text = f"the mean squared error on the images is {loss:.3g}."
        if loss <= FITS_REGRESSION * float(wanted.square().mean()):
            return Finding("ok", "fit", text)
        text += " The network does not fit them: other images, other targets, or another mean."
        return Finding("warning", "fit", text)

    def _classifier(self, output: Float[Tensor, "n o"], labels: Tensor) -> Finding:
        one = output.shape[1] == 1
        y = labels.to(output.dtype) if one else labels.long()
        margin = Loss(kind="bce" if one else "ce").margins(output[None], y[None])[0]
        n, n_right = len(margin), int((margin > 0).sum())
        smallest, largest = float(margin.min()), float(margin.max())
        n_near = int((margin <= smallest * NEAR_MARGIN).sum()) if smallest > 0 else 0
        loss = F.softplus(-margin).mean() if one else F.cross_entropy(output, y)
        self.numbers |= {
            "train_accuracy": n_right / n,
            "train_loss": float(loss),
            "margin_min": smallest,
            "margin_max": largest,
            "n_near_margin": n_near,
        }
        if n_right < n:
            text = (
                f"{n - n_right} of {n} images are on the wrong side (loss {float(loss):.3g}). The "
                "theory needs all of them right: train longer, or check that these are the "
                "training images, with their labels, mean and standard deviation."
            )
            return Finding("warning", "fit", text)
        text = (
            f"all {n} images are classified right (loss {float(loss):.3g}); margins from "
            f"{smallest:.3g} to {largest:.3g}, {n_near} of {n} within 10 % of the smallest. In "
            "theory only images at the smallest margin can come back."
        )
        return Finding("ok", "fit and margins", text)

    def _stationarity(self, found: Explained, n: int) -> Finding:
        n_support = found.n_support(n)
        self.numbers |= {
            "unexplained": found.residual,
            "first_layer_unexplained": found.first_layer,
            "n_support": n_support,
        }
        for layer, left in enumerate(found.layer_residuals, start=1):
            self.numbers[f"unexplained_{layer}"] = left
        text = (
            f"with these images and the best multipliers, {found.residual:.1%} of theta stays "
            f"unexplained, of the first layer by itself {found.first_layer:.1%}; {n_support} "
            f"of {n} images carry weight. "
        )
        if found.first_layer <= FIRST_GOOD:
            text += "Victims with so little unexplained gave most images back."
            return Finding("ok", "stationarity", text)
        if found.first_layer <= FIRST_POOR:
            text += "Some of the images may come back; longer training would help."
            return Finding("warning", "stationarity", text)
        text += (
            "That leaves little to find, unless training images are missing here, or the network "
            "saw them with another mean or scale."
        )
        return Finding("warning", "stationarity", text)
