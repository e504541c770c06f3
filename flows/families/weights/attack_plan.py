"""The plan of an attack on given weights: a preset that fits, changed by single settings.

Nothing here needs a flow, so nothing here imports Prefect: preflight and refusals come at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flows.naming import unknown_name
from recon_core.attacks.kkt.objective import Condition, KKTAttack, Search
from recon_core.attacks.span.rows import Source
from recon_core.attacks.span.search import SpanAttack
from recon_core.strict import Count, Strict
from tasks.families.weights.attack import WeightsJob
from tasks.families.weights.preflight import (
    PreparedWeights,
    best_source,
    prepare_weights,
    victim_of,
)


@dataclass(frozen=True, kw_only=True)
class AttackPlan(Strict):
    """An attack on weights that are already there, and how often it is repeated."""

    attack: KKTAttack | SpanAttack
    n_attacks: Count = 1


DEFAULT_PRESET = "ensemble"
"""Ours: six attacks with Adadelta as in the image restoration paper, each with settings drawn
around the paper's: how many attacks arrive at a picture tells more between settings than between
starts."""


def attack_plan(
    preset: str = DEFAULT_PRESET,
    *,
    n_outputs: int,
    condition: Condition | None = None,
    n_attacks: int | None = None,
    n_images: int | None = None,
    n_iterations: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> AttackPlan:
    """A preset made to fit a network, then changed by `settings` (`attack.alpha`, `n_attacks`).

    The condition is the preset's if it goes with the number of outputs, otherwise binary for one
    output and multiclass for several. `n_images`, a guess at the size of the training set, gives
    twice as many candidates (KKT paper, section 3). Raises ValueError for unknown names and bad
    values.
    """
    if preset == DEFAULT_PRESET:
        search = Search(lr=None, sigma=(1e-4, 1e-2), lam_min=(0.1, 0.6), alpha=(10.0, 60.0))
        attack = KKTAttack(save_at=(500, 1000, 2000, 4000), search=search)
        plan = AttackPlan(attack=attack, n_attacks=6)
    else:
        from flows.papers import EXPERIMENTS

        if preset not in EXPERIMENTS:
            raise ValueError(unknown_name("attack preset", preset, (DEFAULT_PRESET, *EXPERIMENTS)))
        published = EXPERIMENTS[preset]
        plan = AttackPlan(attack=published.experiment().attack, n_attacks=published.n_attacks)
    assert isinstance(plan.attack, KKTAttack)
    attack = plan.attack
    fits = (attack.condition == "multiclass") == (n_outputs > 1)
    by_outputs: Condition = "multiclass" if n_outputs > 1 else "binary"
    changes: dict[str, Any] = {
        "condition": condition or (attack.condition if fits else by_outputs),
        "ncc_stop_above": None,  # this rule looks at the training images
    }
    for option, number in (("--n-images-guess", n_images), ("--iterations", n_iterations)):
        if number is not None and number < 1:
            raise ValueError(f"{option} {number} must be at least 1")
    if n_images is not None:
        changes["n_candidates"] = 2 * max(n_images, n_outputs)
    if n_iterations is not None:
        parts = {max(1, n_iterations // part) for part in (8, 4, 2, 1)}
        changes["save_at"] = tuple(sorted(parts))
    n_attacks = plan.n_attacks if n_attacks is None else n_attacks
    plan = AttackPlan(attack=replace(attack, **changes), n_attacks=n_attacks)
    return _changed(plan, settings or {})


def planned(
    job: WeightsJob,
    *,
    method: Literal["kkt", "span"] = "kkt",
    source: Source | Literal["auto"] = "auto",
    preset: str = DEFAULT_PRESET,
    condition: Condition | None = None,
    n_attacks: int | None = None,
    n_images: int | None = None,
    n_iterations: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> WeightsJob:
    """The job with an attack that fits the network in its file, and takes apart what gives most.

    Raises WeightsError for files and ValueError for settings that cannot be used.
    """
    victim = victim_of(job)
    if method == "span":
        if source == "auto":
            source = best_source(victim, SpanAttack(n_images=n_images))
        is_known = job.initial is not None and source == "weights"
        start: Literal["known", "unknown"] = "known" if is_known else "unknown"
        attack = SpanAttack(source=source, start=start, n_images=n_images)
        plan = AttackPlan(attack=attack, n_attacks=1 if n_attacks is None else n_attacks)
        plan = _changed(plan, settings or {})
    else:
        plan = attack_plan(
            preset, n_outputs=victim.architecture.n_outputs, condition=condition,
            n_attacks=n_attacks, n_images=n_images, n_iterations=n_iterations, settings=settings,
        )  # fmt: skip
    return replace(job, attack=plan.attack, n_attacks=plan.n_attacks)


def prepared_by(
    job: WeightsJob, method: Literal["auto", "span", "kkt"], **plan: Any
) -> tuple[WeightsJob, PreparedWeights, str]:
    """Prepare the attack that is asked for or, with `auto`, one that can work. Returns the job, its
    preparation and the reason for the method; `plan` as in `planned`."""
    chosen = planned(job, method="kkt" if method == "kkt" else "span", **plan)
    prepared = prepare_weights(chosen)
    if method != "auto":
        return chosen, prepared, ""
    if not prepared.preflight.stopped:
        return chosen, prepared, f"span. {prepared.preflight.verdict}"
    instead = prepared.preflight.reason
    alone = replace(
        job, initial=None, optimizers=(), checkpoints=(), gradients=(), attack=KKTAttack()
    )
    chosen = planned(alone, method="kkt", **plan)
    return chosen, prepare_weights(chosen), f"kkt, since span cannot work here: {instead}"


def _changed(plan: AttackPlan, settings: Mapping[str, str]) -> AttackPlan:
    """The plan with single settings replaced, by the same names and rules as in a recipe."""
    if not settings:
        return plan
    from flows.settings import replace_setting, validated

    tree: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    for given, value in settings.items():
        name = given.removeprefix("experiment.")
        if name.split(".")[0] not in tree:
            raise ValueError(
                f"--set {name}: of weights that are given only the attack has settings, for "
                "example attack.n_images=100, attack.alpha=50 or n_attacks=20"
            )
        replace_setting(tree, name, value)
    attack = validated(type(plan.attack), tree["attack"])
    changed: AttackPlan = validated(AttackPlan, tree | {"attack": attack})
    return changed
