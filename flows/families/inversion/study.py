"""The study of the MixCon paper: train split classifiers, invert them, price a defence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.families.inversion.grids import PRESETS
from flows.settings import changes, replace_setting, values_of
from flows.study_kind import UnitStudy
from storage.files import write_file
from tasks.campaign.state import CONTROL_FILE
from tasks.families.inversion.study import record as records
from tasks.families.inversion.study.claims import check_inversion
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.families.inversion.study.plan import InversionPlan, costs_of
from tasks.families.inversion.study.record import role_cells, sweet_spots
from tasks.families.inversion.study.settings import InversionStudy, read_sources
from tasks.families.inversion.study.tables import describe_figures
from tasks.study.executor import Outcome, Unit

OF_EVERY_SOURCE = "source"
"""Settings that begin with this are set in every source; with a source's name, in that one."""


class SplitStudy(UnitStudy[InversionStudy, InversionPlan]):
    """Images, networks, defences and attackers: `InversionStudy`."""

    settings = InversionStudy
    parts, unit = "sources", "what"
    products = frozenset({"victims", "products", CONTROL_FILE})
    flow = "study-inversion"

    def size(self, made: InversionStudy) -> str:
        return f"{len(made.sources)} sources, {len(made.cells)} cells"

    def replace(self, tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
        """`data` is that of the only source, or of the last."""
        by_name = {source["name"]: source for source in tree["sources"]}
        for setting, value in settings.items():
            first, _dot, rest = setting.partition(".")
            if setting == "data":
                if not by_name:
                    raise ValueError("the study has no source to take data; leave --data out")
                tree["sources"][-1]["data"] = value
            elif first == OF_EVERY_SOURCE and rest:
                for source in tree["sources"]:
                    replace_setting(source, rest, value)
            elif first in by_name and rest:
                replace_setting(by_name[first], rest, value)
            else:
                replace_setting(tree, setting, value)

    def differences(self, base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        found = {}
        own = {source["name"]: dict(values_of(source)) for source in base.pop("sources")}
        for source in (sources := tree.pop("sources")):
            for name, value in values_of(source):
                if own[source["name"]].get(name, ...) != value:
                    found[f"{source['name']}.{name}"] = value
        found |= changes(base, tree)
        data = found.pop(f"{sources[-1]['name']}.data", None) if sources else None
        return found | ({} if data is None else {"data": data})

    def plan(self, made: InversionStudy, store: Path, device: str) -> InversionPlan:
        return InversionPlan(made, read_sources(made), store, device=device)

    def facts(self, plan: InversionPlan) -> list[tuple[str, Mapping[str, str]]]:
        return [fact for images in plan.images.values() for fact in images.facts.items()]

    def planned(self, plan: InversionPlan) -> str:
        return f"{len(plan.study.cells)} cells"

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
    presets=PRESETS,
    costs=costs_of,
    figures=lambda _plan, record: describe_figures(record),
    claims=check_inversion,
    page=INVERSION_PAGE,
)
