"""The study of the span attack over kinds of images, optimisers and what the attacker is given: its
rows, its plan, and its page as HTML and Markdown.

Every network is trained with torch's own layers and optimisers and saved as people do; the attack
gets the files. Decoys, as many other images of the same source, and the mean image are controls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from recon_core.attacks.span.search import SpanAttack
from recon_core.strict import Count, Natural, Positive, Strict, Within
from recon_core.types import Progress, no_progress
from storage.files import write_file
from storage.sources.load import ImageSet, load_images
from tasks.cluster.jobs import this_worker
from tasks.devices import cpu_name
from tasks.families.weights.attack import WeightsJob, run_attacks
from tasks.families.weights.preflight import best_source, prepare_weights, victim_of
from tasks.families.weights.results import gather, scores_record
from tasks.page.files import Record, Table, table_of
from tasks.page.pictures import eight_bits, png_bytes, strips
from tasks.page.study_page import StudyPage, Tables
from tasks.study.executor import Unit
from tasks.study.products import (
    NOTHING,
    Arrays,
    Cost,
    Folder,
    Job,
    hash_of,
    key_of,
    loaded,
    seconds_of,
)

OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "SGD, decay 5e-4": partial(SGD, lr=0.1, weight_decay=5e-4),
    "SGD, momentum": partial(SGD, lr=0.02, momentum=0.9),
    "SGD, momentum, decay 5e-4": partial(SGD, lr=0.02, momentum=0.9, weight_decay=5e-4),
    "Adam": partial(Adam, lr=1e-3),
    "Adam, decay 5e-4": partial(Adam, lr=1e-3, weight_decay=5e-4),
    "AdamW, decay 1e-2": partial(AdamW, lr=1e-3),
}
"""AdamW without weight decay is Adam."""
Has = Literal["checkpoint", "known start", "two checkpoints", "weights alone", "gradients"]
GIVEN: dict[Has, str] = {
    "checkpoint": "the weights and the optimiser's state",
    "known start": "the weights and those before training",
    "two checkpoints": "the weights and those half-way",
    "weights alone": "the weights",
    "gradients": "the weights and the gradient of one batch of all images",
}
"""What the attacker has, besides the images' shape and the normalisation of inputs."""


@dataclass(frozen=True, kw_only=True)
class Kind(Strict):
    """Pictures from a `split` of a source, `size` by `size` in 3 or 1 `channels`, without the first
    `skip`, such as those that a shipped separator learned from."""

    data: str
    size: Annotated[int, Within("[8, inf)")] = 32
    channels: Literal[1, 3] = 3
    split: Literal["train", "heldout"] = "heldout"
    skip: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Row(Strict):
    """A network trained on `n` images of a kind. `start`: standard deviation of the first layer's
    start; None for torch's default. `divided`: inputs are divided by a standard deviation per
    channel."""

    images: str = "cifar10"
    n: Annotated[int, Within("[2, inf)")] = 200
    optimiser: str = "Adam"
    has: Has = "checkpoint"
    start: Positive | None = None
    divided: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser={self.optimiser!r} is none of {list(OPTIMISERS)}")

    @property
    def name(self) -> str:
        start = "" if self.start is None else f", start {self.start:g}"
        divided = "" if self.divided else ", not divided"
        return f"{self.images}, {self.n}, {self.optimiser}{start}{divided}, {self.has}"


@dataclass(frozen=True, kw_only=True)
class Victim(Strict):
    """A network of ten classes with biases, trained with cross-entropy."""

    widths: tuple[int, int] = (1000, 200)
    epochs: Count = 40
    batch_size: Count = 32
    seed: Natural = 0


@dataclass(frozen=True, kw_only=True)
class SpanStudy(Strict):
    """Settings of a study: its rows, and kinds of images by name. `data`: the user's own pictures
    for the rows of kind "mine", which are left out without it. `n_shown`: pictures of each row on
    the page."""

    preset: str
    kinds: dict[str, Kind]
    rows: tuple[Row, ...]
    name: Literal["span"] = "span"
    only: str = ""
    data: str = ""
    skip_corrupt: bool = False
    victim: Victim = field(default_factory=Victim)
    threads: Count = 1
    n_shown: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [row.name for row in self.rows]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two rows are {twice!r}; make them differ, or leave one out")
        for row in self.rows:
            if row.images not in self.kinds:
                raise ValueError(f"images={row.images!r} is none of the kinds {list(self.kinds)}")

    @property
    def chosen(self) -> list[Row]:
        """The rows to run: those whose names contain `only`; of one's own pictures if given."""
        return [r for r in self.rows if self.only in r.name and (self.data or r.images != "mine")]

    def kind(self, row: Row) -> Kind:
        """The kind of images of a row."""
        kind = self.kinds[row.images]
        return replace(kind, data=self.data or kind.data) if row.images == "mine" else kind

    def settings_key(self, row: Row) -> str:
        """sha256 of a row's settings."""
        return key_of(["span row", asdict(row), asdict(self.kind(row)), asdict(self.victim)])


@dataclass(frozen=True, kw_only=True)
class RowJob(Job):
    """Train a row's network and attack it. `images` and `decoys` are uint8 (n, c, h, w)."""

    row: Row
    victim: Victim
    settings_key: str
    images: npt.NDArray[np.uint8]
    decoys: npt.NDArray[np.uint8]
    classes: npt.NDArray[np.int64]
    n_shown: int

    @property
    def key(self) -> str:
        images = hash_of(self.images, self.decoys, self.classes)
        return key_of(["span row", asdict(self.row), asdict(self.victim), images])

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Pictures to show, and counts of what came back, or why the attack refuses."""
        worker = this_worker()  # whose folder goes even if it is killed
        with TemporaryDirectory(dir=None if worker is None else worker.local_directory) as name:
            folder = Path(name)
            for side, pictures in (("images", self.images), ("decoys", self.decoys)):
                (folder / side).mkdir()
                for number, picture in enumerate(pictures):
                    write_file(folder / side / f"{number:04d}.png", png_bytes(picture))
            began = time.perf_counter()
            facts = self._train(folder, lambda share: progress(0.2 * share))
            trained = time.perf_counter()
            arrays, found = self._attack(folder, facts, lambda share: progress(0.2 + 0.8 * share))
        row, start = self.row, self.row.start
        return arrays, {"name": row.name, "settings_key": self.settings_key} | {
            "cells": {
                "images": row.images, "number": row.n, "optimiser": row.optimiser,
                "start": "standard" if start is None else f"normal, {start:g}",
                "inputs": "divided" if row.divided else "not divided",
                "attacker is given": f"{row.has}: {GIVEN[row.has]}",
                **found,
                "seconds": round(time.perf_counter() - trained, 1),
                "to train": round(trained - began, 1),
                "machine": f"{cpu_name()}, threads: {torch.get_num_threads()}, {self.device}",
                "made": time.strftime("%Y-%m-%d", time.gmtime()),
            }
        }  # fmt: skip

    def _train(self, folder: Path, progress: Progress) -> dict[str, Any]:
        """Train the network, save the attacker's files, and return what else the attacker knows."""
        x, classes = torch.from_numpy(self.images).float() / 255, torch.from_numpy(self.classes)
        facts: dict[str, Any] = {"shape": tuple(x.shape[1:]), "mean": "none"}
        if self.row.divided:
            mean, std = x.mean((0, 2, 3)).round(decimals=2), x.std((0, 2, 3)).round(decimals=3)
            x = (x - mean[:, None, None]) / std[:, None, None]
            listed = ",".join(f"{value:.3f}" for value in mean.tolist())
            facts |= {"mean": listed, "std": tuple(std.tolist())}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.victim.seed)
            first, (a, b) = nn.Linear(x[0].numel(), self.victim.widths[0]), self.victim.widths
            rest = (nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 10))
            net = nn.Sequential(nn.Flatten(), first, nn.ReLU(), *rest)
            if self.row.start is not None:
                nn.init.normal_(first.weight, std=self.row.start)
            optimiser = OPTIMISERS[self.row.optimiser](net.parameters())

            def backward(batch: Tensor) -> None:
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[batch]), classes[batch] % 10).backward()

            early = {"known start": 0, "two checkpoints": self.victim.epochs // 2}
            for epoch in range(self.victim.epochs):
                if epoch == early.get(self.row.has):
                    torch.save(net.state_dict(), folder / "initial.pt")
                for batch in torch.randperm(len(x)).split(self.victim.batch_size):
                    backward(batch)
                    optimiser.step()
                progress((epoch + 1) / self.victim.epochs)
        saved: dict[str, Any] = {"model": net.state_dict()}
        if self.row.has == "checkpoint":
            saved["optimizer"] = optimiser.state_dict()
        elif self.row.has == "gradients":
            backward(torch.arange(len(x)))
            gradients = {name: p.grad for name, p in net.named_parameters()}
            torch.save(gradients, folder / "gradients.pt")
            facts["gradients"] = (folder / "gradients.pt",)
        elif self.row.has in early:
            facts["initial"] = folder / "initial.pt"
        torch.save(saved, folder / "network.pt")
        return facts

    def _attack(
        self, folder: Path, facts: Mapping[str, Any], progress: Progress
    ) -> tuple[Arrays, dict[str, Any]]:
        attack = SpanAttack(start="known" if "initial" in facts else "unknown")
        job = WeightsJob(
            weights=folder / "network.pt", out=folder / "out", data=f"folder:{folder / 'images'}",
            decoys=f"folder:{folder / 'decoys'}", attack=attack, n_shown=1, **facts,
        )  # fmt: skip
        if attack.start == "unknown":
            attack = replace(attack, source=best_source(victim_of(job), attack))
        job = replace(job, attack=attack)
        prepared = prepare_weights(job)
        if prepared.preflight.stopped:
            return NOTHING, {"refused": prepared.preflight.reason}
        runs = run_attacks(
            job, prepared.victim, device=self.device, on_progress=lambda n, of: progress(n / of)
        )
        results = gather(job, runs, prepared)
        scores = scores_record(results, prepared.truth, prepared.decoys)["scores"]
        identified, control = (scores["compared"][key] for key in ("identified", "mean_image"))
        assert results.truth is not None
        assert prepared.span is not None
        shown = np.linspace(0, len(self.images) - 1, self.n_shown).round().astype(np.int64)
        return {"original": self.images[shown], "found": eight_bits(results.truth.shown)[shown]}, {
            "taken apart": attack.source, "directions": len(prepared.span.vectors),
            "identified": identified["images"], "identified decoys": identified["decoys"],
            "good": scores["images"]["n_good"], "good decoys": scores["decoys"]["n_good"],
            "SSIM": round(scores["images"]["mean_ssim"], 3),
            "good by the mean image": control["images"]["n_good"],
        }  # fmt: skip


PROBE = 40
"""Most images of a row that is timed for an estimate."""
MOST_BYTES = 8_000_000
"""Most bytes of the page's pictures, as text."""


@dataclass
class SpanPlan:
    """The chosen rows as units, and the stored products of all rows. Raises SourceError for a
    source that cannot be read, ValueError if it has too few pictures, or if no row is chosen."""

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
        jobs = {}
        for row in self.study.chosen:
            source, skip = self.images[row.images], self.study.kind(row).skip
            drawn = torch.Generator().manual_seed(self.study.victim.seed)
            order = skip + torch.randperm(len(source) - skip, generator=drawn).numpy()
            images, decoys = order[: row.n], order[row.n : 2 * row.n]
            jobs[row.name] = RowJob(
                root=self.root, device=self.device, row=row, victim=self.study.victim,
                settings_key=self.study.settings_key(row), images=source.images[images],
                decoys=source.images[decoys], classes=source.labels[images],
                n_shown=self.study.n_shown,
            )  # fmt: skip
        return jobs

    def first_units(self) -> list[Unit]:
        """All rows."""
        return [Unit(name, RowJob.run, job) for name, job in self.jobs.items()]

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]:
        """None."""
        del unit, given
        return ()

    def standing(self) -> list[tuple[Arrays, dict[str, Any]]]:
        """Stored products of all rows with the study's settings, in the rows' order."""
        found: dict[str, Any] = {}
        for path in sorted(self.folder.place.glob("*.json"), key=lambda path: path.stat().st_mtime):
            if (product := loaded(path.parent, path.stem)) is not None:
                found[product[1]["settings_key"]] = product
        for job in self.jobs.values():  # of the images as they are now
            found[job.settings_key] = self.folder.product(job.key)
        return [p for row in self.study.rows if (p := found.get(self.study.settings_key(row)))]


def costs_of(plan: SpanPlan, _device: str) -> list[Cost]:
    """Estimate the missing rows by kind of images, in proportion to the number of images: from the
    stored rows of this kind, else from a row of few images, which is run."""
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
    """All rows: what was attacked, what the attacker had, and what came back, beside decoys."""
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


def words(
    record: Record, pictures: Mapping[str, npt.NDArray[Any]], _tables: Tables
) -> dict[str, Any]:
    """Values for this page's template alone."""
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
