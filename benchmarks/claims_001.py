"""What paper 001 says of its results, checked on evaluations of our own.

    python -m benchmarks.claims_001 [--json docs/results/claims-001.json] EVALUATION...

EVALUATION is an evaluation.json of version 4, or its folder. Every claim has a rule, stated beside
the verdict: "more" needs an interval that excludes 0 (`benchmarks.evaluated`), and what cannot be
tested on an evaluation is said to be so. Run it on the machine that made the evaluations: seconds
are theirs, hardware is this machine's. `--command` is what made them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import evaluation_checks as checks
from benchmarks.evaluated import PLAIN, Evaluated, NotTestableError, read_evaluation
from benchmarks.record import Claim, hardware
from recon_core.summary import NOTICEABLE
from tasks.study_claims import Outcome, outcome_of


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim, where it is made, what the paper found, and the rule that `check` decides by.

    `check` gives our numbers and the verdict, or raises NotTestableError.
    """

    claim: str
    where: str
    theirs: str
    rule: str
    check: Callable[[Evaluated], checks.Verdict]


MORE = "the mean difference is above 0, and so is its interval; false if that ends at 0 or below"
STATEMENTS = (
    Statement(
        claim="Restoration raises the number of good reconstructions",
        where="section 5.1.1",
        theirs="59 -> 214 good of 500 with the mean of 20 samples",
        rule=f"difference of the share of good targets: {MORE}",
        check=checks.good_count_rises,
    ),
    Statement(
        claim="Restoration raises it more than among images that were not trained on",
        where="section 5.1.1",
        theirs="no such images were scored",
        rule=f"difference of the shares, targets less decoys: {MORE}",
        check=checks.good_count_rises_beyond_decoys,
    ),
    Statement(
        claim="The mean of several samples is better than one sample",
        where="section 5.1.1, figure 2",
        theirs="20 samples against 1; curves, no number",
        rule=f"SSIM: {MORE}",
        check=checks.mean_beats_one_sample,
    ),
    Statement(
        claim="Restorers trained on reconstructions beat generic ones",
        where="section 5.1.1, figure 2",
        theirs="diffusion model and BF-DnCNN above all three Restormers; curves, no number",
        rule=f"SSIM, every trained restorer over every generic one: {MORE}",
        check=checks.trained_beat_generic,
    ),
    Statement(
        claim="The diffusion model is better than BF-DnCNN trained on the same pairs",
        where="sections 4 and 5.1.1, figure 2",
        theirs="BF-DnCNN is the baseline below it; curves, no number",
        rule=f"SSIM, the mean of samples over every other trained restorer: {MORE}",
        check=checks.diffusion_beats_cnn,
    ),
    Statement(
        claim="Generic restorers help only slightly",
        where="section 5.1.1",
        theirs="Restormer: slight, but not dramatic improvements",
        rule="the best of them gains less than half of what the trained one gains: the trained "
        "gain, and that gain less twice the other, are above 0, and so are their intervals; "
        "false if one ends at 0 or below",
        check=checks.generic_gain_little,
    ),
    Statement(
        claim="Almost no image is reconstructed worse after restoration",
        where="section 5.1.1, figure 3",
        theirs="none of 500",
        rule=f"at most {checks.FEW:.0%} of the targets lose more than {NOTICEABLE:g} SSIM",
        check=checks.almost_none_is_worse,
    ),
    Statement(
        claim="Almost no good reconstruction is worse after restoration",
        where="section 5.1.1, figure 3",
        theirs="none of 500, so none of these 59",
        rule=f"at most {checks.FEW:.0%} of the targets that were good before lose more than "
        f"{NOTICEABLE:g} SSIM",
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
    Statement(
        claim="Samples disagree where the restoration is wrong",
        where="section 5.1.1, figure 4",
        theirs="vastly different outputs for poor reconstructions; examples, no number",
        rule="Spearman's correlation of disagreement and RMSE over targets: the interval is above "
        "0; false if it ends at 0 or below",
        check=checks.disagreement_grows_with_error,
    ),
    Statement(
        claim="Pictures that show next to nothing give diverse samples",
        where="section 3 and 5.1.1, figure 4",
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
        where="paper 002, appendix A.1",
        theirs="not in 001, which takes the best candidate",
        rule=f"SSIM: {MORE}",
        check=checks.vote_beats_best,
    ),
    Statement(
        claim="Restored scores are about training images",
        where="section 5.1.1",
        theirs="no image that was not trained on was scored",
        rule="the area under the ROC curve after restoration is above .5 with its interval, and "
        f"the interval of its change is not below -{checks.SLACK:g}; false if one of them lies on "
        "the other side, of .5 and of 0",
        check=checks.scores_are_about_training_images,
    ),
    Statement(
        claim="SSIM and HaarPSI put methods in the same order",
        where="section 5.1.1, figures 2 and 3",
        theirs="curves and scatter plots alike in both; no number",
        rule="no two methods that differ in both measures, with intervals that exclude 0, do so "
        "in opposite directions",
        check=checks.measures_agree,
    ),
    Statement(
        claim="A fast search finds nearly all good matches",
        where="section 5.1.1, footnote 3",
        theirs="used instead of all pairs; not compared",
        rule=f"of no method does it miss good matches of more than {checks.FEW:.0%} of the targets",
        check=checks.fast_search_misses_little,
    ),
)


def check(e: Evaluated, *, name: str, command: str) -> Iterator[Claim]:
    """Every claim, checked on one evaluation; `name` stands before our numbers."""
    spent = sum(e.record["seconds"].values())
    for statement in STATEMENTS:
        start = time.perf_counter()
        outcome: Outcome
        try:
            ours, holds = statement.check(e)
            outcome = outcome_of(holds)
        except NotTestableError as reason:
            ours, outcome = str(reason), "not testable"
        yield Claim(
            claim=statement.claim,
            where=statement.where,
            theirs=statement.theirs,
            ours=f"{name}: {ours}",
            outcome=outcome,
            rule=statement.rule,
            command=command,
            seconds=round(spent + time.perf_counter() - start, 3),
            hardware=hardware(),
        )


def named(path: Path) -> str:
    """An evaluation's name: that of its job's folder."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    return folder.parent.name if folder.name == "evaluation" else folder.name


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: prints every claim, and writes them to --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evaluations", type=Path, nargs="+", metavar="EVALUATION")
    parser.add_argument("--json", type=Path, help="also write docs/results/claims-001.json")
    parser.add_argument("--command", help="the command that made the evaluations")
    options = parser.parse_args(argv)
    command = options.command or "python -m benchmarks.claims_001 " + " ".join(
        path.as_posix() for path in options.evaluations
    )
    try:
        evaluations = [(named(path), read_evaluation(path)) for path in options.evaluations]
    except ValueError as error:
        parser.error(str(error))
    checked = [check(e, name=name, command=command) for name, e in evaluations]
    claims = [claim for of_each in zip(*checked, strict=True) for claim in of_each]
    for claim in claims:
        print(f"{claim.outcome.upper()}: {claim.claim} ({claim.where})")
        print(f"  theirs: {claim.theirs}\n  ours:   {claim.ours}\n  rule:   {claim.rule}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n")


if __name__ == "__main__":
    main()
