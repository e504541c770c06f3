"""Restore: a trained restorer, a baseline or the user's own, on pictures or on a store's pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.object_store import Location
from tasks.artifacts import publish_facts, publish_picture
from tasks.devices import Device
from tasks.orchestration import flow, task
from tasks.progress import stage_progress
from tasks.restoring.inputs import Size, open_inputs
from tasks.restoring.job import SHEET, Restoration, restore_pictures
from tasks.restoring.onnx_restorer import OnnxRange
from tasks.restoring.restore import Span, open_restorer, open_span

restore_all = task(name="restore pictures")(restore_pictures)


@flow(name="restore", flow_run_name="{out}")
def restore(
    weights: str,
    source: Location,
    out: Path,
    config: Restoration | None = None,
    *,
    limit: int | None = None,
    size: Size | None = None,
    skip_corrupt: bool = False,
    fresh: bool = False,
    onnx_range: OnnxRange = "0..1",
    device: Device = "auto",
    span: Span | None = None,
) -> dict[str, Any]:
    """Restore the pictures at `source`; finished ones are not repeated, unless `fresh`.

    1. Find the pictures. 2. Open the restorer, with `span` inside what a network's weights allow.
    3. Restore them, by the mean of their samples, with maps of how far these disagree. 4. Say it.
    Raises what `tasks.restoring.restore` and its neighbours raise.
    """
    inputs = open_inputs(source, limit=limit, size=size, skip_corrupt=skip_corrupt)
    allowed = None if span is None else open_span(span, inputs)
    restorer = open_restorer(weights, device=device, onnx_range=onnx_range, span=allowed)
    with stage_progress("Restore", "picture") as advance:
        record = restore_all(
            restorer, inputs, out, config or Restoration(), fresh=fresh, on_picture=advance
        )
    publish_facts("restoration", summary(record), f"Restored into {out}")
    publish_picture(
        "contact-sheet", (out / SHEET).read_bytes(), f"Pictures of {out}, chosen evenly"
    )
    return record


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Facts that people want first of a finished restoration."""
    model = record["settings"]["model"]
    samples = {picture["n_samples"] for picture in record["pictures"]}
    facts = {
        "restorer": model["name"],
        "fingerprint": model["fingerprint"],
        "pictures": record["n_pictures"],
        "left out": len(record.get("read", {}).get("left_out", ())),
        "samples": max(samples),
        "mean_disagreement": round(record["mean_disagreement"], 4),
        "device": record["device"],
    }
    if span := model["settings"].get("span"):
        facts["in the span of the weights"] = f"{span['share_of_pictures']:.1%} of the pictures"
    if not facts["left out"]:
        del facts["left out"]
    if facts["samples"] == 1:  # nothing that could disagree: 0 would read as certainty
        del facts["mean_disagreement"]
    return facts
