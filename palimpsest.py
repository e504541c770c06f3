"""Palimpsest from Python: what networks leak, in a few lines.

    from palimpsest import audit, attack, restore, open_dataset

    found = audit("folder:my-images", preset="quick", out="audit")
    print(found.sentence)
    found.table                      # one row per defence

Every function does what the command of its name does, leaves the same files in `out`, and goes on
where it was interrupted. Work runs in processes of its own, so a script calls these functions below
`if __name__ == "__main__":`; a notebook need not.
"""

from __future__ import annotations

import base64
import html
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks import __version__  # and how threads wait, before torch is loaded

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from storage.pairs.dataset import Dataset
    from tasks.devices import Device

__all__ = ["Found", "__version__", "attack", "audit", "open_dataset", "restore"]

MOST_SAID = 300
"""Letters of the sentence in a `repr`."""
Settings = Mapping[str, Any]
"""Single settings by dotted name, as `--set` takes them."""


@dataclass(frozen=True)
class Found:
    """Results of an audit, an attack or a restoration: its folder, its record (as the JSON there),
    a sentence, and rows of a table, which holds numbers (None for what is not known): `table` goes
    into a pandas.DataFrame as it is. A notebook shows the sentence, the table and the pictures."""

    folder: Path
    record: Mapping[str, Any]
    sentence: str
    table: Sequence[Mapping[str, Any]]
    page: Path | None = None
    sheet: Path | None = None

    def __repr__(self) -> str:
        said = self.sentence if len(self.sentence) <= MOST_SAID else self.sentence[:MOST_SAID] + "…"
        n_rows = f"{len(self.table)} {'row' if len(self.table) == 1 else 'rows'}"
        return f"<Found {said!r}, table of {n_rows}, in {self.folder}>"

    @property
    def pictures(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Pictures of an audit, uint8 (n, c, h, w): `exposed/original`, `exposed/reconstruction`,
        `decoys/...`; none of others, whose pictures are in `folder`."""
        from tasks.page.files import read_arrays

        kept = sorted(self.folder.glob("*-pictures.npz"))
        return dict(read_arrays(kept[0], again="run the audit again")) if kept else {}

    def _repr_html_(self) -> str:
        """Sentence, table and contact sheet for a notebook."""
        names = list(dict.fromkeys(name for row in self.table for name in row))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(_cell(row.get(n, '')))}</td>" for n in names)
            + "</tr>"
            for row in self.table
        )
        parts = [f"<p>{html.escape(self.sentence)}</p>"]
        if names:
            parts.append(f"<table><tr>{head}</tr>{rows}</table>")
        if self.sheet is not None and self.sheet.exists():
            content = base64.b64encode(self.sheet.read_bytes()).decode()
            parts.append(f'<img alt="what came back" src="data:image/png;base64,{content}">')
        if self.page is not None:
            parts.append(f"<p>{html.escape(str(self.page.absolute()))}</p>")
        return "".join(parts)


def audit(
    data: str,
    *,
    out: str | Path = "palimpsest-runs/audit",
    preset: Literal["quick", "cpu", "wide"] | None = None,
    recipe: str | Path | Settings | None = None,
    weights: str | Path | None = None,
    decoys: str | None = None,
    initial: str | Path | None = None,
    gradients: str | Path | Sequence[str | Path] | None = None,
    fail_above: Sequence[str] = (),
    settings: Settings | None = None,
    device: Device = "auto",
    n_workers: int = 0,
) -> Found:
    """The answer of `palimpsest audit`: what networks of a recipe leak, or one that is given, and
    which defence is worth its price.

    `data`, `decoys`: `folder:PATH` and the other sources of images. `recipe`: a YAML or JSON file,
    or settings as a tree. `weights`: audit this network, whose training images `data` are, or with
    `gradients` of batches in it, the batches.
    `record["checks"]` has the outcome of every limit of `fail_above`. Raises ValueError and
    SourceError for what cannot be read or does not fit together, UnitsFailedError for work that
    failed, after the rest is done.
    """
    _quiet()
    from flows.audit import AUDIT, given_settings, recipe_settings
    from flows.study import LimitExceededError, run_study
    from storage.documents import read_document
    from tasks.cluster.workers import Workers

    folder, chosen = Path(out), {"data": data, **(settings or {})}
    if fail_above:
        chosen["fail_above"] = list(fail_above)
    if isinstance(recipe, Mapping):
        chosen["recipe"] = dict(recipe)
    elif recipe is not None:
        chosen |= recipe_settings(Path(recipe))
    begun: dict[str, Any] = {"initial": initial, "gradients": gradients}
    given = given_settings(data, weights=weights, decoys=decoys, **begun)
    workers = Workers(device=device, n_workers=n_workers)
    with suppress(LimitExceededError):  # the record's checks say so
        _ = run_study.renamed(name=AUDIT.flow)(
            "audit", folder, "given" if given else preset, chosen | given, workers=workers
        )
    record = read_document(folder / AUDIT.record, "run the audit again")
    page = folder / f"{AUDIT.page.name}.html"
    return Found(folder, record, record["verdict"]["sentence"], AUDIT.numbers(record), page)


def attack(
    weights: str | Path,
    *,
    out: str | Path | None = None,
    data: str | None = None,
    decoys: str | None = None,
    initial: str | Path | None = None,
    method: Literal["auto", "span", "kkt"] = "auto",
    source: Literal["auto", "weights", "state", "gradients"] = "auto",
    settings: Settings | None = None,
    device: Device = "auto",
    **facts: Any,
) -> Found:
    """The training images that come out of a file of weights, as of `palimpsest attack weights`.

    `data`, `decoys`: sources of the training images and of others, to score what comes back.
    `source`: what is taken apart. `facts`: those that the file lacks, `arch`, `shape`,
    `activation`, `leak`, `mean`, `std`, `seed`, tuples of files `optimizers`, `checkpoints` and
    `gradients`, and others of `tasks.families.weights.attack.WeightsJob`. Raises WeightsError for a
    file that cannot be used, ValueError where an attack cannot work.
    """
    _quiet()
    from flows.cli.attack_file import default_folder
    from flows.families.weights import attack as flow
    from flows.families.weights.attack_plan import prepared_by
    from recon_core.attacks.span.search import SpanAttack
    from tasks.families.weights.attack import WeightsJob

    file, begun = Path(weights), None if initial is None else Path(initial)
    folder = default_folder(file) if out is None else Path(out)
    span = SpanAttack(start="unknown" if begun is None else "known")
    job = WeightsJob(
        weights=file, out=folder, initial=begun, attack=span, data=data, decoys=decoys, **facts
    )
    texts = {name: value if isinstance(value, str) else repr(value) for name, value in
             (settings or {}).items()}  # fmt: skip
    chosen, prepared, why = prepared_by(job, method, source=source, settings=texts)
    search = flow.attack_kkt if prepared.method == "kkt" else flow.attack_weights
    record = search(chosen, device=device)
    said = " ".join([f"Method: {why}" if why else "", *flow.screen_lines(record)]).strip()
    page, sheet = folder / "report.html", folder / "reconstructions.png"
    return Found(folder, record, said, flow.summary_rows(record), page, sheet)


def restore(
    pictures: str | Path,
    *,
    model: str = "nlm",
    out: str | Path,
    n_samples: int = 20,
    seed: int = 0,
    device: Device = "auto",
) -> Found:
    """Restored pictures, as of `palimpsest restore`: of a folder, an attack's or a store.

    `model`: a trained restorer's folder, `nlm`, `tv`, `wavelet` or an ONNX file. Raises what
    `flows.restore.restore` raises.
    """
    _quiet()
    from flows import restore as flow
    from flows.cli.options import store_location
    from tasks.restoring.job import SHEET, Restoration

    folder, config = Path(out), Restoration(n_samples=n_samples, seed=seed)
    source = store_location(str(pictures), "train")
    record = flow.restore(model, source, folder, config, device=device)
    facts = flow.summary(record)
    if span := record["settings"]["model"]["settings"].get("span"):
        facts["in the span of the weights"] = span["share_of_pictures"]
    said = f"{facts['pictures']} pictures were restored by {facts['restorer']}."
    return Found(folder, record, said, [facts], None, folder / SHEET)


def _cell(value: Any) -> str:
    """A value in a notebook's table."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _quiet() -> None:
    """Logs of workers and of Prefect off the screen, unless the environment says otherwise; the
    product's own notices stay."""
    from flows.cli.main import QUIET_PREFECT

    for name, value in QUIET_PREFECT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)


def open_dataset(store: str | Path, *, split: Literal["train", "heldout"] = "train") -> Dataset:
    """The pairs of a job's folder, of a store or of s3://bucket/prefix, to read. Raises
    StorageError if there are none."""
    from flows.cli.options import store_location
    from storage.pairs.dataset import Dataset

    return Dataset(store_location(str(store), split))


if __name__ == "__main__":
    from flows.cli.command import main

    main()
