"""Findings on whether training images can be recovered from an autoencoder f, from f(x) alone.

Recovery (`plug_and_play`) rests on training images being fixed points of f that draw in what is
near them, while other images are not (autoencoder paper, section 2; Radhakrishnan et al. 2020). How
strongly f contracts around x is the spectral radius of its Jacobian J, by power iteration with J v
= (f(x + e v) - f(x - e v)) / 2 e: below 1 x is an attractor of x <- f(x). ADMM needs less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.attacks.plug_and_play import Function, evaluated
from recon_core.victims.preflight import Finding, Outlook, Preflight

NOT_FITTED = 1e-2
"""Train loss above which f does not reconstruct the images at all."""
WELL_FITTED = 1e-4
"""The highest train loss of the autoencoder paper."""
MEMORISED = 10.0
"""The loss of other images over that of training images, below which f memorises little."""
IDENTITY = 0.05
"""The share of white noise's variance that is lost, below which f is close to the identity."""
RANGE = (-0.25, 1.25)
SAME = 1e-3
N_STEPS = 40
"""Steps of the power iteration, of which the second half is measured."""


def reconstruction_errors(f: Function, x: Float[Tensor, "n c h w"]) -> Float64[Tensor, " n"]:
    """The mean square of f(x) - x, per image."""
    return (evaluated(f, x).double() - x.double()).square().flatten(1).mean(1)


def spectral_radii(
    f: Function,
    x: Float[Tensor, "n c h w"],
    generators: Sequence[torch.Generator],
    *,
    n_steps: int = N_STEPS,
    step: float | None = None,
) -> Float64[Tensor, " n"]:
    """The largest |eigenvalue| of the Jacobian of f at each image.

    The growth of a random vector (one generator per image), as the geometric mean over the second
    half of the steps, so that a pair of complex eigenvalues does not disturb it. `step` is the
    length of the differences; by default what the precision of x allows. Raises ValueError unless
    there is a generator per image and two steps.
    """
    if len(generators) != len(x) or n_steps < 2:
        raise ValueError(
            f"{len(generators)} generators for {len(x)} images and n_steps={n_steps}; expected one "
            "per image and at least 2 steps"
        )
    length = step or (1e-5 if x.dtype == torch.float64 else 1e-2)
    drawn = [torch.randn(x.shape[1:], generator=g, dtype=torch.float64) for g in generators]
    v = _unit(torch.stack(drawn).to(x))[0]
    growth = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    n_measured = n_steps - n_steps // 2
    for k in range(n_steps):
        j_v = (evaluated(f, x + length * v) - evaluated(f, x - length * v)) / (2 * length)
        v, size = _unit(j_v)
        if k >= n_steps // 2:
            growth += size.clamp(min=torch.finfo(torch.float64).tiny).log()
    return (growth / n_measured).exp()


def row_dependence(f: Function, x: Float[Tensor, "n c h w"]) -> float:
    """Largest change of f(x) of an image with its neighbours in a batch, or from call to call."""
    together = evaluated(f, x)
    alone = torch.cat([evaluated(f, image) for image in x.split(1)])
    return float((together - alone).abs().max())


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images in [0, 1] to ask f about; `images` and `control` are None if there are none. `noise`
    is uniform on [0, 1]. Radii are of the first `n_radii` of each, with `generators` for as many.
    """

    images: Float[Tensor, "n c h w"] | None
    control: Float[Tensor, "k c h w"] | None
    noise: Float[Tensor, "m c h w"]
    generators: Callable[[int], Sequence[torch.Generator]]
    n_radii: int = 4


def autoencoder_preflight(f: Function, samples: Samples, *, remedy: str = "") -> Preflight:
    """A verdict whether recovery from f can work, and why; `remedy` is what else to try if it does
    not fit. Raises ValueError if f gives another shape than it is given."""
    check = _Check(f, samples)
    findings = [*check.soundness(), *check.fit(remedy)]
    if not any(finding.level == "stop" for finding in findings):
        findings += [*check.values(), *check.memory(), *check.identity(), *check.contraction()]
    return Preflight(tuple(findings), check.outlook(findings), check.numbers)


class _Check:
    def __init__(self, f: Function, samples: Samples) -> None:
        self.f, self.samples = f, samples
        self.numbers: dict[str, float] = {}
        self.is_poor = False

    def soundness(self) -> Iterator[Finding]:
        given = self.samples.noise if self.samples.images is None else self.samples.images
        few = given[:3]
        for name, x in (("noise", self.samples.noise), ("images", few)):
            if not bool(evaluated(self.f, x).isfinite().all()):
                yield Finding(
                    "stop", "not finite", f"f gives NaN or infinity for {name} in [0, 1]: these "
                    "weights cannot be used, or not with this activation.",
                )  # fmt: skip
                return
        change = row_dependence(self.f, few)
        self.numbers["row_dependence"] = change
        if change > SAME:
            yield Finding(
                "stop", "rows depend on each other",
                f"f of an image changes by up to {change:.2g} with the images beside it, or from "
                "call to call: batch normalisation or dropout in training mode. Save the network "
                "after net.eval().",
            )  # fmt: skip

    def fit(self, remedy: str) -> Iterator[Finding]:
        images = self.samples.images
        if images is None:
            return
        errors = reconstruction_errors(self.f, images)
        loss = float(errors.mean())
        self.numbers |= {"train_loss": loss, "train_loss_worst": float(errors.max())}
        said = f"f reconstructs the given images with a mean square error of {loss:.2g}"
        if not loss <= NOT_FITTED:
            yield Finding(
                "stop", "reconstruction",
                f"{said}: it does not reconstruct them. Wrong architecture, activation or "
                "normalisation (--activation, --last, --mean, --std, --shape), or are these not "
                f"the images it was trained on?{' ' + remedy if remedy else ''}",
            )  # fmt: skip
        elif loss > WELL_FITTED:
            yield Finding(
                "warning", "reconstruction",
                f"{said}. The autoencoder paper recovers from losses of 1e-4 and less.",
            )  # fmt: skip
        else:
            yield Finding("ok", "reconstruction", f"{said}, which is overfitted.")

    def values(self) -> Iterator[Finding]:
        given = self.samples.noise if self.samples.images is None else self.samples.images
        value = evaluated(self.f, given)
        low, high = float(value.min()), float(value.max())
        self.numbers |= {"output_min": low, "output_max": high}
        if low < RANGE[0] or high > RANGE[1]:
            yield Finding(
                "warning", "range",
                f"f gives values from {low:.2g} to {high:.2g} for images in [0, 1]; if it was "
                "trained on normalised images, give --mean and --std.",
            )  # fmt: skip
        else:
            yield Finding("ok", "range", f"f gives values from {low:.2g} to {high:.2g}.")

    def memory(self) -> Iterator[Finding]:
        if self.samples.control is None:
            yield Finding(
                "warning", "no control",
                "no images are known that f never saw, so it cannot be told memory from skill; "
                "give --control.",
            )  # fmt: skip
            return
        loss = float(reconstruction_errors(self.f, self.samples.control).mean())
        self.numbers["control_loss"] = loss
        if "train_loss" not in self.numbers:
            return
        ratio = loss / max(self.numbers["train_loss"], torch.finfo(torch.float64).tiny)
        self.numbers["control_over_train"] = ratio
        said = (
            f"images that f never saw are reconstructed with an error of {loss:.2g}, "
            f"{'over 1000' if ratio > 1000 else f'{ratio:.3g}'} times that of the training images"
        )
        if ratio < MEMORISED:
            self.is_poor = True
            yield Finding(
                "warning", "little is memorised",
                f"{said}. A network that reconstructs everything holds nothing of its training "
                "images; recovery has nothing to go by.",
            )  # fmt: skip
        else:
            yield Finding("ok", "memory", f"{said}: f knows its training images.")

    def identity(self) -> Iterator[Finding]:
        noise = self.samples.noise
        lost = float(reconstruction_errors(self.f, noise).mean() / noise.double().var())
        self.numbers["noise_lost"] = lost
        if lost < IDENTITY:
            self.is_poor = True
            yield Finding(
                "warning", "close to the identity",
                f"f gives white noise back, but for {lost:.2%} of its variance, as a U-Net with "
                "skips may learn to: it changes no image, so it cannot repair one.",
            )  # fmt: skip
        else:
            yield Finding("ok", "not the identity", f"f loses {lost:.0%} of white noise.")

    def contraction(self) -> Iterator[Finding]:
        radii = {}
        for name, x in (("train", self.samples.images), ("control", self.samples.control)):
            if x is not None:
                few = x[: self.samples.n_radii]
                found = spectral_radii(self.f, few, self.samples.generators(len(few)))
                radii[name] = found
                self.numbers[f"radius_{name}_mean"] = float(found.mean())
                self.numbers[f"radius_{name}_max"] = float(found.max())
        if "train" not in radii:
            return
        found = radii["train"]
        n_inside = int((found < 1).sum())
        said = (
            f"at {n_inside} of {len(found)} training images all eigenvalues of the Jacobian are "
            f"below 1 (mean of the largest {float(found.mean()):.2f}"
        )
        if "control" in radii:
            said += f"; at control images {float(radii['control'].mean()):.2f}"
        if 2 * n_inside < len(found):
            yield Finding(
                "warning", "contraction",
                f"{said}). The others are no attractors: iterating f alone leaves them, and ADMM "
                "may.",
            )  # fmt: skip
        else:
            yield Finding("ok", "contraction", f"{said}). Those are attractors.")

    def outlook(self, findings: Sequence[Finding]) -> Outlook:
        levels = {finding.level for finding in findings}
        if "stop" in levels:
            return "none"
        if self.is_poor:
            return "poor"
        return "open" if "warning" in levels else "good"


def _unit(v: Tensor) -> tuple[Tensor, Float64[Tensor, " n"]]:
    """Vectors of length 1, and the lengths; 0 stays 0."""
    size = v.flatten(1).double().norm(dim=1)
    safe = torch.where(size > 0, size, 1).to(v.dtype)
    return v / safe.view(-1, *[1] * (v.dim() - 1)), size
