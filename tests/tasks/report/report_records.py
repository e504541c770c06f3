"""Made-up evaluations (docs/evaluation.md, version 5), small, with every part filled or empty."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.summary import compare, detect, n_above_every, roc, summarise

SIDES = ("targets", "decoys")
KINDS = {
    "plain": "attack",
    "plain_all": "attack",
    "vote": "vote",
    "mean_image": "control",
    "nlm": "classical",
    "bf_dncnn": "trained",
    "edm_x1": "trained",
    "edm_x4": "trained",
    "deblur": "external",
    "plain_span": "further",
    "nlm_projected": "projected",
    "edm_x4_projected": "projected",
    "plain_projected": "projected",
    "oracle": "oracle",
}
METHODS = tuple(name for name in KINDS if KINDS[name] not in ("further", "projected", "oracle"))
LIFT = {
    "plain_span": 0.3,
    "bf_dncnn": 0.05,
    "edm_x1": 0.02,
    "edm_x4": 0.12,
    "vote": 0.08,
    "deblur": -0.03,
    "edm_x4_projected": 0.2,
    "oracle": 0.3,
}
SIZE = 16
EDGES = (-1.0, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)
Arrays = dict[str, npt.NDArray[np.uint8]]


def made_up(
    *,
    n_victims: int = 2,
    per_victim: int = 12,
    attacks: int = 3,
    methods: tuple[str, ...] = METHODS,
    grid_rows: int = 45,
    level: float = 0.45,
    margins: bool = True,
    outcome: str = "ok",
    excluded: int = 2,
    seed: int = 0,
) -> tuple[dict[str, Any], Arrays]:
    """(record, pictures) of targets whose scores scatter about `level`, decoys about 0.2.

    With an `outcome` other than "ok", every run has it, and no run left a picture.
    """
    rng = np.random.default_rng(seed)
    n = n_victims * per_victim
    pictured = outcome == "ok"
    base = {side: np.clip(rng.normal(mean, 0.15, n), 0.02, 0.97) * pictured
            for side, mean in (("targets", level), ("decoys", 0.2))}  # fmt: skip
    bodies = {name: _method(name, base, rng, attacks, pictured=pictured) for name in methods}
    for body in bodies.values():
        _summarised(body, bodies["plain"])
    victim = np.repeat(np.arange(n_victims), per_victim).tolist()
    order = np.argsort([-v for v in bodies["plain"]["targets"]["ssim"]], kind="stable")
    decoy_order = np.argsort([-v for v in bodies["plain"]["decoys"]["ssim"]], kind="stable")
    shown = [
        name
        for name in methods
        if KINDS[name] != "classical" and name not in ("plain_all", "mean_image")
    ]
    record: dict[str, Any] = {
        "schema": "palimpsest-evaluation",
        "version": 5,
        "fingerprint": f"{seed:064x}",
        "settings": {"good_threshold": 0.4, "rounds": 1, "baselines": ["nlm"],
                     "grid_rows": grid_rows, "appendix_rows": 500},
        "conventions": {"ssim": "made up", "match": "made up"},
        "source": {"name": "made up", "split": "heldout", "n_images": 4 * n, "size": [SIZE, SIZE],
                   "class_names": ["even", "odd"], "content_hash": "f" * 64, "notes": []},
        "dataset": {
            "content_hash": "a" * 64,
            "manifest": {"campaign": {"experiment": {"family": "kkt", "victim": {"widths": [9]}},
                                      "sampling": {"attacks_per_victim": attacks}}},
            "n_runs": n_victims * attacks, "n_victims": n_victims, "attacks_per_victim": attacks,
            "images_per_victim": [per_victim], "n_targets": n, "n_pairs": 8 * n,
            "outcomes": {"ok": 0, "unfitted": 0, "nonfinite": 0, "stopped": 0}
            | {outcome: n_victims * attacks},
            "n_runs_without_pictures": 0 if pictured else n_victims * attacks,
        },
        "targets": {"victim": victim, "image_id": list(range(n)),
                    "label": (np.arange(n) % 2).tolist(),
                    "margin": rng.gamma(2, 1, n).round(6).tolist() if margins else [None] * n},
        "decoys": {"victim": list(victim), "image_id": list(range(n, 2 * n)), "label": [0] * n},
        "methods": bodies,
        "runs": _runs(rng, n_victims, attacks, outcome),
        "ranking": _ranking(n_victims * attacks) if attacks > 1 and pictured else None,
        "hallucination": {m: _hallucination(bodies[m]) for m in methods if m.endswith("_x4")},
        "grid": {"methods": shown, "targets": order[:grid_rows].tolist(),
                 "decoys": decoy_order[:grid_rows].tolist()},
        "appendix": {"methods": shown, "targets": order[:500].tolist(), "appendix_order": "plain"},
        "examples": {"edges": list(EDGES), **{side: _examples(bodies, side) for side in SIDES}},
        "attacks": [],
        "side_by_side": None,
        "nothing": _nothing(shown, 3 if pictured else 0),
        "excluded": {"threshold": 0.95, "n": excluded, "rows": [
            {"image_id": i, "nearest": 7 * i, "correlation": 0.97} for i in range(excluded)]}
        if excluded else None,
        "restorers": {"bf_dncnn": "b" * 64},
        "seconds": {"plain": 1.5},
    }  # fmt: skip
    return record, _pictures(record, rng, pictured=pictured)


def write(folder: Path, record: dict[str, Any], pictures: Arrays) -> Path:
    """The two files of an evaluation in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(record, allow_nan=False))
    np.savez_compressed(folder / "pictures.npz", allow_pickle=False, **pictures)
    return folder


def with_a_further_attack(**how: Any) -> tuple[dict[str, Any], Arrays]:
    """The same of victims that a span attack was made on, too, in a time that is known."""
    record, pictures = made_up(methods=(*METHODS, "plain_span"), **how)
    n = record["dataset"]["images_per_victim"][0]
    shared = {"n_runs": 6, "content_hash": "c" * 64}
    record["attacks"] = [
        {"method": "plain", "kind": "kkt", "settings": {}, "n_candidates": 80, "seconds": None},
        {"method": "plain_span", "kind": "span", "settings": {"kind": "span", "start": "known"},
         "n_candidates": 48, "seconds": 17.0},
    ]  # fmt: skip
    record["attacks"] = [shared | attack for attack in record["attacks"]]
    chosen = {"victim": 0, "methods": ["plain_span", "plain", "edm_x4"]}
    record["side_by_side"] = chosen | {"targets": list(range(n))[::-1], "decoys": [3, 1]}
    for side in SIDES:
        rows = record["side_by_side"][side]
        for name in ("original", *record["side_by_side"]["methods"]):
            pictures[f"attacks_{side}/{name}"] = np.full((len(rows), 3, SIZE, SIZE), 90, np.uint8)
    return record, pictures


def with_a_span(**how: Any) -> tuple[dict[str, Any], Arrays]:
    """The same evaluated inside the span of the networks' first layers, which one has not."""
    inside = tuple(name for name in KINDS if KINDS[name] in ("projected", "oracle"))
    record, pictures = made_up(methods=(*METHODS, *inside), **how)
    closed = dict.fromkeys((*METHODS[1:], *inside[:-1]), 0.125)
    closed |= {"edm_x4": 0.25, "edm_x4_projected": 0.5, "plain_projected": 0.01}
    record["span"] = {"n_directions": [11, 0], "n_without": 1, "headroom_closed": closed}
    return record, pictures


def _examples(bodies: dict[str, Any], side: str) -> list[list[int]]:
    """The first rows of every bin, as many as a report shows."""
    scores = bodies["plain"][side]["ssim"]
    n = 8 if side == "targets" else 4
    return [
        [i for i, v in enumerate(scores) if low < v <= high and v != 0][:n]
        for low, high in pairwise(EDGES)
    ]


def _nothing(methods: list[str], n: int) -> dict[str, Any]:
    columns = ("victim", "run", "candidate", "iteration", "closest")
    return {"methods": methods, "n": n, "ssim": [0.05] * n} | {c: list(range(n)) for c in columns}


def _method(
    name: str,
    base: dict[str, npt.NDArray[np.float64]],
    rng: np.random.Generator,
    attacks: int,
    *,
    pictured: bool,
) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": KINDS[name]}
    halves: dict[str, Any] = {}
    for side in SIDES:
        n = len(base[side])
        ssim = _between(base[side] + LIFT.get(name, 0.0) + rng.normal(0, 0.02, n), pictured)
        body[side] = {
            "ssim": ssim,
            "haarpsi": _between(np.array(ssim) * 0.9 + rng.normal(0, 0.02, n), pictured),
            "ssim3": _between(np.array(ssim) + 0.01, pictured),
            "lead": _between(np.array(ssim) - 0.4, pictured),
            "rmse": [round(0.4 * (1 - s), 6) if pictured else None for s in ssim],
            "run": rng.integers(0, attacks, n).tolist() if pictured else [-1] * n,
            "candidate": list(range(n)) if pictured else [-1] * n,
            "iteration": [800 if pictured else -1] * n,
        }
        if name.endswith("_x4"):
            spread = [round(0.3 * (1 - s), 6) if pictured else None for s in ssim]
            body[side]["disagreement"] = spread
        halves[side] = {
            metric: [_between(np.array(body[side][metric]) - d, pictured) for d in (0.01, 0.03)]
            for metric in ("ssim", "haarpsi")
        }
    body["halves"] = halves if attacks > 1 and name != "plain_all" else None
    return body


def _between(values: npt.NDArray[np.float64], pictured: bool) -> list[float]:
    return (np.clip(values, 0, 1).round(6) * pictured).tolist()


def _summarised(body: dict[str, Any], plain: dict[str, Any]) -> None:
    scores = {side: np.array(body[side]["ssim"]) for side in SIDES}
    for side in SIDES:
        haarpsi, ssim3 = np.array(body[side]["haarpsi"]), np.array(body[side]["ssim3"])
        body[side]["summary"] = dict(
            summarise(
                scores[side], haarpsi, ssim3, good_threshold=0.4, lead=np.array(body[side]["lead"])
            )
        )
        before = np.array(plain[side]["ssim"])
        body[side]["compared_with_plain"] = dict(compare(before, scores[side]))
    both = scores["targets"], scores["decoys"]
    body["detection"] = dict(detect(*both)) | {"roc": dict(roc(*both))}
    body["n_targets_above_every_decoy"] = n_above_every(scores["targets"], scores["decoys"])


def _runs(
    rng: np.random.Generator, n_victims: int, attacks: int, outcome: str
) -> dict[str, list[Any]]:
    n = n_victims * attacks
    known = outcome == "ok"
    columns: dict[str, list[Any]] = {
        "run": list(range(n)), "victim": [k // attacks for k in range(n)], "outcome": [outcome] * n,
        "n_pictures": [40 if known else 0] * n, "n_iterations": [800] * n,
    }  # fmt: skip
    for name in ("kkt_residual", "residual_relu", "attack_loss", "consistency", "agreement",
                 "lr", "sigma", "lam_min", "alpha"):  # fmt: skip
        values = rng.uniform(0.01, 1, n).round(6).tolist()
        columns[name] = values if known else [None] * n
    columns["lam_lr"] = [None] * n
    columns["n_good"] = rng.integers(0, 9, n).tolist()
    columns["mean_ssim"] = rng.uniform(0.1, 0.4, n).round(6).tolist() if known else [0.0] * n
    return columns


def _ranking(n_runs: int) -> dict[str, Any]:
    return {
        "kkt_residual": {"n_runs": n_runs, "spearman": -0.61, "interval": [-0.8, -0.3],
                         "best_of_top_quarter": True, "n_victims": 2,
                         "n_best_in_top_quarter": 2},
        "agreement": {"n_runs": n_runs, "spearman": 0.2, "interval": None,
                      "best_of_top_quarter": False, "n_victims": 2, "n_best_in_top_quarter": 1},
    }  # fmt: skip


def _hallucination(body: dict[str, Any]) -> dict[str, Any]:
    known = [v for v in body["targets"]["disagreement"] if v is not None]
    edges = np.quantile(known, np.linspace(0, 1, 6)).round(6).tolist() if known else []
    bins = [
        {"disagreement": [low, high], "n": 4, "mean_rmse": 0.2, "mean_ssim": 0.5,
         "decoys": {"n": 0, "mean_rmse": None, "mean_ssim": None}}
        for low, high in pairwise(edges)
    ]  # fmt: skip
    return {"n": len(known), "spearman": 0.9 if known else None,
            "interval": [0.8, 0.95] if known else None, "bins": bins}  # fmt: skip


def _pictures(record: dict[str, Any], rng: np.random.Generator, *, pictured: bool) -> Arrays:
    def drawn(n: int, *, black: bool = False) -> npt.NDArray[np.uint8]:
        picture = np.linspace(0, 255, SIZE)[:, None] * np.ones((n, 3, 1, SIZE))
        noisy = picture + rng.normal(0, 40, (n, 3, SIZE, SIZE))
        return (np.clip(noisy, 0, 255) * (not black)).astype(np.uint8)

    names = record["grid"]["methods"]
    pictures = {}
    for group in ("targets", "decoys", "appendix"):
        rows = record["appendix"]["targets"] if group == "appendix" else record["grid"][group]
        pictures[f"{group}/original"] = drawn(len(rows))
        pictures |= {f"{group}/{m}": drawn(len(rows), black=not pictured) for m in names}
    extra = ["disagreement_edm"] if "edm_x4" in names else []
    for side in SIDES:
        n = sum(len(rows) for rows in record["examples"][side])
        pictures |= {f"examples_{side}/{name}": drawn(n) for name in ("original", "plain")}
    k = record["nothing"]["n"]
    return pictures | {f"nothing/{m}": drawn(k) for m in [*names, *extra, "closest"]}
