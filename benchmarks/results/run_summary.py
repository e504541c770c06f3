"""A finished job as one small JSON file for `docs/results/`: its scores, its command, its seconds.

    python -m benchmarks.results.run_summary WORKSPACE --name NAME --command "..." --json FILE

WORKSPACE is the folder of a job; its evaluation.json has the scores of every image, of which only
the summaries are kept, targets and decoys side by side, with the learning curves of its restorers.
`--curves FILE` draws these, and every method's hits against its false positives.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from benchmarks.evaluation.evaluated import read_evaluation
from benchmarks.record import Hardware, checked_json, hardware, versions
from recon_core.strict import Strict
from recon_core.summary import bootstrap_interval
from tasks.evaluation.settings import PROJECTED
from tasks.report.headline import method_title

Interval = tuple[float, float]
Curve = list[tuple[int, float]]
"""(step, mean SSIM of the validation pairs)."""

UNRESTORED = "#57524b"
COLOURS = ("#0b6e99", "#c77800", "#a03c17", "#6b4a9a", "#3d7a3a", "#b0568c", "#12a5a0", "#8a8a8a")


@dataclass(frozen=True, kw_only=True)
class Gain(Strict):
    """Mean difference to the attack alone on the same images; intervals of 95 %.

    `of_victims` resamples whole victims (None: there is one only). `of_good` is of the images that
    the attack alone brought back (None: there is none); they are chosen by their score before, so
    that chance in it counts against the restorer. `ssim_at_all` is the difference to the best over
    all saved iterations of the attack, which restorers do not see; None where that was not scored.
    `ssim_over`: the difference to each classical denoiser instead of the attack, with its interval.
    """

    ssim: float
    ssim_interval: Interval
    ssim_interval_of_victims: Interval | None
    ssim_of_good: float | None = None
    ssim_of_good_interval: Interval | None = None
    ssim_at_all: float | None
    ssim_at_all_interval: Interval | None
    haarpsi: float
    haarpsi_interval: Interval
    n_better: int
    n_worse: int
    ssim_over: dict[str, tuple[float, Interval]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Learned(Strict):
    """A restorer of the job: its size, what it saw, and its score on held-out training pairs."""

    n_parameters: int
    n_pairs: int
    n_examples: int
    seconds: float
    validation_before: float | None
    validation: Curve


@dataclass(frozen=True, kw_only=True)
class Disagreement(Strict):
    """Disagreement of the samples behind a mean, on average, with intervals over images.

    `good`: the targets whose mean is good; `others`: the other targets; `decoys`.
    """

    good: float | None
    good_interval: Interval | None
    others: float | None
    others_interval: Interval | None
    decoys: float | None
    decoys_interval: Interval | None


def gain(evaluation: Mapping[str, Any], method: str) -> Gain:
    """Gain of `method` on the targets over `plain`."""
    after = evaluation["methods"][method]["targets"]
    before = evaluation["methods"]["plain"]["targets"]
    victims = np.array(evaluation["targets"]["victim"])
    ssim, haarpsi = (np.subtract(after[name], before[name]) for name in ("ssim", "haarpsi"))
    at_all = evaluation["methods"].get("plain_all")
    over_all = None if at_all is None else np.subtract(after["ssim"], at_all["targets"]["ssim"])
    of_good = ssim[np.array(before["ssim"]) > evaluation["settings"]["good_threshold"]]
    over = {
        name: np.subtract(after["ssim"], evaluation["methods"][name]["targets"]["ssim"])
        for name in evaluation["settings"]["baselines"]
        if name != method
    }
    return Gain(
        ssim=float(ssim.mean()),
        ssim_interval=bootstrap_interval(ssim),
        ssim_interval_of_victims=bootstrap_interval(ssim, groups=victims)
        if len(set(victims.tolist())) > 1
        else None,
        ssim_of_good=float(of_good.mean()) if len(of_good) else None,
        ssim_of_good_interval=bootstrap_interval(of_good) if len(of_good) else None,
        ssim_at_all=None if over_all is None else float(over_all.mean()),
        ssim_at_all_interval=None if over_all is None else bootstrap_interval(over_all),
        haarpsi=float(haarpsi.mean()),
        haarpsi_interval=bootstrap_interval(haarpsi),
        n_better=after["compared_with_plain"]["n_better"],
        n_worse=after["compared_with_plain"]["n_worse"],
        ssim_over={name: (float(d.mean()), bootstrap_interval(d)) for name, d in over.items()},
    )


def disagreement(evaluation: Mapping[str, Any], method: str) -> Disagreement | None:
    """Disagreement of the samples of `method`; None if it is no mean of samples."""
    body = evaluation["methods"][method]
    if "disagreement" not in body["targets"]:
        return None
    spread = np.array(body["targets"]["disagreement"], np.float64)
    good = np.array(body["targets"]["ssim"]) > evaluation["settings"]["good_threshold"]
    facts: dict[str, Any] = {}
    for name, values in (
        ("good", spread[good]),
        ("others", spread[~good]),
        ("decoys", np.array(body["decoys"]["disagreement"], np.float64)),
    ):
        there = values[~np.isnan(values)]
        facts[name] = float(there.mean()) if len(there) else None
        facts[f"{name}_interval"] = bootstrap_interval(there) if len(there) else None
    return Disagreement(**facts)


def learned(workspace: Path) -> dict[str, Learned]:
    """The trained restorers of a job's folder, from their cards."""
    found = {}
    for path in sorted(workspace.glob("restorers/*/model.json")):
        card = json.loads(path.read_text())["meta"]
        validation = card["validation"] or {"ssim_inputs": None, "ssim_curve": []}
        found[path.parent.name] = Learned(
            n_parameters=card["n_parameters"],
            n_pairs=card["dataset"]["n_pairs_used"],
            n_examples=card["n_images"],
            seconds=card["seconds"],
            validation_before=validation["ssim_inputs"],
            validation=[(step, ssim) for step, ssim in validation["ssim_curve"]],
        )
    return found


def operating_points(
    scores: Sequence[float], decoy_scores: Sequence[float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(false positive rate, share of targets found) at every threshold, from none to all."""
    targets, decoys = np.sort(scores), np.sort(decoy_scores)
    thresholds = np.unique(np.concatenate([targets, decoys, [-np.inf, np.inf]]))[::-1]
    above = [
        1 - np.searchsorted(values, thresholds, side="right") / len(values)
        for values in (decoys, targets)
    ]
    return above[0], above[1]


def draw(
    evaluation: Mapping[str, Any], restorers: Mapping[str, Learned], *, titles: Mapping[str, str]
) -> bytes:
    """PNG: learning curves (of restorers that were validated), hits against false positives, scores
    after against before.

    A restorer has one colour in all of them. `titles` of the methods and of the restorers. What is
    projected on a span is left out, so that the others can be told apart.
    """
    from matplotlib.figure import Figure

    methods = {n: body for n, body in evaluation["methods"].items() if not n.endswith(PROJECTED)}
    validated = {name: facts for name, facts in restorers.items() if facts.validation}
    restorer_of = {name: re.sub(r"_(x\d+|all)$", "", name) for name in [*methods, *restorers]}
    own = dict.fromkeys(restorer for restorer in restorer_of.values() if restorer != "plain")
    colours = dict(zip(own, itertools.cycle(COLOURS), strict=False)) | {"plain": UNRESTORED}
    looks = {
        name: {"color": colours[restorer], "label": titles[name]}
        for name, restorer in restorer_of.items()
    }
    n_panels = 3 if validated else 2
    figure = Figure(figsize=(4.2 * n_panels, 3.9), dpi=150, layout="constrained")
    *learning, hits, pairs = figure.subplots(1, n_panels, squeeze=False)[0]
    for axes in learning:
        _draw_learning(axes, validated, looks)
    _draw_hits(hits, methods, looks)
    _draw_pairs(pairs, methods, looks, evaluation["settings"]["baselines"])
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    return content.getvalue()


Looks = Mapping[str, Mapping[str, str]]
"""Colour and label of each method, as matplotlib takes them."""


def _draw_learning(axes: Any, restorers: Mapping[str, Learned], looks: Looks) -> None:
    for name, facts in restorers.items():
        steps, scores = zip(*facts.validation, strict=True)
        axes.plot(steps, scores, marker=".", **looks[name])
    before = {facts.validation_before for facts in restorers.values()}
    for k, score in enumerate(sorted(score for score in before if score is not None)):
        label = None if k else "unrestored"
        axes.axhline(score, color=UNRESTORED, ls="--", lw=1, label=label)
    axes.set(xlabel="training steps", ylabel="mean SSIM of validation pairs", title="Learning")
    axes.legend(fontsize=7)


def _draw_hits(axes: Any, methods: Mapping[str, Any], looks: Looks) -> None:
    """Training images found over decoys found; dashed: one sample, or what restorers do not see."""
    for name, body in methods.items():
        false, found = operating_points(body["targets"]["ssim"], body["decoys"]["ssim"])
        style = "--" if name.endswith(("_x1", "_all")) else "-"
        axes.step(false, found, where="post", lw=1.2, ls=style, **looks[name])
    axes.set_xscale("symlog", linthresh=2 / len(methods["plain"]["decoys"]["ssim"]))
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="decoys above the threshold",
             ylabel="training images above it", title="Every threshold on SSIM")  # fmt: skip
    axes.legend(fontsize=7, loc="best")


def _draw_pairs(
    axes: Any, methods: Mapping[str, Any], looks: Looks, classical: Sequence[str]
) -> None:
    """The restored methods' scores over the attack's, image by image, and the line of no change."""
    for name, after in methods.items():
        if name.startswith("plain") or name.endswith("_x1") or name in classical:
            continue
        for side, marker, alpha in (("targets", ".", 0.45), ("decoys", "x", 0.25)):
            look = {**looks[name], "label": f"{looks[name]['label']}, {side}"}
            axes.scatter(methods["plain"][side]["ssim"], after[side]["ssim"], s=9, marker=marker,
                         lw=0.6, alpha=alpha, **look)  # fmt: skip
    limits = (0.05, 1)
    axes.plot(limits, limits, color="black", lw=0.7)
    axes.set(xlim=limits, ylim=limits, xlabel="SSIM of the attack alone",
             ylabel="SSIM after restoration", title="Image by image")  # fmt: skip
    axes.legend(fontsize=7, loc="lower right", markerscale=1.5)


@dataclass(frozen=True, kw_only=True)
class Scores(Strict):
    """One method on one side (targets or decoys): counts and means over the images."""

    n: int
    n_good: int
    good_interval: Interval | None = None
    mean_ssim: float
    mean_ssim_interval: Interval | None = None
    mean_haarpsi: float
    mean_haarpsi_interval: Interval | None = None
    best_ssim: float


@dataclass(frozen=True, kw_only=True)
class Method(Strict):
    """A method's scores on images that victims were trained on, and on images none was.

    `auc` and `found_at`: targets told from decoys by SSIM, at false positive rates. `gain` over the
    attack alone; None for the attack itself. Summaries made before these were there lack them.
    """

    targets: Scores
    decoys: Scores
    n_targets_above_every_decoy: int
    auc: float | None = None
    found_at: dict[str, float] | None = None
    gain: Gain | None = None
    disagreement: Disagreement | None = None


@dataclass(frozen=True, kw_only=True)
class Ranked(Strict):
    """Ranking of the attacks on a victim by a criterion that needs no training image: Spearman's
    correlation with their mean SSIM, 1 being perfect, and its interval."""

    n_runs: int
    spearman: float | None
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class RunSummary(Strict):
    """A job's evaluation. `seconds` are per stage; `picture`, `curves` and `report` are files
    beside this one, or None. `n_runs` attacked `n_victims` victims, or as many if that is None;
    `outcomes` says how they ended, `ranking` is of sweeps."""

    name: str
    command: str
    source: str
    n_runs: int
    n_victims: int | None = None
    images_per_run: tuple[int, ...]
    good_threshold: float
    methods: dict[str, Method]
    seconds: dict[str, float]
    picture: str | None
    curves: str | None = None
    report: str | None = None
    outcomes: dict[str, int] | None = None
    ranking: dict[str, Ranked] | None = None
    restorers: dict[str, Learned] | None = None
    hardware: Hardware
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("methods is empty; expected at least 'plain'")


def summarise_run(
    evaluation: dict[str, Any],
    *,
    name: str,
    command: str,
    seconds: dict[str, float],
    picture: str | None = None,
    curves: str | None = None,
    report: str | None = None,
    restorers: dict[str, Learned] | None = None,
) -> RunSummary:
    """The summary of an evaluation.json. Raises ValueError if it has no method to sum up."""
    kept = [field.name for field in fields(Scores)]
    methods = {
        method: {
            side: {key: body[side]["summary"][key] for key in kept}
            for side in ("targets", "decoys")
        }
        | {"n_targets_above_every_decoy": body["n_targets_above_every_decoy"]}
        | {key: body["detection"][key] for key in ("auc", "found_at")}
        | {
            "gain": None if method.startswith("plain") else asdict(gain(evaluation, method)),
            "disagreement": (d := disagreement(evaluation, method)) and asdict(d),
        }
        for method, body in evaluation["methods"].items()
    }
    ranking = evaluation["ranking"] and {
        name: {field.name: body[field.name] for field in fields(Ranked)}
        for name, body in evaluation["ranking"].items()
    }
    return TypeAdapter(RunSummary).validate_python(
        {
            "name": name,
            "command": command,
            "source": evaluation["source"]["name"],
            "n_runs": evaluation["dataset"]["n_runs"],
            "n_victims": evaluation["dataset"]["n_victims"],
            "outcomes": evaluation["dataset"]["outcomes"],
            "ranking": ranking,
            "images_per_run": tuple(evaluation["dataset"]["images_per_victim"]),
            "good_threshold": evaluation["settings"]["good_threshold"],
            "methods": methods,
            "seconds": seconds,
            "picture": picture,
            "curves": curves,
            "report": report,
            "restorers": {key: asdict(learned) for key, learned in (restorers or {}).items()},
            "hardware": hardware(),
            "versions": versions(),
        }
    )


def parse_run(text: str, *, name: str) -> RunSummary:
    """The summary in a file. Raises ValueError saying which field of `name` is wrong."""
    return checked_json(TypeAdapter(RunSummary), text, name)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: reads a job's folder, writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path, help="folder of a finished job")
    parser.add_argument("--name", required=True, help="heading of the results")
    parser.add_argument("--command", required=True, help="the command that made the job")
    parser.add_argument("--picture", help="file name of a picture in docs/results/pictures")
    parser.add_argument(
        "--curves", type=Path, help="docs/results/pictures/NAME-curves.png, to be drawn"
    )
    parser.add_argument("--report", help="file name of the report beside the summary")
    parser.add_argument("--json", type=Path, required=True, help="docs/results/runs/NAME.json")
    options = parser.parse_args(argv)
    evaluation = dict(read_evaluation(options.workspace / "evaluation").record)
    timings = options.workspace / "timings.json"
    restorers = learned(options.workspace)
    summary = summarise_run(
        evaluation,
        name=options.name,
        command=options.command,
        seconds=json.loads(timings.read_text()) if timings.is_file() else {},
        picture=options.picture,
        curves=None if options.curves is None else options.curves.name,
        report=options.report,
        restorers=restorers,
    )
    if options.curves is not None:
        titles = {name: method_title(name)[0] for name in [*evaluation["methods"], *restorers]}
        options.curves.write_bytes(draw(evaluation, restorers, titles=titles))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(asdict(summary), indent=1) + "\n")


if __name__ == "__main__":
    main()
