"""The plan of a study of the span attack, its record, and its page as HTML and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recon_core.types import no_progress
from storage.sources.load import ImageSet, load_images
from tasks.families.weights.study.span_rows import Row, RowJob, SpanStudy
from tasks.page.files import Arrays, Record
from tasks.page.pictures import strips
from tasks.page.study_page import StudyPage, Tables
from tasks.page.tables import Table, table_of
from tasks.study.cost import Cost, seconds_of
from tasks.study.executor import Unit
from tasks.study.products import Folder, loaded

PROBE = 40
"""Images of the row that is timed for an estimate."""
MOST_BYTES = 8_000_000
"""Pictures of the page, as text."""


@dataclass
class SpanPlan:
    """The chosen rows as units, and what a store has of all rows. Raises SourceError for a source
    that cannot be read, ValueError for one with too few pictures, or if no row is chosen."""

    study: SpanStudy
    root: str
    device: str
    images: dict[str, ImageSet] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.study.chosen:
            raise ValueError(f"--only {self.study.only!r}: rows of one's own pictures need --data")
        for row in self.study.chosen:
            kind = self.study.kind(row)
            if row.images not in self.images:
                self.images[row.images] = load_images(
                    kind.data, split=kind.split, size=kind.size, channels=kind.channels,
                    skip_corrupt=self.study.skip_corrupt,
                )  # fmt: skip
            if (n := len(self.images[row.images]) - kind.skip) < 2 * row.n:
                raise ValueError(
                    f"{row.name}: {row.n} images and as many decoys are more than the {n} pictures "
                    f"of {kind.data}; choose rows by --only, or give kinds.{row.images}.data"
                )

    @property
    def folder(self) -> Folder:
        return Folder(Path(self.root))

    @property
    def n_units(self) -> int:
        return len(self.jobs)

    @cached_property
    def jobs(self) -> dict[str, RowJob]:
        """A job for each chosen row, by name."""
        return {row.name: self._job(row) for row in self.study.chosen}

    def first_units(self) -> list[Unit]:
        """All rows."""
        return [Unit(name, RowJob.run, job) for name, job in self.jobs.items()]

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]:
        """None."""
        del unit, given
        return ()

    def standing(self) -> list[tuple[Arrays, dict[str, Any]]]:
        """Products of all rows that the store has with the study's settings, in the rows' order."""
        found: dict[str, Any] = {}
        for path in sorted(self.folder.place.glob("*.json"), key=lambda path: path.stat().st_mtime):
            if (product := loaded(path.parent, path.stem)) is not None:
                found[product[1]["settings_key"]] = product
        for job in self.jobs.values():  # of the images as they are now
            found[job.settings_key] = self.folder.product(job.key)
        return [p for row in self.study.rows if (p := found.get(self.study.settings_key(row)))]

    def _job(self, row: Row) -> RowJob:
        source, skip = self.images[row.images], self.study.kind(row).skip
        drawn = torch.Generator().manual_seed(self.study.victim.seed)
        order = skip + torch.randperm(len(source) - skip, generator=drawn).numpy()
        images, decoys = order[: row.n], order[row.n : 2 * row.n]
        return RowJob(
            root=self.root, device=self.device, row=row, victim=self.study.victim,
            settings_key=self.study.settings_key(row), images=source.images[images],
            decoys=source.images[decoys], classes=source.labels[images],
            n_shown=self.study.n_shown,
        )  # fmt: skip


def costs_of(plan: SpanPlan, _device: str) -> list[Cost]:
    """Costs of the missing rows by kind of images, as if time grew with the number of images: that
    of the rows of this kind that stand, else of a row of few images, which is run."""
    costs, standing = [], [facts for _arrays, facts in plan.standing()]
    for kind in plan.images:
        jobs = [job for job in plan.jobs.values() if job.row.images == kind]
        missing = [job for job in jobs if not job.folder.has(job.key)]
        cells = [facts["cells"] for facts in standing if facts["cells"]["images"] == kind]
        made = [(cell["seconds"] + cell["to train"], cell["number"]) for cell in cells]
        if missing and not made:
            few = {name: getattr(jobs[0], name)[:PROBE] for name in ("images", "decoys", "classes")}
            work = partial(replace(jobs[0], **few).make, no_progress)
            made = [(seconds_of(work), len(few["images"]))]
        each = sum(s for s, _n in made) / max(1, sum(n for _s, n in made))
        seconds = {"work": each * sum(job.row.n for job in missing)}
        disk = sum(2 * job.n_shown * job.images[0].nbytes for job in missing)
        counts = {"missing": len(missing)}
        costs.append(Cost(name=kind, counts=counts, seconds_of=seconds, disk_bytes=disk))
    return costs


def rows_table(record: Record) -> Table:
    """All rows: what was attacked, what the attacker had, and what came back beside decoys."""
    return table_of("rows", [row["cells"] for row in record["rows"]])


def markdown(record: Record) -> str:
    """The study as Markdown."""
    table = rows_table(record)
    rows = [table.columns, ["---"] * len(table.columns), *(row.values() for row in table.rows())]
    lines = ["| " + " | ".join("" if c is None else str(c) for c in row) + " |" for row in rows]
    stand = (
        f"{len(record['rows'])} of {len(record['settings']['rows'])} rows stand; the last command"
    )
    head = (f"# {record['title']}", record["question"], ABOUT, f"{stand}: `{record['command']}`")
    return "\n\n".join([*head, "\n".join(lines)]) + "\n"


def words(record: Record, pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values that only this page shows."""
    names = [row["name"] for row in record["rows"] if f"{row['name']}/found" in pictures]
    both = [pictures[f"{name}/{side}"] for name in names for side in ("original", "found")]
    in_colour = [np.broadcast_to(p, (len(p), 3, *p.shape[2:])) for p in both]
    urls, _exact = strips(in_colour, most_bytes=MOST_BYTES)
    shown = list(zip(names, urls[::2], urls[1::2], strict=True))
    return {
        "about": ABOUT,
        "shown": shown,
        "run": [("rows", f"{len(record['rows'])} of {len(record['settings']['rows'])}")],
    }


ABOUT = (
    "Networks of ten classes with biases, in every row with as many decoys, images of the same "
    "source that the network never saw, as images. The attacker also knows the images' shape and "
    "what inputs were normalised by. Identified: the best match is nearer to the image by .05 of "
    "SSIM than to any other image (of a decoy, to any other decoy). Good: SSIM above .4. Digits "
    "resemble each other, so that decoys of theirs are good, too: there identified counts. The "
    "mean image is a control: it stands in for every reconstruction."
)
SPAN_PAGE = StudyPage(
    name="span",
    version=1,
    command="palimpsest study span",
    kinds={},
    tables=lambda record: [rows_table(record)],
    words=words,
    stages={"to train": "to train the networks", "seconds": "to attack them"},
)
