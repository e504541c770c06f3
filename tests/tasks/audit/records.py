"""Made-up records of audits (docs/pages.md): ten defences of twelve networks, or one given file."""

from __future__ import annotations

from typing import Any

import numpy as np

from tasks.audit.page import AUDIT_PAGE, describe_figures
from tasks.audit.verdict import effect_of
from tests.tasks.page.study_pages import Arrays, Made, StudyPages, header

SIZE = 32
RATES = (0.0, 0.001, 0.01, 0.05)
CLASSES = ("cat", "truck")
PAGES = StudyPages(AUDIT_PAGE)
ATTACKS = (
    ("span", "span, start unknown", "reconstruction", "the weights"),
    ("span_known", "span, start known", "reconstruction",
     "the weights, and those that training started from"),
    ("kkt", "KKT", "reconstruction", "the weights"),
    ("loss", "membership, loss", "membership",
     "the images to be asked about, and answers for them"),
    ("likelihood_ratio", "membership, likelihood ratio", "membership",
     "the images to be asked about, answers for them, and networks of the same kind"),
)  # fmt: skip
REFUSED = "the first layer is a convolution, whose weights do not span the images"
DIVERGED = "training diverged: the loss of victim 3 is not a number"
DEFENCES: tuple[tuple[str, str, str, float, float, float | None, tuple[str, ...]], ...] = (
    ("as it is", "as it is", "The recipe, without a defence.", 0.66, 0.812, None, ()),
    ("stopped early", "training", "A tenth of the epochs.", 0.41, 0.815, None, ()),
    ("more images", "data", "Four times as many training images.", 0.22, 0.868, None, ()),
    ("weight decay 0.01", "training", "Weights shrink at every step.", 0.61, 0.806, None, ()),
    ("dropout 0.5", "training", "Half of the neurons are left out at every step.", 0.48, 0.824,
     None, ("kkt",)),
    ("a convolution first", "network", "A convolution in front of the dense layers.", 0.03, 0.835,
     None, ("span", "span_known")),
    ("DP-SGD, ε = 8", "privacy", "Clipped gradients with noise.", 0.012, 0.701, 8.0, ()),
    ("DP-SGD, ε = 2", "privacy", "Clipped gradients with more noise.", 0.0, 0.633, 2.0, ()),
    ("DP-SGD, ε = 50", "privacy", "Clipped gradients with little noise.", 0.09, 0.772, 50.0, ()),
    ("weights in 8 bits", "release", "Weights are rounded before they are given away.", 0.63,
     0.811, None, ()),
    ("large steps", "training", "A hundred times the learning rate.", 0.0, 0.0, None, ()),
)  # fmt: skip
"""Name, group, what it does, leak, test accuracy, epsilon, refused attacks; the last one failed."""
RELEASES = (
    ("as it is", "as it is", "The weights as they were given.", 0.62),
    ("in 16 bits", "release", "Weights rounded to 16 bits.", 0.62),
    ("in 4 bits", "release", "Weights rounded to 4 bits.", 0.18),
)


def audit(*, n_exposed: int = 24, n_decoys: int = 8, limits: bool = True, seed: int = 0) -> Made:
    """(record, pictures) of an audit of a recipe: twelve networks under each of ten defences and
    as they are, one of which failed."""
    rng = np.random.default_rng(seed)
    n = 12
    cells = _with_effects([_cell(rng, k, defence, n) for k, defence in enumerate(DEFENCES)])
    record = {
        **_head("What networks of this recipe leak of their training images"),
        "subject": "recipe", "n_images": 100, "n_victims": n, "n_tests": 1000, "no_price": None,
        "attacks": _attacks(ATTACKS), "cells": cells, **_exposed(rng, n_exposed, n_decoys, n),
        "checks": _checks() if limits else [],
        "left_out": ["KKT with four attacks for each network; one was made (--quick)."],
        "does_not_cover": [
            "Stronger attacks than these: what does not come back here is not safe, it is not "
            "found.",
            "Networks of other sizes, other images, and longer or shorter training than this.",
        ],
        "verdict": {
            "level": "leaks",
            "sentence": "Of 100 training images 66 % come back (60 to 72 %, at a false positive "
            "rate of at most 1 %) from the weights alone, by the attack span, over 12 networks. "
            "The cheapest defence that halves this is more images: 22 % come back, and it costs "
            "nothing, accuracy rises by 5.6 %.",
            "base_leak": 0.66, "defence": "more images",
        },
    }  # fmt: skip
    return _finished(record, rng)


def weights(*, seed: int = 1) -> Made:
    """(record, pictures) of an audit of one given file, of which no accuracy is known."""
    rng = np.random.default_rng(seed)
    cells = []
    for k, (name, group, about, leak) in enumerate(RELEASES):
        cell = _cell(rng, k, (name, group, about, leak, 0.0, None, ("kkt",)), 1, ATTACKS[:3])
        cells.append(cell | {"accuracy": None, "on_front": False})
    _ = _with_effects(cells)
    record = {
        **_head("What the weights model.safetensors leak of their training images"),
        "subject": "weights", "n_images": 100, "n_victims": 1, "n_tests": 0,
        "no_price": "not measured: 0 held-out images, 100 needed",
        "attacks": _attacks(ATTACKS[:3]), "cells": cells, **_exposed(rng, 10, 4, 1), "checks": [],
        "left_out": [], "does_not_cover": ["Other networks than this one."],
        "verdict": {"level": "leaks", "sentence": "Of 100 training images 62 % come back.",
                    "base_leak": 0.62, "defence": "in 4 bits"},
    }  # fmt: skip
    return _finished(record, rng)


def nothing() -> Made:
    """(record, pictures) of an audit whose attacks were all refused."""
    record, _pictures = audit(limits=False)
    why = {"status": "refused", "why": REFUSED}
    for cell in record["cells"]:
        cell |= {"attacks": {name: why for name, *_ in ATTACKS}, "leak": None, "on_front": False}
    record |= {"exposed": [], "classes_exposed": [], "decoys_shown": [], "left_out": []}
    record["verdict"] = {"level": "nothing found", "sentence": "No attack could be made.",
                         "base_leak": None, "defence": None}  # fmt: skip
    return record | {"figures": describe_figures(record)}, {}


def _with_effects(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for cell in cells[1:]:
        if cell["leak"]:
            cell["effect"] = effect_of(cell["leak"], cells[0]["leak"])
    return cells


def _head(title: str) -> dict[str, Any]:
    return {
        **header("audit", "audit", ""), "version": 1, "preset": "cpu", "title": title,
        "question": "How many training images do attacks get back, and which defence is worth its "
        "price?",
        "command": "palimpsest audit --data folder:images --fail-above 'good>0.05@fpr=0.01'",
        "settings": {"recipe": {"victim": {"widths": [200, 200]}}, "n_victims": 12},
        "price": "accuracy", "good_threshold": 0.4, "rates": list(RATES), "rate": 0.01,
        "classes": list(CLASSES),
        "claims": [], "seconds": {"train": 812.0, "attack": 3104.0, "score": 41.0},
        "source": {"name": "made up", "n_images": 4000}, "versions": {"palimpsest": "1.0"},
    }  # fmt: skip


def _finished(record: dict[str, Any], rng: np.random.Generator) -> Made:
    pictures: Arrays = {
        f"{side}/{kind}": rng.integers(0, 256, (len(record[rows]), 3, SIZE, SIZE), np.uint8)
        for side, rows in (("exposed", "exposed"), ("decoys", "decoys_shown"))
        for kind in ("original", "reconstruction")
    }
    if len(record["exposed"]):
        pictures["exposed/reconstruction"][-1] = 0
    return record | {"figures": describe_figures(record)}, pictures


def _attacks(attacks: Any) -> list[dict[str, Any]]:
    start = {"span": "unknown", "span_known": "known", "kkt": "unknown"}
    return [
        dict(zip(("name", "title", "kind", "knows"), a, strict=True)) | {"start": start.get(a[0])}
        for a in attacks
    ]


def _cell(
    rng: np.random.Generator, number: int, defence: Any, n_victims: int, attacks: Any = ATTACKS
) -> dict[str, Any]:
    name, group, about, leak, accuracy, epsilon, refused = defence
    cell: dict[str, Any] = {
        "number": number, "name": name, "group": group, "about": about, "base": number == 0,
        "kind": "defence" if number else "base", "effect": None,
        "epsilon": epsilon, "delta": epsilon and 1e-5, "n_images": 100, "failed": None,
        "accuracy": None, "attacks": {}, "leak": None, "on_front": False, "shown": [],
    }  # fmt: skip
    if name == "large steps":
        return cell | {"failed": DIVERGED}
    factors = {"span": 0.9, "span_known": 1.0, "kkt": 0.35}
    for attack, _title, kind, _knows in attacks:
        if attack in refused:
            cell["attacks"][attack] = {"status": "refused", "why": REFUSED}
        elif kind == "reconstruction":
            level = leak if refused and attack == "kkt" else leak * factors[attack]
            cell["attacks"][attack] = _attacked(rng, level, n_victims, pictures=True)
        else:
            level = 0.02 + leak * (1.0 if attack == "loss" else 1.3)
            cell["attacks"][attack] = _attacked(rng, level, n_victims, pictures=False)
    there = {a: f["good_at"]["0.01"] for a, f in cell["attacks"].items() if f.get("good_at")}
    best = max(there, key=lambda name: there[name]["mean"])
    cell["leak"] = {"attack": best, **there[best]}
    if accuracy:
        change = None if cell["base"] else round(accuracy - DEFENCES[0][4], 6)
        cell["accuracy"] = {
            "train": 1.0, "test": accuracy,
            "test_interval": [round(accuracy - 0.011, 6), round(accuracy + 0.011, 6)],
            "each": [round(accuracy + 0.01 * (-1) ** k, 6) for k in range(n_victims)],
            "change": change,
            "change_interval": change and [round(change - 0.008, 6), round(change + 0.008, 6)],
        }  # fmt: skip
    beaten = {"weight decay 0.01", "as it is", "weights in 8 bits", "stopped early", "dropout 0.5"}
    return cell | {"on_front": name not in beaten and "50" not in name}


def _attacked(
    rng: np.random.Generator, level: float, n_victims: int, *, pictures: bool
) -> dict[str, Any]:
    factors = dict(zip(("0", "0.001", "0.01", "0.05"), (0.6, 0.75, 1.0, 1.1), strict=True))
    good = {rate: _share(rng, min(1.0, level * f), n_victims) for rate, f in factors.items()}
    found = {
        rate: _share(rng, min(1.0, max(level * f, float(rate))), n_victims)
        for rate, f in factors.items()
    }
    n = 100 * n_victims
    return {
        "status": "ran", "why": None, "seconds": 8.125, "found_at": found,
        "good_at": good if pictures else None, "n": n, "n_decoys": n,
        "n_good": round(level * n) if pictures else None,
        "n_good_decoys": 3 if pictures else None,
        "n_good_control": 2 if pictures else None,
        "control_at": dict.fromkeys(factors, _share(rng, 0.01, n_victims)) if pictures else None,
        "identified": _share(rng, 0.9 * level, n_victims) if pictures else None,
        "identified_decoys": _share(rng, 0.0, n_victims) if pictures else None,
        "mean_ssim_control": 0.171 if pictures else None,
        "mean_ssim": round(0.2 + 0.6 * level, 6) if pictures else None,
        "mean_ssim_decoys": 0.183 if pictures else None,
        "auc": round(min(1.0, 0.5 + 0.6 * level), 6), "p_value": 0.001 if level > 0.01 else 0.31,
    }  # fmt: skip


def _share(rng: np.random.Generator, mean: float, n_victims: int) -> dict[str, Any]:
    wide = 0.06 * np.sqrt(mean * (1 - mean)) / 0.5 + 0.005
    each = np.clip(rng.normal(mean, wide, n_victims), 0, 1).round(6).tolist()
    ends = [round(max(0.0, mean - wide), 6), round(min(1.0, mean + wide), 6)]
    return {"mean": round(mean, 6), "interval": ends, "each": each}


def _exposed(rng: np.random.Generator, n: int, n_decoys: int, n_victims: int) -> dict[str, Any]:
    n_in = max(1, n_victims // 2)
    exposed = [
        {
            "image_id": 17 + 31 * k, "label": k % 2, "class": CLASSES[k % 2], "n_in": n_in,
            "n_back": n_in if k < n - 1 else 0,
            "mean_ssim": round(0.93 - 0.6 * (k / n) ** 2, 6) if k < n - 1 else 0.12,
            "margin": round(1.0 + 0.1 * k, 6), "n_copies": int(k == 2),
            "why": "; ".join(["it lies near the boundary"] * (k % 3 == 0)
                             + ["its class leaks most"] * (k % 2 == 0)),
        }
        for k in range(n)
    ]  # fmt: skip
    return {
        "exposed": exposed,
        "classes_exposed": [
            {"class": "cat", "n": 50 * n_victims, "share": 0.71, "interval": [0.64, 0.77]},
            {"class": "truck", "n": 50 * n_victims, "share": 0.61, "interval": [0.53, 0.67]},
        ],
        "decoys_shown": [
            {"image_id": 2001 + 7 * k, "victim": 0, "ssim": round(0.41 - 0.02 * k, 6)}
            for k in range(n_decoys)
        ],
    }


def _checks() -> list[dict[str, Any]]:
    keys = ("condition", "cell", "attack", "value", "limit", "outcome")
    found = (
        ("good>0.05@fpr=0.01", "as it is", "span_known", 0.66, 0.05, "fails"),
        ("good>0.8@fpr=0.01", "as it is", "span_known", 0.66, 0.8, "passes"),
        ("found>0.9@fpr=0.01", "as it is", "likelihood_ratio", 0.878, 0.9, "undecided"),
    )
    return [dict(zip(keys, check, strict=True)) for check in found]
