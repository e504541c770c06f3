"""A row of the study of the span attack: a network, what its attacker is given, what came back.

Every network is trained with torch's own layers and optimisers and saved as people do; the attack
gets the files. Beside the images stand as many others of the same source, decoys, and the mean
image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from recon_core.attacks.span.settings import SpanAttack
from recon_core.strict import Count, Natural, Positive, Strict, Within
from recon_core.types import Progress
from storage.files import write_file
from tasks.campaign.part import this_worker
from tasks.devices import cpu_name
from tasks.families.weights.attack import WeightsJob, run_attacks
from tasks.families.weights.preflight import prepare_weights, victim_of
from tasks.families.weights.results import gather, scores_record
from tasks.families.weights.sources import best_source
from tasks.page.pictures import eight_bits, png_bytes
from tasks.study.products import NOTHING, Arrays, Job, hash_of, key_of

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
"""What the attacker has, beside the images' shape and what inputs were normalised by."""


@dataclass(frozen=True, kw_only=True)
class Kind(Strict):
    """Pictures of a `split` of a source, `size` by `size` in 3 or 1 `channels`. The first `skip` of
    them are left out, such as those that a shipped separator learned from."""

    data: str
    size: Annotated[int, Within("[8, inf)")] = 32
    channels: Literal[1, 3] = 3
    split: Literal["train", "heldout"] = "heldout"
    skip: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Row(Strict):
    """`n` images of a kind, and a network. `start`: standard deviation of the first layer's start;
    None for torch's. `divided`: inputs are divided by a standard deviation per channel."""

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
    """Rows over kinds of images by name. `data`: the user's own pictures, kind "mine", whose rows
    are left out without it. `n_shown`: pictures of each row on the page."""

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
        """The rows to run: those that `only` names, and of one's own pictures if they are given."""
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
        """Pictures that are shown, and counts of what came back; why, if the attack refuses."""
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
        """Saves what the attacker has; what it knows beside the files."""
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
