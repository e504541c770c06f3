"""The study of the autoencoder paper: train autoencoders, ask for their images, judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.families.autoencoder.grids import PRESETS
from flows.settings import replace_setting, values_of
from flows.study_kind import UnitStudy
from storage.files import write_file
from tasks.campaign.state import CONTROL_FILE
from tasks.families.autoencoder.study import record as records
from tasks.families.autoencoder.study.claims import check_recovery
from tasks.families.autoencoder.study.figure_specs import cells_of, describe_figures, lowest, pooled
from tasks.families.autoencoder.study.page import RECOVERY_PAGE
from tasks.families.autoencoder.study.plan import RecoveryPlan, costs_of
from tasks.families.autoencoder.study.settings import RecoveryStudy, Sources
from tasks.study.executor import Outcome

OF_EVERY_VICTIM = "victim."
"""Settings that begin with this are set in every victim that has them."""


class AutoencoderStudy(UnitStudy[RecoveryStudy, RecoveryPlan]):
    """Victims, masks, methods and losses: `RecoveryStudy`."""

    settings = RecoveryStudy
    parts, unit = "victims", "unit"
    products = frozenset({"victims", "inpainter", "cells", CONTROL_FILE})
    flow = "study-autoencoder"
    whole_units = True

    def size(self, made: RecoveryStudy) -> str:
        return f"{len(made.victims)} autoencoders, {len(made.masks)} masks"

    def narrowed(self, made: RecoveryStudy, changes: Mapping[str, Any]) -> RecoveryStudy:
        """Without the noise, if none of the victims is asked with it."""
        noise, names = made.noise, {victim.name for victim in changes["victims"]}
        if noise is not None and noise.victims:
            left = tuple(name for name in noise.victims if name in names)
            noise = replace(noise, victims=left) if left else None
        return replace(made, noise=noise, **changes)

    def replace(self, tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
        for setting, value in settings.items():
            own = setting.removeprefix(OF_EVERY_VICTIM)
            if own == setting:
                replace_setting(tree, setting, value)
                continue
            having = [v for v in tree["victims"] if own in dict(values_of(v))] or tree["victims"]
            for victim in having:
                replace_setting(victim, own, value)

    def plan(self, made: RecoveryStudy, store: Path, device: str) -> RecoveryPlan:
        return RecoveryPlan(made, Sources.read(made), store, device=device)

    def facts(self, plan: RecoveryPlan) -> list[tuple[str, Mapping[str, str]]]:
        return [
            (images.split, images.facts)
            for splits in plan.sources.sets.values()
            for images in splits.values()
        ]

    def planned(self, plan: RecoveryPlan) -> str:
        return f"{plan.n_units} units"

    def describe(self, plan: RecoveryPlan, ended: Outcome) -> tuple[list[Any], dict[str, Any]]:
        hashes = {
            f"{data} {size} {split}": images.content_hash
            for (data, size), splits in plan.sources.sets.items()
            for split, images in splits.items()
        }
        return [self.to_json(plan.study), hashes], records.describe_recovery(plan, ended)

    def keep_pictures(
        self, store: Path, plan: RecoveryPlan, ended: Outcome, record: Mapping[str, Any]
    ) -> None:
        write_file(store / self.pictures, records.pictures_of(plan, ended, record))

    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row per victim and method, at the lowest loss that was reached, over all masks."""
        rows: list[dict[str, Any]] = []
        for victim in record["victims"]:
            if (at := lowest(victim)) is None:
                last = f"last {victim['last']['loss']:.2g}"
                rows.append({"victim": victim["title"], "loss": "none", "method": last})
                continue
            for method in record["methods"]:
                where = {"victim": victim["name"], "level": at["level"], "method": method["name"]}
                cells = cells_of(record, split="train", sigma=0.0, **where)
                if not cells:
                    continue
                found = pooled(cells)
                rows.append(
                    {
                        "victim": victim["title"],
                        "loss": f"{at['level']:g}",
                        "method": method["title"],
                        "accurate": f"{found['n_accurate']}/{found['n']}",
                        "approximate": f"{found['n_approximate']}/{found['n']}",
                        "PSNR": f"{found['psnr']:.1f} dB",
                    }
                )
        names = ("victim", "loss", "method", "accurate", "approximate", "PSNR")
        return [{name: row.get(name, "") for name in names} for row in rows]


AUTOENCODER = AutoencoderStudy(
    name="autoencoder",
    title="Training images from overfitted autoencoders",
    question="Do overfitted autoencoders give back training images of which pixels are missing?",
    paper="autoencoder paper, section 4",
    presets=PRESETS,
    costs=costs_of,
    figures=lambda _plan, record: describe_figures(record),
    claims=check_recovery,
    page=RECOVERY_PAGE,
)
