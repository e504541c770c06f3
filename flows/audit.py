"""An audit: what networks of a recipe leak, and which defence is worth its price."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.audit_grid import PRESETS
from flows.settings import replace_setting, set_words, value_at
from flows.study_kind import UnitStudy
from recon_core.victims.network import Conv
from recon_core.victims.separability import MixCon
from storage.files import text_bytes, write_file
from tasks.audit.given import GivenPlan
from tasks.audit.page import AUDIT_PAGE, describe_figures
from tasks.audit.plan import AuditPlan, costs_of, read_images, resolved
from tasks.audit.recipe import AutoencoderRecipe
from tasks.audit.record import describe_audit, pictures_of
from tasks.audit.settings import Audit, GivenWeights
from tasks.audit.verdict import junit, model_card
from tasks.campaign.state import CONTROL_FILE
from tasks.cluster.batch_systems import read_yaml
from tasks.study.executor import Outcome
from tasks.study.products import npz_of

OPTIONAL: dict[str, Callable[[], dict[str, Any]]] = {
    "private": lambda: {"epsilon": None, "delta": 1e-5, "clip": 1.0},
    "victim.conv": lambda: asdict(Conv()),
    "mixcon": lambda: asdict(MixCon()),
    "autoencoder": lambda: json.loads(json.dumps(asdict(AutoencoderRecipe()))),
}
"""Parts of a recipe that it need not have, as they begin where one setting of them is given."""
JUNIT, CARD = "audit-junit.xml", "model-card.md"


class AuditStudy(UnitStudy[Audit, AuditPlan]):
    """Victims under defences, and attacks on them: `Audit`."""

    settings = Audit
    parts, unit = "defences", "cell"
    products = frozenset({"products", JUNIT, CARD, CONTROL_FILE})
    flow = "audit"

    @property
    def work(self) -> str:
        return "Audit"

    def size(self, made: Audit) -> str:
        kinds = [cell.kind for cell in made.cells]
        n, others = kinds.count("defence"), kinds.count("variant")
        ways = f", {others} other way{'s' * (others != 1)} to train" if others else ""
        networks = "one network" if made.n_victims == 1 else f"{made.n_victims} networks each"
        return f"{n} defence{'s' * (n != 1)}{ways}, {networks}"

    def replace(self, tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
        """`recipe` is a tree of its own, of which all or some settings are given."""
        for name, value in settings.items():
            if name in ("recipe", "weights"):
                if not isinstance(value, Mapping):
                    raise ValueError(
                        f"{name}={value!r} is not settings; set single ones, as {name}.NAME=VALUE"
                    )
                tree[name] = tree[name] or {}
                _merge(tree[name], value)
                continue
            for part, begun in OPTIONAL.items():
                above, _, last = f"recipe.{part}".rpartition(".")
                place = value_at(tree, above)
                if name.startswith(f"recipe.{part}.") and place[last] is None:
                    place[last] = begun()
            replace_setting(tree, name, value)

    def plan(self, made: Audit, store: Path, device: str) -> AuditPlan:
        if made.weights is not None:
            return GivenPlan(made, store, device=device)
        images = read_images(made)
        return AuditPlan(resolved(made, images), images, store, device=device)

    def facts(self, plan: AuditPlan) -> list[tuple[str, Mapping[str, str]]]:
        both = (plan.images.pool, plan.images.others)
        return [(name, i.facts) for name, i in zip(plan.sides, both, strict=True)]

    def notes(self, plan: AuditPlan) -> list[str]:
        cells = plan.study.cells
        refused = [f"Left out: {cells[k].name}: {why}" for k, why in plan.refused.items()]
        return [f"{plan.study.recipe.n_images} images in each network", *refused]

    def planned(self, plan: AuditPlan) -> str:
        return f"{plan.n_units:,} units"

    def describe(self, plan: AuditPlan, ended: Outcome) -> tuple[list[Any], dict[str, Any]]:
        images = [plan.images.pool.content_hash, plan.images.others.content_hash]
        return [self.to_json(plan.study), images], describe_audit(plan, ended)

    def keep_pictures(
        self, store: Path, plan: AuditPlan, _ended: Outcome, record: Mapping[str, Any]
    ) -> None:
        write_file(store / self.pictures, npz_of(pictures_of(plan, record)))
        write_file(store / JUNIT, junit(record))
        write_file(store / CARD, text_bytes(model_card(record)))

    def exceeded(self, record: Mapping[str, Any]) -> list[str]:
        return [
            f"{check['condition']} fails: {check['value']:.3f} by {check['attack']}"
            for check in record["checks"]
            if check["outcome"] == "fails"
        ]

    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The `numbers` as texts for the screen."""
        return [
            {
                name: value if isinstance(value, str) else "-" if value is None else f"{value:.1%}"
                for name, value in row.items()
            }
            for row in self.numbers(record)
        ]

    def numbers(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row per cell: its accuracy, and what every attack gets at the headline's rate; None
        for what is not known."""
        rate = f"{record['rate']:g}"
        rows = []
        for cell in record["cells"]:
            row: dict[str, Any] = {"defence": cell["name"]}
            if cell["failed"] is not None:
                row[record["price"]] = None
            elif (cell["accuracy"] or {}).get("test") is not None:
                row[record["price"]] = cell["accuracy"]["test"]
            for attack in record["attacks"]:
                found = cell["attacks"].get(attack["name"], {"status": "refused"})
                row[attack["title"]] = None
                if found["status"] == "ran":
                    shares = found["good_at"] or found["found_at"]
                    row[attack["title"]] = shares[rate]["mean"]
            row["effect"] = (cell["effect"] or {}).get("word", "")
            rows.append(row)
        return rows

    def command(self, made: Any) -> str:
        """The command that makes this audit from nothing."""
        base = self.to_json(self.named(made.preset, only=made.only))
        found = self.differences(base, self.to_json(made))
        words = ["palimpsest", "audit", "--data", found.pop("data")]
        if made.weights is None:
            words += ["--preset", made.preset]
        else:
            given, plain = made.weights, GivenWeights(file="", decoys="")
            options: dict[str, Any] = {"weights": given.file, "decoys": given.decoys}
            for name in ("initial", "arch", "activation", "leak", "mean", "pixel_order",
                         "channel_order"):  # fmt: skip
                if (value := getattr(given, name)) != getattr(plain, name):
                    options[name.replace("_", "-")] = value
            if given.shape is not None:
                options["shape"] = "x".join(map(str, given.shape))
            if given.std is not None:
                options["std"] = ",".join(map(str, given.std))
            pairs = [*options.items(), *(("gradients", path) for path in given.gradients)]
            words += [word for name, value in pairs for word in (f"--{name}", str(value))]
            of_file = ("weights", "recipe")  # its recipe is read from it
            found = {n: v for n, v in found.items() if not n.startswith(of_file)}
        for option, values in (
            ("only", made.only and [made.only]),
            ("fail-above", made.fail_above),
        ):
            words += [word for value in values or () for word in (f"--{option}", value)]
        found.pop("fail_above", None)
        return shlex.join([*words, *set_words(found)])

    def differences(self, base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        """Defences that are others stand as a whole."""
        same = {"defences": None} if base["defences"] != tree["defences"] else {}
        found = super().differences(base | same, tree | same)
        return found | ({"defences": tree["defences"]} if same else {})


def recipe_settings(path: Path) -> dict[str, Any]:
    """Settings of an audit in a YAML or JSON file: those of a recipe, and `defences` beside them.
    Raises ValueError naming the file and the fix."""
    found = read_yaml(str(path), "give a recipe, as docs/audit.md shows one")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path} has no settings; write `key: value` lines, as in docs/audit.md")
    own = {name: value for name, value in found.items() if name != "defences"}
    return {"recipe": own, **({"defences": found["defences"]} if "defences" in found else {})}


def given_settings(
    data: str | None, *, weights: str | Path | None, decoys: str | None, **facts: Any
) -> dict[str, Any]:
    """Settings of an audit of a network that is given, none without `weights`; `facts` as in
    `GivenWeights`. Raises ValueError for what does not go together."""
    if weights is None:
        if decoys is not None or any(value is not None for value in facts.values()):
            raise ValueError(
                "decoys, the start, the mean and other facts are of a network that is given; give "
                "its weights, too, or leave them out"
            )
        return {}
    if data is None or decoys is None:
        raise ValueError(
            "weights need data, its training images, and decoys, others of the same kind that it "
            "never saw: a count without decoys says nothing"
        )
    known = {name: value for name, value in facts.items() if value is not None}
    if "initial" in known:
        known["initial"] = str(Path(known["initial"]).absolute())
    if "gradients" in known:
        paths = known["gradients"]
        paths = [paths] if isinstance(paths, str | Path) else paths
        known["gradients"] = [str(Path(path).absolute()) for path in paths]
    return {"weights": {"file": str(Path(weights).absolute()), "decoys": decoys, **known}}


def _merge(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Puts settings over those of a tree, which need not have them: what reads it knows."""
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value


AUDIT = AuditStudy(
    name="audit",
    title="What leaks, and which defence is worth its price",
    question="How many of a network's training images come back from it, what do defences leave "
    "of that, and what do they cost in accuracy?",
    paper="ours; DP-SGD of Abadi et al. 2016, membership of Yeom et al. 2018 and Carlini et al. "
    "2022",
    presets=PRESETS,
    costs=costs_of,
    figures=lambda _plan, record: describe_figures(record),
    claims=lambda _record: [],
    page=AUDIT_PAGE,
)
