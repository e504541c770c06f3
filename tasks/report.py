"""The page that people see first: evaluation.json and pictures.npz as one self-contained HTML file.

Nothing is computed here: every number is taken from the record and only rounded for reading, every
picture from the .npz. No request leaves the page; it works from a file, on paper and in the dark.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from storage.files import write_file
from tasks.evaluation_record import SCHEMA, VERSION
from tasks.report_chart import ranked_curves

TEMPLATES = Path(__file__).parent / "templates"
SIDES = ("targets", "decoys")
NOTHING = "–"

EMPTY_CONTEXT: dict[str, Any] = {
    "stages": [],
    **{name: {} for name in ("recipe", "seeds", "versions", "pairs", "restorers")},
    "machine": "",
    "command": "",
    "created": "",
}

NOT_SHOWN = {"loss_curve", "ssim_curve", "schema", "version", "fingerprint"}  # of a restorer's card

KNOWN_METHODS = {
    "plain": ("Attack alone", "Attack", "what the attack gives, scaled to the range of an image"),
    "plain_all": ("Attack alone, every saved step", "Attack, all", "the best over all saved steps"),
}
RESTORER_TITLES = {
    "bf_dncnn": "BF-DnCNN",
    "edm": "EDM",
    "nlm": "Non-local means",
    "tv": "Total variation",
    "wavelet": "Wavelet shrinkage",
}
RESTORER_NOTES = {
    "bf_dncnn": "a convolutional denoiser, run once",
    "edm": "a conditional diffusion model",
    "nlm": "a classical denoiser that learned nothing: averages like surroundings",
    "tv": "a classical denoiser that learned nothing: flattens what varies",
    "wavelet": "a classical denoiser that learned nothing: shrinks wavelet coefficients",
}
ATTACKER_KNOWS = {
    "kkt": "The attack is given a network (its architecture and weights) and the average of its "
    "training pictures, nothing else. It searches for pictures that explain those weights as the "
    "end of training.",
}
ATTACKER_UNKNOWN = "The attack never sees the training pictures."


def write_report(out: Path, context: Mapping[str, Any], *, page: Path | None = None) -> Path:
    """Makes `report.html` (or `page`) from what `tasks.evaluate` left in `out`; returns its path.

    `context` is what only the caller knows, all of it optional: `stages` (a list of {name,
    seconds}), `recipe` (the job's settings), `seeds`, `versions`, `pairs` (facts about the pairs
    that restorers learned from) and `restorers` (their cards, by name), each a possibly nested
    mapping that is shown as a list; `machine`, `command` and `created` are texts.

    Raises ValueError if there is no finished evaluation in `out`, or one of another version, or if
    `context` has another key.
    """
    unknown = sorted(set(context) - set(EMPTY_CONTEXT))
    if unknown:
        raise ValueError(f"context has {unknown}; expected keys among {sorted(EMPTY_CONTEXT)}")
    path = out / "evaluation.json"
    if not path.is_file() or not (out / "pictures.npz").is_file():
        raise ValueError(f"{out} has no finished evaluation; run `palimpsest evaluate` first")
    record = json.loads(path.read_bytes())
    if (record.get("schema"), record.get("version")) != (SCHEMA, VERSION):
        raise ValueError(
            f"{path} is {record.get('schema')!r} version {record.get('version')!r}, expected "
            f"{SCHEMA!r} version {VERSION}; evaluate again with this release"
        )
    with np.load(out / "pictures.npz", allow_pickle=False) as file:
        pictures = {name: file[name] for name in file.files}
    page = page or out / "report.html"
    write_file(page, _render(record, pictures, EMPTY_CONTEXT | dict(context)).encode())
    return page


def _render(
    record: Mapping[str, Any],
    pictures: Mapping[str, npt.NDArray[np.uint8]],
    context: Mapping[str, Any],
) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "score": score, "duration": duration}
    methods = {name: method_title(name) for name in record["methods"]}
    in_grid = {name: methods[name] for name in record["grid"]["methods"]}
    classical = record["settings"]["baselines"]
    in_chart = {name: title for name, title in methods.items() if name not in classical}
    machine = {"machine": context["machine"]} if context["machine"] else {}
    facts = {
        "The images attacked": record["source"],
        "The pairs restorers learned from": context["pairs"],
        "Seeds": context["seeds"],
        "Settings of the evaluation": record["settings"],
        "Settings of the job": context["recipe"],
        "Restorers": context["restorers"],
        "Software and hardware": {**context["versions"], **machine},
    }
    return environment.get_template("report.html").render(
        record=record,
        context=context,
        methods=methods,
        grid_methods=in_grid,
        headline=headline(record),
        attacker=ATTACKER_KNOWS.get(_experiment(record).get("family", ""), ATTACKER_UNKNOWN),
        victims=victims(record),
        plates={side: list(_plates(record, pictures, side)) for side in SIDES},
        chart_methods=in_chart,
        chart=Markup(_chart(record, in_chart)),
        facts={title: list(_leaves(values)) for title, values in facts.items() if values},
        threshold=f"{record['settings']['good_threshold']:g}",
    )


def method_title(name: str) -> tuple[str, str, str]:
    """(long title, short title, what it is) of a method by its name in the record."""
    if name in KNOWN_METHODS:
        return KNOWN_METHODS[name]
    stem, _x, count = name.rpartition("_x")
    if not (stem and count.isdigit()):
        stem, count = name, ""
    title = RESTORER_TITLES.get(stem, stem)
    note = RESTORER_NOTES.get(stem, "a trained restorer")
    if not count:
        return title, title, note
    if count == "1":
        return f"{title}, one sample", title, f"{note}, sampled once: sharp, and it may invent"
    return (
        f"{title}, mean of {count}",
        f"{title} ×{count}",
        f"{note}, the average of {count} samples: what differs between samples blurs",
    )


def headline(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the first paragraph: the attack alone, and the trained restorer with most good
    images.

    `restored` is None without trained restorers. The choice is made by the targets' good count and
    then by the mean SSIM; its decoys are shown with it.
    """
    facts, methods = record["dataset"], record["methods"]
    classical = record["settings"]["baselines"]
    restored = [name for name in methods if not name.startswith("plain") and name not in classical]

    def merit(name: str) -> tuple[int, float]:
        summary = methods[name]["targets"]["summary"]
        return summary["n_good"], summary["mean_ssim"] or 0.0

    best = max(restored, key=merit) if restored else None
    per_run = facts["images_per_run"]
    return {
        "n_runs": facts["n_runs"],
        "per_run": str(per_run[0]) if len(per_run) == 1 else f"{per_run[0]} to {per_run[-1]}",
        "one_per_run": per_run == [1],
        "n_targets": facts["n_targets"],
        "diverged": facts["outcomes"].get("nonfinite", 0),
        "unfitted": facts["outcomes"].get("unfitted", 0),
        "plain": methods["plain"],
        "best_name": None if best is None else method_title(best)[0],
        "restored": None if best is None else methods[best],
    }


def victims(record: Mapping[str, Any]) -> str:
    """A sentence on the networks' size, ending in a space; empty if the manifest does not say."""
    widths = _experiment(record).get("victim", {}).get("widths")
    if not widths:
        return ""
    layers = " and ".join(str(width) for width in widths)
    hidden = "hidden layers" if len(widths) > 1 else "hidden layer"
    return f"The networks are fully connected classifiers with {hidden} of {layers} units. "


def _experiment(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the experiment, from the manifest of the store."""
    manifest = record["dataset"]["manifest"]
    return dict(manifest.get("campaign", manifest).get("experiment", {}))


def percent(fraction: float | None) -> str:
    """`1.3 %`; a dash if there is nothing to divide by."""
    return NOTHING if fraction is None else f"{100 * fraction:.1f} %"


def score(value: float | None) -> str:
    """`0.412`; a dash for None."""
    return NOTHING if value is None else f"{value:.3f}".replace("-", "−")


def duration(seconds: float) -> str:
    """`0.4 s`, `41 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _plates(
    record: Mapping[str, Any], pictures: Mapping[str, npt.NDArray[np.uint8]], side: str
) -> Iterator[dict[str, Any]]:
    """One row of the picture grid after the other: the original and what each method made of it."""
    threshold = record["settings"]["good_threshold"]
    kind = "Training picture" if side == "targets" else "Decoy"
    for position, row in enumerate(record["grid"][side]):
        image_id = record[side]["image_id"][row]
        tiles = []
        for method in record["grid"]["methods"]:
            value = record["methods"][method][side]["ssim"][row]
            picture = pictures[f"{side}/{method}"][position]
            title = method_title(method)[0]
            tiles.append(
                {
                    "uri": data_uri(picture) if value != 0 or picture.any() else None,
                    "alt": f"{title}, SSIM {value:.2f}",
                    "score": f"{value:.2f}".replace("-", "−"),
                    "good": value > threshold,
                }
            )
        yield {
            "rank": position + 1,
            "uri": data_uri(pictures[f"{side}/original"][position]),
            "alt": f"{kind} {image_id}",
            "tiles": tiles,
        }


def data_uri(picture: npt.NDArray[np.uint8]) -> str:
    """A (3, h, w) picture as a PNG inside a URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _chart(record: Mapping[str, Any], methods: Mapping[str, tuple[str, str, str]]) -> str:
    curves = {
        title[0]: tuple(record["methods"][name][side]["ssim"] for side in SIDES)
        for name, title in methods.items()
    }
    summary = "; ".join(
        f"{title[0]}: {record['methods'][name]['targets']['summary']['n_good']} targets and "
        f"{record['methods'][name]['decoys']['summary']['n_good']} decoys are good"
        for name, title in methods.items()
    )
    return ranked_curves(
        curves,
        threshold=record["settings"]["good_threshold"],
        description=f"SSIM of the i-th best image per method. {summary}.",
    )


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of every value of nested mappings and lists; names are dotted, as `--set` has
    them, and list items count from 0."""
    for key, value in values.items():
        name = f"{above}.{key}" if above else key
        if key in NOT_SHOWN:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        elif isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
            yield from _leaves({str(k): v for k, v in enumerate(value)}, name)
        elif isinstance(value, list | tuple):
            yield name, ", ".join(str(item) for item in value) or "none"
        else:
            yield name, f"{value:.6g}" if isinstance(value, float) else str(value)
