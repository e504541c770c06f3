"""Evidence of known training images for a network's chances to leak them: fit, margins, and the
share of its weights that they explain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recon_core.victims.diagnostics import (
    Explained,
    all_rivals,
    explained,
    gram_systems,
    margin_gradients,
)
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters

Level = Literal["ok", "warning", "stop"]
Condition = Literal["binary", "multiclass", "regression"]

FIRST_GOOD, FIRST_POOR = 0.35, 0.6
"""Unexplained share of the first layer: below the first most images came back when measured, above
the second nearly none."""
MAX_ROWS = 2000
NEAR_MARGIN = 1.1
FITS_REGRESSION = 0.1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: fine, a reservation, or a reason not to attack."""

    level: Level
    subject: str
    text: str


@dataclass
class Evidence:
    """Findings about one network (R = 1) and images, and the numbers behind them."""

    architecture: Architecture
    parameters: Parameters
    condition: Condition
    numbers: dict[str, float] = field(default_factory=dict)

    def findings(self, images: Float[Tensor, "n d"], labels: Tensor | None) -> Iterator[Finding]:
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
