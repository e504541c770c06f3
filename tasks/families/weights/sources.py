"""The choice of what is taken apart of a given network, and what people are told of it: the weights
less a start, an optimiser's state, or gradients of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recon_core.attacks.span.preflight import FULL
from recon_core.attacks.span.rows import Source
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace
from recon_core.victims.preflight import Finding
from tasks.families.weights.inputs import Victim

PUBLISH = (
    "The checkpoint gives back what its weights hide: publish weights alone, without the "
    "optimiser's state"
)
"""Advice to whoever gives away a checkpoint whose state shows training images."""
NAMES: dict[Source, str] = {
    "gradients": "the gradients (--gradients)",
    "state": "the optimiser's state",
    "weights": "the weights",
}
MISSING: dict[Source, str] = {
    "gradients": "give --gradients FILE, the gradients of a batch by their tensors' names",
    "state": "give a checkpoint that holds one as --weights, or its file as --optimizer",
    "weights": "",
}


def spans_of(victim: Victim, attack: SpanAttack) -> dict[Source, Subspace | str]:
    """The span of each source that there is, or why there is none."""
    found: dict[Source, Subspace | str] = {}
    for source, rows in victim.sources.items():
        try:
            found[source] = rows.subspace(attack.n_images, attack.surplus)
        except ValueError as error:
            found[source] = str(error)
    return found


def best_source(victim: Victim, attack: SpanAttack) -> Source:
    """The source with most directions of those whose spans end sharply; gradients if there are any,
    since they are given to be attacked. Without a sharp end the first that has a span.

    An end behind nearly as many directions as there are neurons is none: Adam's weights have one
    where neurons that hardly moved begin."""
    if victim.architecture.network.conv is not None or len(victim.sources) == 1:
        return "weights"
    if victim.gradients:
        return "gradients"
    rows = victim.sources
    spans = {s: span for s, span in spans_of(victim, attack).items() if isinstance(span, Subspace)}
    sharp = [
        source
        for source, span in spans.items()
        if span.ends_sharply and span.n_signal < FULL * len(rows[source].rows)
    ]
    if sharp:
        return max(sharp, key=lambda source: spans[source].n_signal)
    return next(iter(spans), "weights")


def check_source(victim: Victim, source: Source) -> None:
    """ValueError for a source that is not there, with what to give."""
    if source not in victim.sources:
        why = f": {victim.unused_state}" if source == "state" and victim.unused_state else ""
        raise ValueError(
            f"--source {source}: {victim.file.path} comes without{why}; {MISSING[source]}"
        )


def source_record(victim: Victim, attack: SpanAttack) -> dict[str, Any]:
    """The source that is used, where it is from, and the directions of each, as JSON."""
    directions: dict[str, Any] = {}
    for source, span in spans_of(victim, attack).items():
        directions[source] = None
        if isinstance(span, Subspace):
            directions[source] = {"n": span.n_signal, "ends_sharply": span.ends_sharply}
    used = {"state": victim.states, "gradients": victim.gradients}.get(attack.source, ())
    return {
        "used": attack.source,
        "from": [given.said for given in used],
        "less_start": attack.start == "known",
        "directions": directions,
        "publish_weights_alone": directions.get("state") is not None
        and any(given.is_own for given in victim.states),
    }


def source_finding(victim: Victim, record: Mapping[str, Any]) -> Finding:
    """What is taken apart, what the others would give, and what else would help."""
    start = " less --initial" if victim.start is not None else ""
    said: dict[Source, str] = {}
    directions: Mapping[Source, Any] = record["directions"]
    for source, span in directions.items():
        count = "no direction"
        if span is not None:
            sharply = "that end sharply" if span["ends_sharply"] else "above the noise"
            count = f"{span['n']} directions {sharply}"
        said[source] = f"{NAMES[source]}{start if source == 'weights' else ''}, {count}"
    text = said.pop(record["used"])
    others = list(said.values())
    text += f" ({'; '.join(record['from'])})" if record["from"] else ""
    text += f". Not used: {'; '.join(others)}." if others else "."
    if victim.unused_state:
        text += f" {victim.unused_state}."
    if record["publish_weights_alone"]:
        text += f" {PUBLISH}."
    wanted = [] if victim.start is not None else ["the start or an earlier checkpoint (--initial)"]
    wanted += [] if victim.states else ["an optimiser's state (--optimizer, --checkpoint)"]
    wanted += [] if victim.gradients else ["gradients of batches (--gradients)"]
    is_sharp = (directions[record["used"]] or {}).get("ends_sharply")
    if wanted and not is_sharp:
        text += f" More would come back with {', or '.join(wanted)}."
    return Finding("ok", "what is taken apart", text)
