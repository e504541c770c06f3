"""The search for sources: how directions are seen, and what is minimised from which start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.features import (
    Kind,
    SourceModel,
    dct_filters,
    outputs_of,
    shipped_model,
    whitened,
)
from recon_core.attacks.span.guests import SHAPE, apart, shipped_guests
from recon_core.attacks.span.lbfgs import Descent, Report, after, minimise
from recon_core.attacks.span.separation import (
    Likelihood,
    ModelLikelihood,
    grouped_fixed_point,
    orthogonal,
    rotate,
    rotation_start,
)
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace

RESCALINGS = 10
"""Rounds in which rows take the size that a model gives them: its energy grows with less than the
square, so that errors of a factor of 10 are below a hundredth after them."""
FEWEST_LEARNED = 32
"""Directions from which on models of images separate better than sparse derivatives do: SSIM of 40
images .926 for .917, of 20 .881 for .893."""
ROUGH = 1 / 6
"""Share of `n_learned` for the first model."""
WIDE, WIDER = 0.4, 2.5
"""Share of a frame's steps with a wider score, and how much wider it is."""


@dataclass(frozen=True)
class Views:
    """R victims' directions as they are searched, `z`, and what whitens their features, `n_filters`
    at each place: `z` are these features; with a model of images, or a network, they are the
    pictures whose features are white (white in the network's metric), and `precision` P is of the
    model's Gaussian part, sum_i x_i^T C^{-1} x_i = tr(W P W^T)."""

    z: Float[Tensor, "r k t"]
    whiten: Float[Tensor, "r k k"]
    n_filters: int
    model: SourceModel | None = None
    precision: Float[Tensor, "r k k"] | None = None

    def features(self, sources: Float[Tensor, "r k t"]) -> Float[Tensor, "r k o"]:
        """Outputs of the filters for sources W Z."""
        if self.model is None:
            return sources
        shape = self.model.spectrum.shape
        return torch.stack([self.model.outputs(x.unflatten(1, shape)).flatten(1) for x in sources])


def sources_for(attack: SpanAttack, span: Subspace, shape: tuple[int, int, int]) -> SpanAttack:
    """The attack on one victim's span, with "auto" decided: a span that ends sharply hides no
    direction, so that sources are no more than these."""
    if attack.sources != "auto":
        return attack
    if span.ends_sharply:
        attack = replace(attack, overcomplete=1.0)
        if shape == SHAPE and len(span.vectors) >= FEWEST_LEARNED:
            return replace(attack, sources="network", n_fine=0)
    return replace(attack, sources="independent", n_fine=0)


def views_of(
    attack: SpanAttack,
    pictures: Float[Tensor, "r k c h w"],
    *,
    kind: Kind = "coarse",
) -> Views:
    """Features of every victim's directions, as `attack.sources` ("auto" decided) takes them, of
    "learned" with the model of this kind, of "network" in its metric.

    Raises ValueError for pictures that the filters or the model do not fit.
    """
    shape = pictures.shape[2:]
    if attack.sources in ("learned", "network"):
        model = shipped_model(kind).to(pictures)
        if model.spectrum.shape != shape:
            raise ValueError(
                f"attack.sources={attack.sources!r} knows images of "
                f"{_times(model.spectrum.shape)}, and not of {_times(shape)}; use "
                "attack.sources='independent'"
            )
        if attack.sources == "network":
            guests = shipped_guests(pictures.device)
            whiten = torch.stack([whitened(guests.whitened(p.flatten(1)))[1] for p in pictures])
            return Views(whiten @ pictures.flatten(2), whiten, len(model.filters), model)
        whiten = torch.stack([whitened(model.outputs(p).flatten(1))[1] for p in pictures])
        half = whiten @ torch.stack([model.whitened(p) for p in pictures])
        z = whiten @ pictures.flatten(2)
        return Views(z, whiten, len(model.filters), model, half @ half.mT)
    filters = dct_filters(attack.filter_size, shape[0], colours=attack.colours)
    features = [whitened(outputs_of(p, filters, stride=attack.stride)) for p in pictures]
    z, whiten = (torch.stack([f[i] for f in features]) for i in (0, 1))
    return Views(z, whiten, len(filters))


def ladder_of(attack: SpanAttack, pictures: Float[Tensor, "r k c h w"]) -> list[Views]:
    """The views in which directions are searched, one after the other: those of "learned" from a
    model of noisier images to one of cleaner images."""
    kinds: Sequence[Kind] = ("rough", "coarse") if attack.sources == "learned" else ("coarse",)
    return [views_of(attack, pictures, kind=kind) for kind in kinds]


def best_start(
    attack: SpanAttack,
    ladder: Sequence[Views],
    generators: Sequence[torch.Generator],
    report: Report,
) -> Descent:
    """Every victim's separation, in the last of the views (`ladder_of`), from that of
    `attack.n_starts` random starts that ends lowest."""
    z, n_sources, search = ladder[-1].z, None, _with_models
    if attack.sources == "network":
        search = _with_network
    elif ladder[-1].model is None:
        search = _with_filters if attack.overcomplete == 1 else _with_frame
        n_sources = attack.n_sources(z.shape[1])
    best: Descent | None = None
    for number in range(attack.n_starts):
        starts = torch.stack(
            [rotation_start(z.shape[1], g, n_sources=n_sources) for g in generators]
        )
        told = partial(after, report, number * attack.n_iterations)
        ended = search(attack, ladder, starts.to(z), told)
        best = ended if best is None else _lower(best, ended)
    assert best is not None
    return best


def _with_models(
    attack: SpanAttack, ladder: Sequence[Views], starts: Tensor, report: Report
) -> Descent:
    """The models one after the other. What is wrong in a picture at first is as large as the
    picture, so the first model is one of images in that much noise; a clean one has optima that are
    none (as scores are annealed in sampling: Song and Ermon 2019)."""
    rough, coarse = ladder
    n = round(ROUGH * attack.n_learned)
    begun = minimise(
        likelihood_of(rough),
        rough.z,
        starts,
        n_iterations=n,
        tolerance=attack.tolerance,
        report=report,
    )
    ended = refined(
        attack,
        begun.rotation @ rough.whiten,
        coarse,
        partial(after, report, n),
        n_iterations=attack.n_learned - n,
    )
    return replace(ended, n_iterations=begun.n_iterations + ended.n_iterations)


def refined(
    attack: SpanAttack,
    unmixing: Float[Tensor, "r k k"],
    views: Views,
    report: Report,
    *,
    n_iterations: int | None = None,
) -> Descent:
    """The separation that follows `unmixing` (of the directions themselves) downhill in `views`, in
    at most `n_iterations`, by default `attack.n_fine`. The rows' sizes, which each model has its
    own idea of, are its first steps."""
    likelihood = likelihood_of(views)
    w = torch.linalg.solve(views.whiten.mT, unmixing.mT).mT
    for _ in range(RESCALINGS):
        gradient, _ = likelihood.at(w, w @ views.z)[1](False)
        own = gradient.diagonal(dim1=1, dim2=2) + 1  # E[psi_i y_i], 1 at the model's own size
        w = w * own.clamp(0.1, 10.0).rsqrt()[:, :, None]
    return minimise(
        likelihood,
        views.z,
        w,
        n_iterations=attack.n_fine if n_iterations is None else n_iterations,
        tolerance=attack.tolerance,
        report=report,
    )


def continued(
    attack: SpanAttack,
    unmixing: Float[Tensor, "r k k"],
    pictures: Float[Tensor, "r k c h w"],
    report: Report,
) -> Float[Tensor, "r k k"]:
    """The unmixing matrix of directions `pictures` to which `unmixing` leads: with "network" by
    that, otherwise by the finer model in `attack.n_fine` iterations."""
    if attack.sources == "network":
        views = views_of(attack, pictures)
        begun = orthogonal(torch.linalg.solve(views.whiten.mT, unmixing.mT).mT)
        ended = _with_network(attack, [views], begun, report)
    else:
        views = views_of(attack, pictures, kind="fine")
        ended = refined(attack, unmixing, views, report)
    rows: Tensor = ended.rotation @ views.whiten
    return rows


def likelihood_of(views: Views) -> ModelLikelihood:
    """The objective in views with a model of images."""
    assert views.model is not None
    assert views.precision is not None
    return ModelLikelihood(views.model, views.precision)


def _with_network(
    attack: SpanAttack, ladder: Sequence[Views], starts: Tensor, report: Report
) -> Descent:
    (views,), model = ladder, shipped_guests(starts.device)
    return apart(model, views.z, starts, n_iterations=attack.n_network, report=report)


def _with_filters(
    attack: SpanAttack, ladder: Sequence[Views], starts: Tensor, report: Report
) -> Descent:
    (views,) = ladder
    seen = thinned(views.z, views.n_filters, attack.thinned)
    rotated = rotate(seen, starts, attack.stages, tolerance=attack.tolerance, report=report)
    n = sum(attack.n_rotations)
    turned = grouped_fixed_point(
        views.z,
        rotated.rotation,
        n_filters=views.n_filters,
        scale=attack.grouped_scale,
        n_iterations=attack.n_grouped,
        report=partial(after, report, n),
    )
    freed = minimise(
        Likelihood(attack.shape, attack.likelihood_scale),
        views.z,
        turned.rotation,
        n_iterations=attack.n_likelihood,
        tolerance=attack.tolerance,
        report=partial(after, report, n + attack.n_grouped),
    )
    total = rotated.n_iterations + turned.n_iterations + freed.n_iterations
    settled = rotated.settled and freed.settled
    return replace(freed, n_iterations=total, settled=settled)


def _with_frame(
    attack: SpanAttack, ladder: Sequence[Views], starts: Tensor, report: Report
) -> Descent:
    (views,), wide = ladder, round(WIDE * attack.n_grouped)
    search = partial(grouped_fixed_point, views.z, n_filters=views.n_filters)
    begun = search(starts, scale=WIDER * attack.grouped_scale, n_iterations=wide, report=report)
    ended = search(
        begun.rotation,
        scale=attack.grouped_scale,
        n_iterations=attack.n_grouped - wide,
        report=partial(after, report, wide),
    )
    return replace(ended, n_iterations=attack.n_grouped)


def thinned(z: Float[Tensor, "r k t"], n_filters: int, step: int) -> Float[Tensor, "r k s"]:
    """Features at every `step`-th place, from the first on; ValueError for fewer than directions,
    which no rotation would tell apart."""
    if step == 1:
        return z
    seen: Tensor = z.unflatten(2, (n_filters, -1))[..., ::step].flatten(2)
    if seen.shape[2] <= z.shape[1]:
        raise ValueError(
            f"attack.thinned={step} leaves {seen.shape[2]} features for {z.shape[1]} directions; "
            "lower it"
        )
    return seen


def _lower(a: Descent, b: Descent) -> Descent:
    first = (a.objective <= b.objective)[:, None, None]
    return Descent(
        torch.where(first, a.rotation, b.rotation),
        torch.where(first, a.sources, b.sources),
        torch.minimum(a.objective, b.objective),
        max(a.n_iterations, b.n_iterations),
        a.settled and b.settled,
    )


def _times(shape: torch.Size) -> str:
    return "x".join(map(str, shape))
