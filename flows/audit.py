"""An audit: what networks of a recipe leak, and which defence is worth its price."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.audit_grid import PRESETS
from flows.settings import replace_setting
from flows.study_kind import UnitStudy
from storage.files import text_bytes, write_file
from tasks.audit.cost import costs_of
from tasks.audit.documents import junit, model_card
from tasks.audit.figures import describe_figures
from tasks.audit.given import GivenPlan
from tasks.audit.images import read_images, resolved
from tasks.audit.page import AUDIT_PAGE
from tasks.audit.plan import AuditPlan
from tasks.audit.record import describe_audit, pictures_of
from tasks.audit.settings import Audit, GivenWeights
from tasks.campaign.state import CONTROL_FILE
from tasks.cluster.batch_systems import read_yaml
from tasks.study.executor import Outcome
from tasks.study.products import npz_of

PRIVATE = ("epsilon", "delta", "clip")
OF_DP = "recipe.private."
JUNIT, CARD = "audit-junit.xml", "model-card.md"


class AuditStudy(UnitStudy[Audit, AuditPlan]):
    """Victims under defences, and attacks on them: `Audit`."""

    settings = Audit
    parts, unit = "defences", "cell"
    products = frozenset({"products", JUNIT, CARD, CONTROL_FILE})
    flow = "audit"

    def size(self, made: Audit) -> str:
        n = len(made.defences)
        return f"{n} defence{'s' * (n != 1)}, {made.n_victims} networks each"

    def replace(self, tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
        """`recipe` is a tree of its own, of which all or some settings are given."""
        for name, value in settings.items():
            if name in ("recipe", "weights"):
                _merge(tree.setdefault(name, {}), value)
                continue
            if name.startswith(OF_DP) and tree["recipe"]["private"] is None:
                tree["recipe"]["private"] = dict.fromkeys(PRIVATE) | {"delta": 1e-5, "clip": 1.0}
            replace_setting(tree, name, value)

    def plan(self, made: Audit, store: Path, device: str) -> AuditPlan:
        if made.weights is not None:
            return GivenPlan(made, store, device=device)
        images = read_images(made)
        return AuditPlan(resolved(made, images), images, store, device=device)

    def facts(self, plan: AuditPlan) -> list[tuple[str, Mapping[str, str]]]:
        both = (plan.images.pool, plan.images.others)
        return [(images.split, images.facts) for images in both]

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

    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row per cell: its accuracy, and what every attack gets at the headline's rate."""
        rate = f"{record['rate']:g}"
        rows = []
        for cell in record["cells"]:
            row = {"defence": cell["name"]}
            if cell["failed"] is not None:
                row["accuracy"] = "-"
            elif cell["accuracy"]["test"] is not None:
                row["accuracy"] = f"{cell['accuracy']['test']:.1%}"
            for attack in record["attacks"]:
                found = cell["attacks"].get(attack["name"], {"status": "refused"})
                row[attack["title"]] = "-"
                if found["status"] == "ran":
                    shares = found["good_at"] or found["found_at"]
                    row[attack["title"]] = f"{shares[rate]['mean']:.1%}"
            rows.append(row)
        return rows

    def command(self, made: Any) -> str:
        """The command that makes this audit from nothing."""
        words = ["palimpsest", *shlex.split(super().command(made))[2:]]
        if (weights := made.weights) is not None:
            words = _of_given(words, weights)
        return shlex.join(words)

    def differences(self, base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        """Defences that are others stand as a whole."""
        same = {"defences": None} if base["defences"] != tree["defences"] else {}
        found = super().differences(base | same, tree | same)
        return found | ({"defences": tree["defences"]} if same else {})


def _of_given(words: list[str], weights: GivenWeights) -> list[str]:
    """The words of a command with the options of a given network in place of its settings."""
    options: dict[str, Any] = {"weights": weights.file, "decoys": weights.decoys}
    options |= {n: getattr(weights, n) for n in ("initial", "arch", "activation", "leak", "mean")}
    options["shape"] = weights.shape and "x".join(map(str, weights.shape))
    options["std"] = weights.std and ",".join(map(str, weights.std))
    plain = GivenWeights(file="", decoys="")
    kept = words[: words.index("--preset")] + words[words.index("--preset") + 2 :]
    pairs = zip(kept, [*kept[1:], ""], strict=True)
    dropped = {k for k, (word, value) in enumerate(pairs)
               if word == "--set" and value.startswith("weights.")}  # fmt: skip
    kept = [word for k, word in enumerate(kept) if k not in dropped and k - 1 not in dropped]
    for name, value in options.items():
        if value is not None and value != getattr(plain, name if name != "weights" else "file"):
            kept += [f"--{name}", str(value)]
    return kept


def recipe_settings(path: Path) -> dict[str, Any]:
    """Settings of an audit in a YAML or JSON file: those of a recipe, and `defences` beside them.
    Raises ValueError naming the file and the fix."""
    found = read_yaml(str(path), "give a recipe, as docs/audit.md shows one")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path} has no settings; write `key: value` lines, as in docs/audit.md")
    own = {name: value for name, value in found.items() if name != "defences"}
    return {"recipe": own, **({"defences": found["defences"]} if "defences" in found else {})}


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
    question="How many of a network's training images come back from it, which defences prevent "
    "it, and what do they cost in accuracy?",
    paper="ours; DP-SGD of Abadi et al. 2016, membership of Yeom et al. 2018 and Carlini et al. "
    "2022",
    presets=PRESETS,
    costs=costs_of,
    figures=lambda _plan, record: describe_figures(record),
    claims=lambda _record: [],
    page=AUDIT_PAGE,
)
