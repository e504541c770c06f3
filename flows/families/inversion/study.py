"""The study of the MixCon paper: train split classifiers, invert them, price a defence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.settings import changes
from flows.study_kind import UnitStudy
from recon_core.attacks.inversion.feature_matching import SVHN, GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.restore import BFDnCNN, Training
from recon_core.victims.split_training import SplitTraining
from storage.files import write_file
from tasks.campaign.state import CONTROL_FILE
from tasks.families.inversion.study import record as records
from tasks.families.inversion.study.claims import check_inversion
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.families.inversion.study.plan import InversionPlan, costs_of
from tasks.families.inversion.study.record import role_cells, sweet_spots
from tasks.families.inversion.study.settings import (
    Chain,
    InversionSource,
    InversionStudy,
    read_sources,
)
from tasks.families.inversion.study.tables import describe_figures
from tasks.study.executor import Outcome, Unit

CPU_CHAIN = Chain(
    restorer=BFDnCNN(depth=8, n_channels=48, patch=2, loss_terms="mse+ssim", ssim_weight=0.3),
    training=Training(
        n_steps=300,
        batch_size=32,
        lr=2e-3,
        warmup_images=640,
        decay="cosine",
        ema_halflife_images=1_000,
    ),
)
"""About a minute on one core."""


def paper() -> InversionStudy:
    """MixCon paper, sections 4.2 and 4.3: the grid of 56 settings, four cuts, 100 test images."""
    mnist = InversionSource(
        name="mnist",
        title="MNIST",
        data="mnist:mnist",
        size=28,
        n_train=50_000,
        n_tests=8_000,
        n_public=1_000,
    )
    return InversionStudy(
        preset="paper",
        sources=(
            mnist,
            replace(
                mnist,
                name="fashion-mnist",
                title="FashionMNIST",
                data="fashion-mnist:fashion-mnist",
            ),
            InversionSource(
                name="svhn",
                title="SVHN",
                data="svhn:svhn",
                channels=3,
                n_train=45_000,
                n_tests=15_000,
                n_public=1_000,
                chosen=(0.5, 1e-4),
                unicon=0.5,
                attack=SVHN,
            ),
        ),
        n_seeds=5,
        n_grid_seeds=3,
    )


def cpu() -> InversionStudy:
    """An hour on two cores: digits with the paper's whole grid, and CIFAR-10 in grey."""
    return InversionStudy(
        preset="cpu",
        sources=(
            InversionSource(
                name="digits",
                title="digits",
                data="digits",
                n_train=1_000,
                n_tests=330,
                n_inverted=20,
                n_public=200,
                training=SplitTraining(epochs=150, lr=0.05, per_class=20),
                chosen=(1.0, 1e-2),
            ),
            InversionSource(
                name="cifar10",
                title="CIFAR-10 in grey",
                data="cifar10:cifar-10-batches-py",
                n_train=10_000,
                n_tests=2_000,
                n_inverted=20,
                n_public=200,
                training=SplitTraining(epochs=30, lr=0.01, momentum=0.9, per_class=20),
                lams=(0.01, 0.03, 0.1, 1.0),
                betas=(1e-2, 1e-4, 1e-6),
                chosen=(0.1, 1e-2),
            ),
        ),
        n_seeds=4,
        n_grid_seeds=1,
        rates=(0.03, 0.3, 3.0),
        zetas=(0.1, 0.3, 1.0, 3.0),
        strong=StrongInversion(n_steps=200),
        n_tuning=10,
        chain=CPU_CHAIN,
        victims_at_once=4,
    )


def tiny() -> InversionStudy:
    """For tests: digits of 16x16, two settings, seconds."""
    return InversionStudy(
        preset="tiny",
        sources=(
            InversionSource(
                name="digits",
                title="digits",
                data="digits",
                size=16,
                n_train=200,
                n_tests=100,
                n_inverted=10,
                n_public=40,
                training=SplitTraining(epochs=3, lr=0.05, per_class=10),
                lams=(0.1, 1.0),
                betas=(1e-2,),
                chosen=(1.0, 1e-2),
                cuts=(1, 2),
                attack=GradientInversion(n_steps=10),
            ),
        ),
        n_seeds=2,
        n_grid_seeds=1,
        rates=(0.1, 10.0),
        strong=StrongInversion(n_steps=10, starts=("grey", "noise")),
        zetas=(0.01, 1.0),
        n_tuning=10,
        chain=Chain(
            restorer=BFDnCNN(depth=2, n_channels=4),
            training=Training(n_steps=3, batch_size=8, warmup_images=8),
        ),
        n_shown=3,
    )


class SplitStudy(UnitStudy[InversionStudy, InversionPlan]):
    """Images, networks, defences and attackers: `InversionStudy`."""

    settings = InversionStudy
    parts, each, unit = "sources", "source", "what"
    products = frozenset({"victims", "products", CONTROL_FILE})
    flow = "study-inversion"

    def size(self, study: InversionStudy) -> str:
        return f"{len(study.sources)} sources, {len(study.cells)} cells"

    def replace(self, tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
        """`data` is that of the only source, or of the last."""
        last = f"sources.{len(tree['sources']) - 1}.data"
        super().replace(tree, {last if n == "data" else n: v for n, v in settings.items()})

    def differences(self, base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        last = f"sources.{len(tree['sources']) - 1}.data"
        return {"data" if n == last else n: v for n, v in changes(base, tree).items()}

    def plan(self, study: InversionStudy, store: Path, device: str) -> InversionPlan:
        return InversionPlan(study, read_sources(study), store, device=device)

    def facts(self, plan: InversionPlan) -> list[tuple[str, Mapping[str, str]]]:
        return [fact for images in plan.images.values() for fact in images.facts.items()]

    def rounds(self, plan: InversionPlan) -> Iterator[list[Unit]]:
        """The grid by its seeds; the sweet spots by the others; the restorers."""
        yield plan.first_units()
        sweet = sweet_spots(plan)
        yield plan.confirm(dict.fromkeys(sweet.values()))
        yield plan.restoring_units(role_cells(plan, sweet))

    def describe(self, plan: InversionPlan, ended: Outcome) -> tuple[list[Any], dict[str, Any]]:
        hashes = {name: images.content_hash for name, images in plan.images.items()}
        body = records.describe_inversion(plan, ended.failed)
        return [self.to_json(plan.study), hashes], body

    def keep_pictures(
        self, store: Path, plan: InversionPlan, _ended: Outcome, record: Mapping[str, Any]
    ) -> None:
        write_file(store / self.pictures, records.pictures_of(plan, record))
        plan.write_victims(role_cells(plan, sweet_spots(plan)))

    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row per cell with a role: what it costs, and what every attack gets."""
        rows = []
        for cell in record["cells"]:
            if not cell["roles"] or cell["accuracy"]["mean"] is None:
                continue
            row = {
                "images": cell["source"],
                "defence": cell["title"],
                "chosen as": ", ".join(cell["roles"]),
                "accuracy": f"{cell['accuracy']['mean']:.1%}",
            }
            for attack in record["attacks"]:
                there = cell["attacks"].get(attack["name"])
                mean = None if there is None else there["ssim"]["mean"]
                row[f"SSIM, {attack['name']}"] = "" if mean is None else f"{mean:.3f}"
            rows.append(row)
        return rows


INVERSION = SplitStudy(
    name="inversion",
    title="Split networks: what the features give away, and what MixCon hides",
    question="A client sends the features of an image to a server. How much of the image comes "
    "back, does training with MixCon prevent it, and does a better attacker undo that?",
    paper="MixCon paper",
    presets={"paper": paper, "cpu": cpu, "tiny": tiny},
    costs=costs_of,
    figures=lambda _plan, record: describe_figures(record),
    claims=check_inversion,
    page=INVERSION_PAGE,
)
