"""Pages of docs/results from the JSON files in it; no number on them is typed by hand.

    python -m benchmarks.results.page [--check]

A page per paper (`PAGES`), with its claims and, apart from them, our own questions
(`claims/NAME.json`), notes on what differs from the paper (`NOTES`), its studies
(`studies/NAME/study.json`, `recovery.json` or `inversion.json`) and, on that of image restoration,
summaries of jobs (`runs/NAME.json`); an appendix of `benchmarks/NAME.json`; and an index,
README.md. A file that is none of these stops the build and is named.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.record import Claim, Hardware, Measurement, parse_claims, parse_lines
from benchmarks.results.run_summary import RunSummary, parse_run
from benchmarks.results.studies import DATA, KINDS, bounds, estimate, study_table, with_data
from tasks.page.formats import is_ours
from tasks.study.statements import Outcome

INTRODUCTION = """# Results

These pages are rebuilt by `make results` from the JSON files beside them. Every number was measured
by the command beside it. A *good* reconstruction has an SSIM above the threshold of its run. Good
counts stand beside those of *decoys*: images that no victim was trained on, matched in the same
way. A good decoy is a false positive. [Reading a score](../reading-a-score.md) says what follows
from a count.
"""
DATA_NOTE = f"""{DATA} is a copy of CIFAR-10 as JPEG files with 5,000 test images, called
`folder:cifar10` or `folder:cifar10-jpeg` in commands:
[what that changes](../images.md#the-cifar-10-of-the-results).
"""
NOTES = {
    "image-restoration": """*Differs from the paper:* our restorers are small and learned from far
fewer pairs than its 60 million, so a claim about restorers that fails here is undecided; the
generic restorers are classical denoisers, not Restormer. What restoration does on digits, and what
it does not: [restoration or invention](../evaluation.md#restoration-or-invention).
""",
    "kkt": """*Differs from the paper:* good, in its claims, is an SSIM above .4 by the window of 3
pixels of the authors' code; in the studies' tables it is by our window of 11, with the other beside
it. Equation 6 penalises multipliers and pixels outside their bounds linearly; ours squares these
penalties and the norm, as the image restoration paper says the code does. Attacks are 2 to 4 of
1,000 or 2,000 iterations (theirs 100 of 50,000) on networks of width 200 (theirs 1,000): images
that do not come back leave a claim undecided.
""",
    "autoencoder": """*Differs from the paper:* its U-Net is Ronneberger's; the one that
overfits here has no skip connections, and says so by its name. The one with them learned to copy
its input.
""",
    "mixcon": f"""*Contradicts the paper:* with its own lambda of 1 and beta of 1e-4 MixCon costs
far more accuracy on digits and on {DATA} in grey than the paper's .5 to .9 points on MNIST and
FashionMNIST, and UniCon with lambda 1 does not train. The networks and their training:
[accuracy at the paper's own setting](../inversion-study.md#accuracy-at-the-papers-own-setting).
""",
    "span": """No paper makes these claims: they are questions of ours, decided by SSIM with a
window of 11.
""",
}
"""Stands at the top of a page."""
CLAIMS = """*Undecided*: tested, and the numbers leave it open at the size that was run. *Not
testable*: what the claim is about was not run; "ours" says what is missing.
"""
QUESTIONS = """No paper says these; they are decided by rules of the same kind.
"""


RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = {
    "image-restoration": "Image restoration paper",
    "kkt": "KKT paper",
    "span": "Span attack (ours)",
    "autoencoder": "Autoencoder paper",
    "mixcon": "MixCon paper",
    "instahide": "InstaHide paper",
}
"""Title of each page, by its name, which is that of its claims."""
AUDIT = "audit"
"""The page of what attacks get and defences cost, which no paper claims."""
APPENDIX = "benchmarks"
TITLES = {AUDIT: "Audit: attacks and defences", APPENDIX: "Benchmarks"}
OUTCOMES: dict[Outcome, str] = {
    "holds": "yes", "does not hold": "**no**", "undecided": "undecided",
    "not testable": "not testable",
}  # fmt: skip


STUDIES_HEADING, RUNS_HEADING = "## Studies\n", "## Runs\n"
CLAIMS_HEADING, QUESTIONS_HEADING = f"## Claims\n\n{CLAIMS}", f"## Our own questions\n\n{QUESTIONS}"
ORDER = (STUDIES_HEADING, RUNS_HEADING, CLAIMS_HEADING, QUESTIONS_HEADING, "")


def build_pages(files: Mapping[str, str]) -> dict[str, str]:
    """Pages by file name, from file names (relative to docs/results) and their contents.

    Raises:
        ValueError: a file is malformed, or belongs to no page; the message names it.
    """
    parts: dict[str, dict[str, list[str]]] = {name: {} for name in (*PAGES, AUDIT, APPENDIX)}
    counts: dict[str, Counter[Outcome]] = {name: Counter() for name in PAGES}
    questions: dict[str, Counter[Outcome]] = {name: Counter() for name in PAGES}
    for name, text in sorted(files.items()):
        folder, _slash, rest = name.partition("/")
        stem = rest.removesuffix(".json")
        if folder == "runs":
            page, heading = "image-restoration", RUNS_HEADING
            part = with_data(_run(parse_run(text, name=name)))
        elif folder == "studies":
            study, _slash, kind = stem.partition("/")
            page = {"recovery": "autoencoder", "inversion": "mixcon", "audit": AUDIT}.get(
                kind, "kkt"
            )
            page, heading = "span" if study == "span-networks" else page, STUDIES_HEADING
            lines, header, rows = study_table(text, name=name)
            part = with_data("\n".join([*lines, _table(header, rows)]))
        elif folder == "claims" and stem in PAGES:
            claims = parse_claims(text, name=name)
            theirs = [claim for claim in claims if not is_ours(claim.where)]
            own = [claim for claim in claims if is_ours(claim.where)]
            counts[stem].update(claim.outcome for claim in theirs)
            questions[stem].update(claim.outcome for claim in own)
            for heading, some in ((CLAIMS_HEADING, theirs), (QUESTIONS_HEADING, own)):
                if some:
                    parts[stem].setdefault(heading, []).append(_claims(some))
            continue
        elif folder == APPENDIX:
            page, heading, part = APPENDIX, "", _benchmark(stem, parse_lines(text, name=name))
        else:
            raise ValueError(f"{name} belongs to no page; claims are of one of {', '.join(PAGES)}")
        parts[page].setdefault(heading, []).append(part)
    tables = [
        _table(
            (title, *OUTCOMES),
            [
                (f"[{PAGES[name]}]({name}.md)", *(str(found[outcome]) for outcome in OUTCOMES))
                for name, found in of_pages.items()
                if found
            ],
        )
        for title, of_pages in (("claims of the papers", counts), ("our own questions", questions))
    ]
    appendix = (
        f"What every attack gets under every defence: [audit]({AUDIT}.md). Times and sizes beside "
        f"a reference: [benchmarks]({APPENDIX}.md).\n"
    )
    pages = {"README.md": "\n".join([INTRODUCTION, DATA_NOTE, *tables, appendix])}
    for name, sections in parts.items():
        lines = [f"# {TITLES.get(name) or PAGES[name]}\n"]
        if not sections:
            lines.append("No results yet.\n")
        else:
            lines += [*([NOTES[name]] if name in NOTES else []), DATA_NOTE]
        for heading in sorted(sections, key=ORDER.index):
            lines += [heading, *sections[heading]] if heading else sections[heading]
        pages[f"{name}.md"] = "\n".join(lines)
    return pages


def _run(run: RunSummary) -> str:
    images = " or ".join(str(n) for n in run.images_per_run)
    attacked = f"{run.n_runs} victims"
    if run.n_victims not in (None, run.n_runs):
        ended = ", ".join(f"{n} {name}" for name, n in (run.outcomes or {}).items() if n)
        victims = f"{run.n_victims} victim{'s' * (run.n_victims != 1)}"
        attacked = f"{run.n_runs} attacks ({ended}) on {victims}"
    rows = [
        (
            f"`{name}`",
            *(f"{side.n_good} of {side.n}" for side in (method.targets, method.decoys)),
            f"{method.n_targets_above_every_decoy}",
            *(
                estimate(getattr(side, name), getattr(side, f"{name}_interval"), ".3f")
                for name in ("mean_ssim", "mean_haarpsi")
                for side in (method.targets, method.decoys)
            ),
        )
        for name, method in run.methods.items()
    ]
    header = (
        *("method", "good", "good decoys", "above every decoy", "mean SSIM", "decoys"),
        *("mean HaarPSI", "decoys"),
    )
    ranks = [
        (f"`{name}`", f"{one.n_runs}", f"{one.spearman:+.2f}", bounds(one.interval, "+.2f"))
        for name, one in (run.ranking or {}).items()
        if one.spearman is not None and one.interval is not None
    ]
    by = ("criterion", "attacks", "rank correlation with the mean SSIM", "95 %")
    ranking = [_table(by, ranks)] if ranks else []  # of a sweep, without its training images
    stages = ", ".join(f"{stage} {_number(s)} s" for stage, s in run.seconds.items())
    lines = [
        f"### {run.name}\n",
        f"{attacked} of {images} images each, from {run.source}; good means "
        f"SSIM > {run.good_threshold:g}.\n",
        _table(header, rows),
        *_gains(run),
        *ranking,
        *_learned(run),
        f"`{run.command}`\n",
        f"Seconds per stage: {stages or 'not recorded'}.\n",
        _machine(run.hardware, run.versions),
    ]
    if run.report is not None:
        lines.append(f"The whole report: [{run.report}](runs/{run.report}).\n")
    for picture in (run.picture, run.curves):
        if picture is not None:
            lines.append(f"![{run.name}](pictures/{picture})\n")
    return "\n".join(lines)


def _gains(run: RunSummary) -> list[str]:
    """What each restorer gained, image by image, and how well each method tells a leak."""
    if all(method.auc is None for method in run.methods.values()):
        return []
    rows = []
    for name, method in run.methods.items():
        gain, spread = method.gain, method.disagreement
        cells = [""] * 6
        if gain is not None:
            of_victims = gain.ssim_interval_of_victims
            cells = [
                estimate(gain.ssim, gain.ssim_interval),
                "" if of_victims is None else bounds(of_victims),
                estimate(gain.ssim_of_good, gain.ssim_of_good_interval),
                estimate(gain.ssim_at_all, gain.ssim_at_all_interval),
                estimate(gain.haarpsi, gain.haarpsi_interval),
                f"{gain.n_better}, {gain.n_worse}",
            ]
        apart = () if spread is None else (spread.good, spread.others, spread.decoys)
        rows.append(
            (
                f"`{name}`",
                *cells,
                "" if method.auc is None else f"{method.auc:.3f}",
                ", ".join(f"{100 * share:.1f} %" for share in (method.found_at or {}).values()),
                ", ".join("-" if value is None else f"{value:.3f}" for value in apart),
            )
        )
    rates = next((list(m.found_at) for m in run.methods.values() if m.found_at), [])
    header = (
        *("method", "SSIM gained", "interval over victims", "of images that were good"),
        "over all saved steps",
        *("HaarPSI gained", "better, worse", "AUC"),
        f"found at {', '.join(f'{100 * float(rate):g} %' for rate in rates)} false positives",
        "disagreement: good, others, decoys",
    )
    text = (
        "Gains are means of differences to the attack alone on the same image; brackets are 95 % "
        "bootstrap intervals over images, and in one column over whole victims.\n"
    )
    found = [_table(header, rows), text]
    baselines = sorted({name for m in run.methods.values() if m.gain for name in m.gain.ssim_over})
    over = [
        (f"`{name}`", *(estimate(*m.gain.ssim_over[baseline]) for baseline in baselines))
        for name, m in run.methods.items()
        if m.gain and name not in baselines
    ]
    if baselines and over:
        found.append(_table(("SSIM gained over", *(f"`{name}`" for name in baselines)), over))
    return found


def _learned(run: RunSummary) -> list[str]:
    if not run.restorers:
        return []
    rows = [
        (
            f"`{name}`",
            f"{facts.n_parameters:,}",
            f"{facts.n_pairs:,}",
            f"{facts.n_examples:,}",
            f"{_number(facts.seconds)} s",
            "" if facts.validation_before is None else f"{facts.validation_before:.3f}",
            f"{max(score for _step, score in facts.validation):.3f}" if facts.validation else "",
        )
        for name, facts in run.restorers.items()
    ]
    header = (
        *("restorer", "parameters", "pairs", "examples seen", "training"),
        *("validation SSIM before", "after, at best"),
    )
    return [_table(header, rows)]


def _claims(claims: Iterable[Claim]) -> str:
    rows = [
        (
            claim.claim,
            claim.where,
            claim.theirs,
            with_data(claim.ours),
            OUTCOMES[claim.outcome],
            claim.rule or "",
            f"`{claim.command}`, {seconds}, {_hardware(claim.hardware)}",
        )
        for claim in claims
        for seconds in (
            "seconds not recorded" if claim.seconds is None else f"{_number(claim.seconds)} s",
        )
    ]
    return _table(("claim", "where", "theirs", "ours", "outcome", "rule", "how"), rows)


def _benchmark(name: str, measurements: Sequence[Measurement]) -> str:
    title = " and ".join(sorted({m.benchmark for m in measurements}))
    rows = [
        (
            with_data(m.case),
            f"{_number(m.value)} {m.unit}",
            m.reference or "",
            f"{_number(m.reference_value)} {m.unit}" if m.reference_value is not None else "",
            f"{_number(m.ratio)}" if m.ratio is not None else "",
            str(m.repeats),
        )
        for m in measurements
    ]
    machines = sorted({_machine(m.hardware, m.versions) for m in measurements})
    loads = [float(m.hardware.get("load_average") or 0) for m in measurements]
    load = f"Load average while measuring: {min(loads):g} to {max(loads):g}.\n"
    header = ("case", "ours", "reference", "reference's", "ratio", "repeats")
    body = [f"## {title}\n", f"From `{name}.json`.\n", _table(header, rows), *machines, load]
    return "\n".join(body)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([c.replace("|", "\\|").replace("\n", " ") for c in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _hardware(hardware: Hardware) -> str:
    gpu = f"{hardware['gpu']}, " if hardware.get("gpu") else ""
    return f"{gpu}{hardware.get('cpu')}, {hardware.get('cores')} cores"


def _machine(hardware: Hardware, versions: Mapping[str, str]) -> str:
    details = f"{hardware.get('threads')} threads, {hardware.get('memory_gib')} GiB"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"Measured on {_hardware(hardware)}, {details}; {packages}.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pages, or with --check says which are out of date; 1 if one is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    options = parser.parse_args(argv)
    folders = ("claims", "runs", APPENDIX)
    patterns = (*(f"{folder}/*.json" for folder in folders),
                *(f"studies/*/{kind}.json" for kind in KINDS))  # fmt: skip
    found = [path for pattern in patterns for path in options.results.glob(pattern)]
    files = {p.relative_to(options.results).as_posix(): p.read_text() for p in found}
    try:
        pages = build_pages(files)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        for name, page in pages.items():
            (options.results / name).write_text(page)
        return 0
    for name, page in pages.items():
        path = options.results / name
        if not path.is_file() or path.read_text() != page:
            print(f"{path} is out of date; run `make results`", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
