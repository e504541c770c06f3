"""Claims of the image restoration paper, decided by evaluations of our own.

    python -m benchmarks.papers.image_restoration [--json FILE] EVALUATION...
    python -m benchmarks.papers.image_restoration --json FILE --check

EVALUATION is an evaluation.json, its folder, or the report-data of its report
(`benchmarks.evaluation.evaluated`), which docs/results keeps. Every claim has a rule, stated beside
the verdict: "more" needs an interval that excludes 0 (`benchmarks.evaluation.evaluated`), and what
cannot be tested on an evaluation is said to be so. Run it on the machine that made the evaluations:
seconds are theirs, hardware is this machine's. `--command` is what made them. How the dataset grew
is checked on docs/results/benchmarks/coverage_real.json (`benchmarks.coverage.real`). What the
paper does not say is asked as a question of ours; so is restoration inside a known span, which is
another setting (restore_in_span.json, `benchmarks.restore.in_span`), and how many images restored
pictures tell apart (restore_identification.json, `benchmarks.restore.identification`). A claim on
restorers that fails with fewer pairs than the paper's is undecided.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.coverage.real import coverage_claims
from benchmarks.evaluation import checks
from benchmarks.evaluation.evaluated import (
    PLAIN,
    TABLES,
    Evaluated,
    has_tables,
    read_evaluation,
    read_tables,
)
from benchmarks.record import Claim, claims_in, decided_claims, hardware, parse_lines, write_claims
from benchmarks.restore.identification import identification_claims
from benchmarks.restore.in_span import in_span_claims
from benchmarks.results.run_summary import learned
from recon_core.summary import NOTICEABLE
from tasks.study.statements import Statement

BENCHMARKS = Path(__file__).parents[2] / "docs/results/benchmarks"
OF_BENCHMARKS: dict[str, Callable[..., Iterable[Claim]]] = {
    "coverage_real": coverage_claims,
    "restore_in_span": in_span_claims,
    "restore_identification": identification_claims,
}
"""What gives the claims that a benchmark decides, by the name of its file."""
NOT_KEPT = "not recomputed: the scores of single images by these restorers were not kept"
"""In a claim's numbers: they are those of an evaluation whose tables lack them."""


MORE = "the mean difference is above 0, and so is its interval; false if that ends at 0 or below"
_of_restorers = partial(Statement[Evaluated], short_of=Evaluated.short_of)
STATEMENTS: tuple[Statement[Evaluated], ...] = (
    _of_restorers(
        claim="Restoration raises the number of good reconstructions",
        where="section 5.1.1",
        theirs="59 -> 214 good of 500 with the mean of 20 samples",
        rule=f"difference of the share of good targets: {MORE}",
        check=checks.good_count_rises,
    ),
    Statement(
        claim="Restoration raises it more than among images that were not trained on",
        where="ours; beside section 5.1.1",
        theirs="not claimed; no such images were scored",
        rule=f"difference of the shares, targets less decoys: {MORE}",
        check=checks.good_count_rises_beyond_decoys,
    ),
    _of_restorers(
        claim="The mean of several samples is better than one sample",
        where="section 5.1.1, figure 2",
        theirs="20 samples against 1; curves, no number",
        rule=f"SSIM: {MORE}",
        check=checks.mean_beats_one_sample,
    ),
    _of_restorers(
        claim="Restorers trained on reconstructions beat generic ones",
        where="section 5.1.1, figure 2",
        theirs="diffusion model and BF-DnCNN above all three Restormers; curves, no number",
        rule=f"SSIM, every trained restorer over every generic one: {MORE}",
        check=checks.trained_beat_generic,
    ),
    _of_restorers(
        claim="The diffusion model is better than BF-DnCNN trained on the same pairs",
        where="sections 4 and 5.1.1, figure 2",
        theirs="BF-DnCNN is the baseline below it; curves, no number",
        rule=f"SSIM, the mean of samples over every other trained restorer: {MORE}",
        check=checks.diffusion_beats_cnn,
    ),
    _of_restorers(
        claim="Generic restorers help only slightly",
        where="section 5.1.1",
        theirs="Restormer: slight, but not dramatic improvements",
        rule="the best of them gains less than half of what the trained one gains: the trained "
        "gain, and that gain less twice the other, are above 0, and so are their intervals; "
        "false if one ends at 0 or below",
        check=checks.generic_gain_little,
    ),
    _of_restorers(
        claim="Almost no image is reconstructed worse after restoration",
        where="section 5.1.1, figure 3",
        theirs="none of 500",
        rule=f"at most {checks.FEW:.0%} of the targets lose more than {NOTICEABLE:g} SSIM; false "
        "if more do, with the exact interval of the share",
        check=checks.almost_none_is_worse,
    ),
    _of_restorers(
        claim="Almost no good reconstruction is worse after restoration",
        where="section 5.1.1, figure 3",
        theirs="none of 500, so none of these 59",
        rule=f"at most {checks.FEW:.0%} of the targets that were good before lose more than "
        f"{NOTICEABLE:g} SSIM; false if more do, with the exact interval of the share",
        check=checks.almost_none_of_the_good_is_worse,
    ),
    Statement(
        claim="Results are consistent between halves of the attacks",
        where="appendix A.1, figure 5",
        theirs="very consistent; narrow bands, no number",
        rule="SSIM of the i-th best image of one random half less that of the other: the mean of "
        f"the absolute differences is at most {checks.STABLE:g}, of {PLAIN} and of the restored",
        check=checks.halves_agree,
    ),
    _of_restorers(
        claim="Samples disagree where the restoration is wrong",
        where="section 5.1.1, figure 4",
        theirs="vastly different outputs for poor reconstructions; examples, no number",
        rule="Spearman's correlation of disagreement and RMSE over targets: the interval is above "
        "0; false if it ends at 0 or below",
        check=checks.disagreement_grows_with_error,
    ),
    _of_restorers(
        claim="Samples disagree more where a picture shows next to nothing",
        where="sections 3 and 5.1.1, figure 4",
        theirs="samples from a wide distribution; 10 % of the training pairs are noise for it",
        rule="the samples disagree more on targets that are not good, and on decoys, than on good "
        "targets: means whose intervals do not touch; false if one lies below",
        check=checks.poor_pictures_give_diverse_samples,
    ),
    Statement(
        claim="Some attacks go wrong early and are given up",
        where="section 5.1",
        theirs="56 of 303 runs",
        rule="at least one run, and fewer than half of them",
        check=checks.some_runs_are_given_up,
    ),
    Statement(
        claim="Averaging the candidates nearest to an image is better than the best of them",
        where="ours; beside appendix A.1 of the KKT paper",
        theirs="not claimed; averaging is said to be better than the nearest, not chosen by SSIM",
        rule=f"SSIM: {MORE}",
        check=checks.vote_beats_best,
    ),
    Statement(
        claim="Restored scores are about training images",
        where="ours; beside section 5.1.1",
        theirs="not claimed; no image that was not trained on was scored",
        rule="the area under the ROC curve after restoration is above .5 with its interval, and "
        f"the interval of its change is not below -{checks.SLACK:g}; false if all of one is below",
        check=checks.scores_are_about_training_images,
    ),
    Statement(
        claim="SSIM and HaarPSI put methods in the same order",
        where="ours; beside section 5.1.1, figures 2 and 3",
        theirs="not claimed; curves and scatter plots are shown in both",
        rule="no two methods that differ in both measures, with intervals that exclude 0, do so "
        "in opposite directions",
        check=checks.measures_agree,
    ),
)


def check(e: Evaluated, *, name: str, command: str) -> list[Claim]:
    """Every claim, checked on one evaluation; seconds are those of the evaluation."""
    seconds = round(sum(e.record["seconds"].values()), 3)
    return decided_claims(
        STATEMENTS, e, name=f"{name}: ", command=command, seconds=seconds, machine=hardware()
    )


def named(path: Path) -> str:
    """An evaluation's name: that of its job's folder."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    for inner in ("report-data", "evaluation"):
        folder = folder.parent if folder.name == inner else folder
    return folder.name


def name_of(claim: Claim) -> str:
    """The evaluation that a claim was checked on."""
    return claim.ours.partition(":")[0]


def read(path: Path) -> Evaluated:
    """The evaluation at `path`: its record with the restorers of its job, or the tables of its
    report.

    Raises ValueError if it is neither.
    """
    if has_tables(path):
        return read_tables(path)
    found = read_evaluation(path)
    job = (path if path.is_dir() else path.parent).parent
    return replace(found, restorers={name: of.n_pairs for name, of in learned(job).items()})


def recomputed(claim: Claim, kept: Sequence[Claim], *, from_tables: bool) -> Claim:
    """`claim` beside what was kept of its evaluation.

    Tables were measured elsewhere: command, seconds and hardware are those that were kept. Where
    they lack what the numbers came from, the kept numbers stay, with the rule of today.
    """
    same = next((old for old in kept if old.claim == claim.claim), None)
    if not from_tables or not kept:
        return claim
    if same is not None and NOT_KEPT in same.ours:
        return replace(same, where=claim.where, theirs=claim.theirs, rule=claim.rule)
    like = same or kept[0]
    return replace(claim, command=like.command, seconds=like.seconds, hardware=like.hardware)


def collected(paths: Sequence[Path], old: Sequence[Claim], *, command: str | None) -> list[Claim]:
    """Claims on these evaluations and of `OF_BENCHMARKS`, and those of `old` on others: claim by
    claim, evaluations in the order of `old`, then of `paths`.

    Raises ValueError if one of the files is something else.
    """
    made_by = (
        command
        or f"python -m benchmarks.papers.image_restoration {' '.join(p.as_posix() for p in paths)}"
    )
    found: dict[str, list[Claim]] = {}
    for claim in old:
        found.setdefault(name_of(claim), []).append(claim)
    for path in paths:
        name, kept = named(path), found.get(named(path), [])
        found[name] = [
            recomputed(claim, kept, from_tables=command is None and has_tables(path))
            for claim in check(read(path), name=name, command=made_by)
        ]
    for stem, claims_of in OF_BENCHMARKS.items():
        file = BENCHMARKS / f"{stem}.json"
        found[stem] = list(claims_of(parse_lines(file.read_text(), name=file.name), name=stem))
    places = {statement.claim: k for k, statement in enumerate(STATEMENTS)}
    every = [claim for of_one in found.values() for claim in of_one]
    return sorted(every, key=lambda claim: places.get(claim.claim, len(places)))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: prints every claim, and writes them to --json; or only compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evaluations", type=Path, nargs="*", metavar="EVALUATION")
    parser.add_argument("--json", type=Path, help="also write docs/results/claims/image-"
                        "restoration.json, where claims on other evaluations stay")  # fmt: skip
    parser.add_argument("--command", help="the command that made the evaluations")
    parser.add_argument("--check", action="store_true", help="only compare the file of --json with "
                        "what the tables in runs/ beside its folder give")  # fmt: skip
    options = parser.parse_args(argv)
    path: Path | None = options.json
    try:
        old = claims_in(path)
        paths = options.evaluations
        if options.check and path:
            names = [n for n in dict.fromkeys(map(name_of, old)) if n not in OF_BENCHMARKS]
            runs = path.resolve().parents[1] / "runs"
            paths = [runs / name / "report-data" for name in names]
            for tables in paths:
                if not has_tables(tables):
                    raise ValueError(f"{tables} lacks some of {', '.join(TABLES)}; keep them there")
        claims = collected(paths, old, command=options.command)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.check:
        wrong = [c.claim for c in (*claims, *old) if c not in claims or c not in old]
        if wrong or path is None:
            parser.error(f"{path} is not what its tables give: {wrong or 'name it with --json'}")
        n = sum(NOT_KEPT in claim.ours for claim in claims)
        print(f"{path}: {len(claims) - n} claims recomputed; of {n} the data were not kept")
        return
    write_claims(claims, path)


if __name__ == "__main__":
    main()
