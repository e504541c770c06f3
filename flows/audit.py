"""An audit: what networks of a recipe leak, and which defence is worth its price."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flows.papers import FAST_SEARCH
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
from tasks.audit.settings import MEMBERSHIP, Audit, Defence, GivenWeights
from tasks.audit.verdict import junit, model_card
from tasks.campaign.state import CONTROL_FILE
from tasks.cluster.batch_systems import read_yaml
from tasks.study.executor import Outcome
from tasks.study.products import npz_of

SLOW = ("4 times the images", "augmentation")
"""Defences that are left out of the wide size."""
QUICK = ("Adam", "small start (risky)", "weight decay 0.01", "DP-SGD, epsilon 8",
         "weights in int8", "noise of 50 % on the weights")  # fmt: skip
"""Defences of the quick size."""


def defence(group: str, name: str, about: str, **changes: Any) -> Defence:
    """A defence of the grid, whose name is that of its group if it has none of its own."""
    return Defence(name=name or group, group=group, about=about, **changes)


def variant(name: str, about: str, setting: str, value: Any) -> Defence:
    """Another way to train, which is no defence."""
    return defence(name, "", about, kind="variant", set={setting: value})


def defences() -> tuple[Defence, ...]:
    """Every defence of the grid, and other ways to train. DP-SGD takes few steps of the whole
    batch: more steps need more noise."""
    private = {"training.epochs": 60, "training.batch_size": None,
               "training.optimiser": {"rule": "gd", "lr": 0.1}}  # fmt: skip
    early, noise, precision = "early stopping", "noise on the weights", "precision"
    return (
        variant("Adam", "Trained by Adam at rate .001 in place of SGD.",
                "training.optimiser", {"rule": "adam", "lr": 1e-3}),
        variant("momentum", "Trained by SGD with momentum .9, at rate .01.",
                "training.optimiser", {"rule": "gd", "lr": 0.01, "momentum": 0.9}),
        variant("small start (risky)", "The first layer starts at 1e-4, as in papers on "
                "reconstruction; torch starts it larger.", "victim.init_std_first", 1e-4),
        *(defence(early, f"{name} of the epochs", "Training stops early.",
                  scale={"training.epochs": share})
          for name, share in (("a tenth", 0.1), ("a hundredth", 0.01))),
        *(defence("weight decay", f"weight decay {decay:g}", "Weights shrink in every step.",
                  set={"training.weight_decay": decay}) for decay in (0.001, 0.01)),
        *(defence("more images", f"{n} times the images",
                  f"Each network learns {n} times as many images.", scale={"n_images": n})
          for n in (2, 4)),
        defence("augmentation", "", "Every image is learned in 8 views, mirrored and moved by up "
                "to 4 pixels.", set={"views": 8}),
        defence("dropout", "", "Half of the hidden neurons are left out at every step.",
                set={"dropout": 0.5}),
        *(defence("DP-SGD", f"DP-SGD, epsilon {epsilon:g}", "Gradients of single images are "
                  "clipped and get noise, in few steps of all images.",
                  set={"private": {"epsilon": epsilon}, **private})
          for epsilon in (1.0, 8.0, 50.0)),
        *(defence(noise, f"noise of {100 * level:g} % on the weights", "Normal noise is added to "
                  "the weights before they are given away.", set={"released.noise": level})
          for level in (0.1, 0.5)),
        defence(precision, "weights in float16", "Weights are given away in half precision.",
                set={"released.precision": "float16"}),
        defence(precision, "weights in int8", "Weights are given away in 255 steps a neuron.",
                set={"released.precision": "int8"}),
        defence("publish weights alone", "", "The optimiser's state stays at home, in place of a "
                "whole checkpoint of training.", set={"checkpoint": False}),
        defence("distillation", "", "A student learns the network's answers on public images, and "
                "is given away in its place.", set={"distilled": True}),
    )  # fmt: skip


def _of_groups(*groups: str) -> tuple[Defence, ...]:
    return tuple(defence for defence in defences() if defence.group in groups)


def split_defences() -> tuple[Defence, ...]:
    """Defences of a network that is cut after its first hidden layer. MixCon, at first as in table
    3 of its paper, trains at a tenth of the rate: its gradient goes with one over the features,
    which are small at first."""
    slower = {"training.optimiser.lr": 0.1}
    return (
        *(defence("MixCon", f"MixCon, lambda {lam:g}, beta {beta:g}", "Features of images of "
                  "different classes are drawn together in training, at a tenth of the rate.",
                  set={"mixcon": {"lam": lam, "beta": beta}}, scale=slower)
          for lam, beta in ((1.0, 1e-4), (10.0, 1e-4), (1.0, 1e-2))),
        defence("MixCon", "a tenth of the rate", "The rate that MixCon is trained at, without it.",
                scale=slower),
        defence("deeper cut", "cut after the second layer", "Clients compute one layer more, and "
                "send what comes out of that.", set={"cut": 2}),
        *(replace(
            own,
            name=own.name.replace("weights", "features"),
            group=own.group.replace("weights", "features"),
            about=own.about.replace("the weights before they are given away", "features")
            .replace("Weights are given away", "Features are sent")
            .replace("a neuron", "an image"),
        ) for own in _of_groups("noise on the weights", "precision")),
        *_of_groups("weight decay", "more images", "augmentation", "small start (risky)", "Adam",
                    "dropout"),
    )  # fmt: skip


def autoencoder_defences() -> tuple[Defence, ...]:
    """Defences of an autoencoder, which has no labels."""
    return (
        *(defence("early stopping", f"stopped at a loss of {level:g}", "Training stops early.",
                  set={"autoencoder.training.levels": [level]}) for level in (0.01, 0.001)),
        *_of_groups("more images", "augmentation", "noise on the weights", "precision"),
    )  # fmt: skip


def cpu() -> Audit:
    """Width 200, up to 100 images, 12 networks a cell."""
    return Audit(preset="cpu", defences=defences(), kkt=replace(FAST_SEARCH, save_at=(800,)))


def wide() -> Audit:
    """Width 1,000, the width of the papers; what takes most time is left out."""
    start = cpu()
    victim = replace(start.recipe.victim, widths=(1000, 1000))
    return replace(
        start,
        preset="wide",
        recipe=replace(start.recipe, victim=victim),
        defences=tuple(defence for defence in start.defences if defence.name not in SLOW),
        left_out=(f"{', '.join(SLOW)}, which take hours at this width",),
        attacks=tuple(name for name in start.attacks if name != "kkt"),
    )


def quick() -> Audit:
    """Three minutes on two cores: 24 images, 6 networks a cell, a few defences, no KKT attack."""
    start = cpu()
    some = tuple(defence for defence in start.defences if defence.name in QUICK)
    others = [defence.name for defence in start.defences if defence.name not in QUICK]
    return replace(
        start,
        preset="quick",
        most_images=24,
        defences=some,
        n_victims=6,
        n_tests=400,
        attacks=tuple(name for name in start.attacks if name != "kkt"),
        left_out=(
            f"{', '.join(others)}",
            "networks of more than 24 images, and half of the networks",
        ),
    )


def split() -> Audit:
    """The networks of `cpu`, of whose images clients send what the first hidden layer makes. MixCon
    is of all images of a step, so that steps are of all."""
    start = cpu()
    training = replace(start.recipe.training, epochs=3000, batch_size=None)
    return replace(
        start,
        preset="split",
        recipe=replace(start.recipe, cut=1, training=training),
        defences=split_defences(),
        attacks=("features", *MEMBERSHIP),
    )


def autoencoder() -> Audit:
    """Autoencoders of 4 layers, up to 24 images, 12 networks a cell."""
    start = cpu()
    return replace(
        start,
        preset="autoencoder",
        recipe=replace(start.recipe, autoencoder=AutoencoderRecipe()),
        defences=autoencoder_defences(),
        most_images=24,
        attacks=("autoencoder", *MEMBERSHIP),
    )


def given() -> Audit:
    """One network that is there: it is attacked as it is, and as it might be given away."""
    start = cpu()
    some = tuple(
        d for d in start.defences
        if all(n.startswith("released.") or n == "checkpoint" for n in d.names)
    )  # fmt: skip
    return replace(
        start,
        preset="given",
        weights=GivenWeights(file="", decoys=""),
        defences=some,
        n_victims=1,
        left_out=("defences that need training: audit a recipe for those",),
    )


PRESETS: dict[str, Callable[[], Audit]] = {
    "quick": quick,
    "cpu": cpu,
    "wide": wide,
    "split": split,
    "autoencoder": autoencoder,
    "given": given,
}


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

    def size(self, study: Audit) -> str:
        kinds = [cell.kind for cell in study.cells]
        n, others = kinds.count("defence"), kinds.count("variant")
        ways = f", {others} other way{'s' * (others != 1)} to train" if others else ""
        networks = "one network" if study.n_victims == 1 else f"{study.n_victims} networks each"
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

    def plan(self, study: Audit, store: Path, device: str) -> AuditPlan:
        if study.weights is not None:
            return GivenPlan(study, store, device=device)
        images = read_images(study)
        return AuditPlan(resolved(study, images), images, store, device=device)

    def facts(self, plan: AuditPlan) -> list[tuple[str, Mapping[str, str]]]:
        both = (plan.images.pool, plan.images.others)
        return [(name, i.facts) for name, i in zip(plan.sides, both, strict=True)]

    def notes(self, plan: AuditPlan) -> list[str]:
        cells = plan.study.cells
        refused = [f"Left out: {cells[k].name}: {why}" for k, why in plan.refused.items()]
        return [f"{plan.study.recipe.n_images} images in each network", *refused]

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
        """One row per cell: its accuracy, and every attack's share at the headline's false positive
        rate; None where a number is unknown."""
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

    def command(self, study: Any) -> str:
        """The command that makes this audit from nothing."""
        base = self.to_json(self.named(study.preset, only=study.only))
        found = self.differences(base, self.to_json(study))
        words = ["palimpsest", "audit", "--data", found.pop("data")]
        if study.weights is None:
            words += ["--preset", study.preset]
        else:
            plain = GivenWeights(file="", decoys="")
            for name, value in vars(study.weights).items():
                if value == getattr(plain, name):
                    continue
                option = "--weights" if name == "file" else f"--{name.replace('_', '-')}"
                texts = [str(one) for one in (value if isinstance(value, tuple) else [value])]
                if name in ("shape", "std"):
                    texts = [("x" if name == "shape" else ",").join(texts)]
                words += [word for text in texts for word in (option, text)]
            of_file = ("weights", "recipe")  # its recipe is read from it
            found = {n: v for n, v in found.items() if not n.startswith(of_file)}
        for option, values in (
            ("only", study.only and [study.only]),
            ("fail-above", study.fail_above),
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
    known: dict[str, Any] = {"file": weights}
    known |= {name: value for name, value in facts.items() if value is not None}
    if isinstance(known.get("gradients"), str | Path):
        known["gradients"] = [known["gradients"]]
    for name in {"file", "initial"} & known.keys():
        known[name] = str(Path(known[name]).absolute())
    if "gradients" in known:
        known["gradients"] = [str(Path(path).absolute()) for path in known["gradients"]]
    return {"weights": {"decoys": decoys, **known}}


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
