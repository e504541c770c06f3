"""Files that every attack writes into its folder, for people: a page, a sheet of pictures, raw
arrays and the record. The record is written last: where it exists, the rest is complete."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from safetensors.numpy import save
from torch import Tensor

from recon_core.victims.preflight import Preflight
from storage.files import text_bytes, write_file, write_json
from tasks.campaign.plan import made_with
from tasks.page.pictures import data_uri, eight_bits

COMMAND = ContextVar("command", default="")
"""The command line that is running; empty where a flow was started in another way."""
STEPS = {"ok": "fine", "warning": "look", "stop": "stop"}
"""Words of the page for the levels of preflight's findings."""


def check_chances(prepared: Any, out: Path, *, force: bool) -> None:
    """Write the record of a prepared attack's `preflight` as preflight.json into `out`. Raises
    ValueError if the attack cannot work, unless `force`."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "preflight.json", prepared.record())
    found: Preflight = prepared.preflight
    if found.stopped and not force:
        raise ValueError(f"{found.verdict} {found.reason} (--force attacks all the same)")


def page_context(packages: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """The command, the time and the software of a page, and `more` of its context."""
    made = made_with(("palimpsest", "torch", *packages))
    versions = made["versions"] | {"machine": made["machine"]}
    return {"command": COMMAND.get(), "created": made["created"], "versions": versions} | more


def leave(
    out: Path,
    record: Mapping[str, Any],
    page: str,
    *,
    name: str = "attack.json",
    sheet: tuple[str, bytes, str] | None,
) -> None:
    """Writes the sheet of pictures (name without .png, PNG, words), report.html and the record, and
    shows them on the flow's page."""
    from tasks.artifacts import publish_link, publish_picture

    if sheet is not None:
        key, png, said = sheet
        write_file(out / f"{key}.png", png)
        publish_picture(key, png, said)
    write_file(out / "report.html", text_bytes(page))
    write_json(out / name, record)
    publish_link("report", out / "report.html", "The report, one self-contained HTML file")


def write_arrays(path: Path, arrays: Mapping[str, Tensor | npt.NDArray[Any]]) -> None:
    """Arrays as safetensors."""
    write_file(path, save({name: np.ascontiguousarray(a) for name, a in arrays.items()}))


def uri_of(picture: Float[Tensor, "c h w"]) -> str:
    """A picture in [0, 1] for a page."""
    return data_uri(as_bytes(picture))


def as_bytes(picture: Float[Tensor, "c h w"]) -> npt.NDArray[np.uint8]:
    """uint8 (3, h, w) of a picture in [0, 1]; a grey one three times, black where it is NaN."""
    pixels = picture if len(picture) == 3 else picture[:1].expand(3, -1, -1)
    return eight_bits(pixels)
