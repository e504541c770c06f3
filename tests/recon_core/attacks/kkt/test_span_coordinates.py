"""A search in span coordinates: the objective of pixels, of fewer numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt import attacks as kkt_attacks
from recon_core.attacks.kkt.attacks import Victim, attack_stack
from recon_core.attacks.kkt.objective import Objective
from recon_core.attacks.kkt.solver import reconstruct
from recon_core.attacks.kkt.span_coordinates import (
    SpanCoordinates,
    directions_of,
    stacked,
)
from recon_core.attacks.span.subspace import NoSpanError
from recon_core.types import Outcome, no_progress
from recon_core.victims.network import Architecture, Conv, Network, Parameters
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.small_attacks import (
    GD,
    MOMENTUM,
    Q,
    architecture,
    assert_near,
    attack_with,
    different,
    problem,
    row,
    turned,
)
from tests.recon_core.drawing import generator
from tests.recon_core.small_runs import QUICK_ALL, assert_all_equal, run, specs, with_attack

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = Network(widths=(15, 5), bias="first")  # more neurons than the 12 pixels: full rank


def inside(of: Architecture, parameters: Parameters, x: Tensor, k: int) -> SpanCoordinates:
    n = parameters.n_runs
    return SpanCoordinates.of(of, parameters, turned(k, x.shape[2], n))


@pytest.mark.parametrize("n_victims", [1, Q])
@pytest.mark.parametrize("condition", ["binary", "multiclass", "regression"])
def test_equals_double_backpropagation_in_pixels(condition: Any, n_victims: int) -> None:
    """Value up to a constant, gradients projected, with the penalty of pixels outside the box."""
    of, attack = architecture(condition), attack_with(condition=condition)
    each = different(attack)
    parameters, x, lam = problem(of, n_victims)
    span = inside(of, parameters, x, 5)
    z = 6 * span.inside(x)
    x = span.pixels(z)
    assert bool((x.abs() > 1).flatten(1).any(1).all()), "the penalty must take part"
    leaves = x.clone().requires_grad_(), lam.clone().requires_grad_()
    penalty = (leaves[0] - leaves[0].clamp(-1, 1)).square().sum((1, 2))
    if condition != "regression":
        penalty = penalty + 5 * (each.lam_min[:, None] - leaves[1]).relu().square().sum(1)
    penalty.sum().backward()
    signs = attack.signs(lam)
    wide = Parameters(
        tuple(w.expand(Q, -1, -1) for w in parameters.weights),
        tuple(None if b is None else b.expand(Q, -1) for b in parameters.biases),
    )
    classes = attack.classes(of.n_outputs, x.device)
    value, by_x, by_c = double_backprop.stationarity(
        of, wide, x, lam * signs, alpha=each.alpha, classes=classes
    )
    assert leaves[0].grad is not None
    by_lam = by_c * signs + (0 if leaves[1].grad is None else leaves[1].grad)
    expected = (value + penalty.detach(), span.inside(by_x + leaves[0].grad), by_lam)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        narrow = span.parameters.map(lambda t: t.to(dtype))  # noqa: B023
        vectors = span.vectors.to(dtype)
        objective = Objective(
            span.architecture, narrow, attack=attack, settings=each, vectors=vectors
        )
        assert objective.box.look(x.to(dtype))  # type: ignore[union-attr]
        found, by_z, of_lam = objective(z.to(dtype), lam.to(dtype))
        assert found is not None
        ours = (found.double() + span.rest, by_z, of_lam)
        for one, truth in zip(ours, expected, strict=True):
            assert float((one.double() - truth).norm() / truth.norm()) < tolerance


@pytest.mark.parametrize(("optimiser", "last"), [(GD, 130), (MOMENTUM, 80)])
def test_directions_of_full_rank_give_what_pixels_give(optimiser: Any, last: int) -> None:
    """Gradient descent does not see how coordinates are turned. One attack starts outside the box;
    none leaves it between two looks, which would be noticed at the next."""
    of = architecture(network=WIDE)
    attack = attack_with(optimiser, save_at=(3, last))
    parameters, x, lam = problem(of)
    x[1] *= 6
    each, in_span = different(attack), replace(attack, coordinates="span")
    usual = reconstruct(of, parameters, x, lam, attack=attack, settings=each)
    assert bool(usual.usable().all())
    ours = reconstruct(
        of, parameters, x, lam, attack=in_span, settings=each, vectors=turned(of.d, of.d)
    )
    assert_near(ours, usual, 1e-9)


def test_candidates_stay_in_the_span_and_pixels_do_the_same_there() -> None:
    """Without a penalty: the objective's gradient at the span's points, projected."""
    of, attack = architecture(), attack_with(GD, save_at=(1,))
    parameters, x, lam = problem(of)
    span, each = inside(of, parameters, x, 4), different(attack)
    start = span.pixels(span.inside(x))
    in_span = replace(attack, coordinates="span")
    given: dict[str, Any] = {"settings": each}
    ours = reconstruct(of, parameters, x, lam, attack=in_span, vectors=span.vectors, **given)
    usual = reconstruct(of, parameters, start, lam, attack=attack, **given)
    projected = span.pixels(span.inside(usual.x[:, 0]))
    torch.testing.assert_close(ours.x[:, 0], projected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.lam, usual.lam, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(usual.x[:, 0], projected, atol=1e-6), "pixels leave the span"
    told, _, _ = Objective(of, parameters, attack=attack, settings=each)(ours.x[:, 0], ours.lam)
    torch.testing.assert_close(ours.loss, told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stack_of_spans_of_different_size_equals_its_attacks_one_by_one(dtype: Any) -> None:
    """One is outside the box from the start, another leaves it between two looks: that it has the
    penalty from the second look on must not depend on its neighbour."""
    of = architecture(network=WIDE)
    attack = replace(attack_with(MOMENTUM, save_at=(8, 120)), coordinates="span")
    each = different(attack)
    parameters, x, lam = problem(of, dtype=dtype)
    x[1] *= 6
    spans = [turned(k, of.d, 1)[0].to(dtype) for k in (4, 9, of.d)]
    given: dict[str, Any] = {"attack": attack}
    together = reconstruct(of, parameters, x, lam, settings=each, vectors=stacked(spans), **given)
    assert float(together.x[2, 0].abs().max()) < 1 < float(together.x[2, 1].abs().max())
    for q, own in enumerate(spans):
        only = slice(q, q + 1)
        alone = reconstruct(
            of,
            parameters.rows(only),
            x[only],
            lam[only],
            settings=each.rows(torch.tensor([q])),
            vectors=own[None],
            **given,
        )
        assert_near(row(together, q), alone, 1e-9 if dtype == torch.float64 else 1e-4)


def test_weights_without_a_span_are_an_outcome_and_harm_no_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_span = with_attack(QUICK_ALL, coordinates="span")
    usual, calls = run(in_span), iter(range(len(specs())))

    def failing(of: Any, parameters: Any) -> Tensor:
        if next(calls) == 1:
            raise NoSpanError("nothing stands out")
        return directions_of(of, parameters)

    monkeypatch.setattr(kkt_attacks, "directions_of", failing)
    results = run(in_span)
    assert [r.outcome for r in results] == [usual[0].outcome, Outcome.STOPPED, usual[2].outcome]
    assert_all_equal(results[::2], usual[::2])


def test_a_stack_goes_on_without_those_that_have_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_of: Any, parameters: Any) -> Tensor:
        if not bool(parameters.isfinite().all()):
            raise NoSpanError("not finite")
        return turned(5, 12, 1)

    monkeypatch.setattr(kkt_attacks, "directions_of", found)
    of, attack = architecture(), replace(attack_with(), coordinates="span")
    parameters, x, _ = problem(of)
    generators = [generator(q) for q in range(Q)]
    calm = attack_stack(attack, Victim(of, parameters, x), generators, no_progress)
    parameters.weights[0][1] = torch.nan
    generators = [generator(q) for q in range(Q)]
    less = attack_stack(attack, Victim(of, parameters, x), generators, no_progress)
    assert [one.finite for one in less] == [True, False, True]
    assert less[1].stopped
    for q in (0, 2):
        torch.testing.assert_close(less[q].x, calm[q].x, rtol=1e-9, atol=1e-12)


def test_what_has_no_span_is_refused_in_one_line() -> None:
    in_span = with_attack(QUICK_ALL, coordinates="span")
    with pytest.raises(ValueError, match=r"span patches, not images; use attack\.coord") as no:
        replace(in_span, victim=Network(widths=(9,), conv=Conv()))
    assert "\n" not in str(no.value)
    of = Network(widths=(16,)).on((3, 8, 8))
    noise = of.initial([generator(0)], dtype=torch.float32)
    with pytest.raises(NoSpanError, match=r"is large; use attack\.coordinates=pixels$") as none:
        directions_of(of, noise)
    assert "\n" not in str(none.value)
