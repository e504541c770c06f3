"""What paper 001 says of its results, checked on evaluations of our own.

    python -m benchmarks.claims_001 [--json docs/results/claims-001.json] EVALUATION...

EVALUATION is an evaluation.json of version 4, or its folder. Every claim has a rule, stated beside
the verdict: "more" needs an interval that excludes 0 (`benchmarks.evaluated`), and what cannot be
tested on an evaluation is said to be so. Run it on the machine that made the evaluations: seconds
are theirs, hardware is this machine's. `--command` is what made them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.evaluated import PLAIN, Evaluated, NotTestableError, read_evaluation
from benchmarks.record import Claim, hardware
from recon_core.summary import NOTICEABLE, proportion_interval
from tasks.study_claims import Outcome, outcome_of

FEW = 0.01
"""At most this share of images is "almost none"."""
STABLE = 0.02
"""Curves that are no further apart than this, in mean SSIM, are "very consistent"."""

Verdict = tuple[str, bool]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim, where it is made, what the paper found, and the rule that `check` decides by.

    `check` gives our numbers and the verdict, or raises NotTestableError.
    """

    claim: str
    where: str
    theirs: str
    rule: str
    check: Callable[[Evaluated], Verdict]


def good_count_rises(e: Evaluated) -> Verdict:
    name = e.restored()
    before, after = e.good(PLAIN), e.good(name)
    if not before.any() and not after.any():
        raise NotTestableError(f"no picture is good, neither of {PLAIN} nor of {name}")
    share = e.mean(after - before)
    everywhere = ""
    if "plain_all" in e.methods:
        everywhere = f" ({e.good('plain_all').sum():.0f} at all saved iterations)"
    ours = (
        f"{before.sum():.0f}{everywhere} -> {after.sum():.0f} good of {len(after)} with {name}; "
        f"share {share}"
    )
    return ours, share.is_above_0


def good_count_rises_beyond_decoys(e: Evaluated) -> Verdict:
    name = e.restored()
    gains = [e.good(name, side) - e.good(PLAIN, side) for side in ("targets", "decoys")]
    if not any(e.good(method).any() for method in (PLAIN, name)):
        raise NotTestableError(f"no picture is good, neither of {PLAIN} nor of {name}")
    excess = e.mean(e.with_decoys(gains[0], -gains[1]))
    counts = [
        f"{e.good(PLAIN, 'decoys').sum():.0f} -> {e.good(name, 'decoys').sum():.0f} decoys",
        f"{e.good(PLAIN).sum():.0f} -> {e.good(name).sum():.0f} targets",
    ]
    ours = f"{counts[1]}, {counts[0]} good of {len(gains[0])} each; excess share {excess}"
    return ours, excess.is_above_0


def mean_beats_one_sample(e: Evaluated) -> Verdict:
    one, mean = e.samples()
    ssim, haarpsi = (e.mean(e.gain(mean, one, metric)) for metric in ("ssim", "haarpsi"))
    return f"{mean} over {one}: SSIM {ssim}, HaarPSI {haarpsi}", ssim.is_above_0


def trained_beat_generic(e: Evaluated) -> Verdict:
    found = {
        (name, other): e.mean(e.gain(name, other))
        for name, other in itertools.product(e.trained(), e.generic())
    }
    ours = "SSIM " + ", ".join(f"{name} over {other} {d}" for (name, other), d in found.items())
    return ours, all(d.is_above_0 for d in found.values())


def generic_gain_little(e: Evaluated) -> Verdict:
    name = e.restored()
    best = max(e.generic(), key=lambda method: e.scores(method).mean())
    gain, theirs = e.mean(e.gain(name)), e.mean(e.gain(best))
    less_than_half = e.mean(e.gain(name) - 2 * e.gain(best))
    ours = f"SSIM {PLAIN} to {best}, the best of {len(e.generic())}: {theirs}; to {name}: {gain}"
    return ours, gain.is_above_0 and less_than_half.is_above_0


def almost_none_is_worse(e: Evaluated) -> Verdict:
    return _few_worse(e, np.ones(len(e.scores(PLAIN)), np.bool_), "targets")


def almost_none_of_the_good_is_worse(e: Evaluated) -> Verdict:
    was_good = e.good(PLAIN) > 0
    if not was_good.any():
        raise NotTestableError(f"no picture of {PLAIN} is good")
    return _few_worse(e, was_good, "targets that were good before")


def _few_worse(e: Evaluated, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]],
               who: str) -> Verdict:  # fmt: skip
    name = e.restored()
    changes = e.gain(name)[chosen]
    n_worse = int((changes < -NOTICEABLE).sum())
    n_better = int((changes > NOTICEABLE).sum())
    low, high = proportion_interval(n_worse, len(changes))
    ours = (
        f"with {name} {n_worse} of {len(changes)} {who} are worse ({100 * low:.1f} to "
        f"{100 * high:.1f} %), {n_better} better; the largest loss is {max(0, -changes.min()):.3f}"
    )
    return ours, n_worse <= FEW * len(changes)


def halves_agree(e: Evaluated) -> Verdict:
    names = [PLAIN, e.restored()]
    apart = {}
    for name in names:
        halves = e.methods[name]["halves"]
        if halves is None:
            raise NotTestableError("victims were not attacked several times")
        first, second = (np.sort(half) for half in halves["targets"]["ssim"])
        apart[name] = float(np.abs(first - second).mean())
    ours = "curves are apart by " + ", ".join(f"{d:.4f} ({name})" for name, d in apart.items())
    return ours, max(apart.values()) <= STABLE


def disagreement_grows_with_error(e: Evaluated) -> Verdict:
    _one, mean = e.samples()
    found = e.record["hallucination"].get(mean)
    if found is None or found["spearman"] is None or found["interval"] is None:
        raise NotTestableError(f"{mean} has too few pictures to rank")
    low, high = found["interval"]
    ours = f"rank correlation of {mean} {found['spearman']:+.3f} [{low:+.3f}, {high:+.3f}]"
    bins = [b["mean_rmse"] for b in found["bins"] if b["mean_rmse"] is not None]
    if bins:
        ours += f"; RMSE {bins[0]:.3f} where the samples agree most, {bins[-1]:.3f} where least"
    return ours, low > 0


def some_runs_are_given_up(e: Evaluated) -> Verdict:
    dataset = e.record["dataset"]
    if dataset["attacks_per_victim"] == 1:
        raise NotTestableError("victims were not attacked several times")
    n, n_stopped = dataset["n_runs"], dataset["outcomes"].get("stopped", 0)
    low, high = proportion_interval(n_stopped, n)
    ours = f"{n_stopped} of {n} runs ({100 * low:.0f} to {100 * high:.0f} %)"
    return ours, 0 < n_stopped < n / 2


def vote_beats_best(e: Evaluated) -> Verdict:
    names = e.of_kind("vote")
    if not names:
        raise NotTestableError("no vote was scored")
    ssim, haarpsi = (e.mean(e.gain(names[0], PLAIN, metric)) for metric in ("ssim", "haarpsi"))
    return f"{names[0]} over {PLAIN}: SSIM {ssim}, HaarPSI {haarpsi}", ssim.is_above_0


def scores_are_about_training_images(e: Evaluated) -> Verdict:
    name = e.restored()
    before, after = e.detection(PLAIN), e.detection(name)
    area, change = e.mean(after), e.mean(after - before)
    ours = (
        f"area under the ROC curve {before.mean():.3f} -> {area.mean:.3f} [{area.low:.3f}, "
        f"{area.high:.3f}] with {name}; change {change}"
    )
    return ours, area.low > 0.5 and not change.is_below_0


def measures_agree(e: Evaluated) -> Verdict:
    clear, opposite = 0, []
    for one, other in itertools.combinations(e.methods, 2):
        ssim, haarpsi = (e.mean(e.gain(one, other, metric)) for metric in ("ssim", "haarpsi"))
        if any(d.low <= 0 <= d.high for d in (ssim, haarpsi)):
            continue
        clear += 1
        if ssim.is_above_0 != haarpsi.is_above_0:
            opposite.append(f"{one} and {other}")
    if not clear:
        raise NotTestableError("no two methods differ clearly in both measures")
    ours = f"{clear - len(opposite)} of {clear} pairs of methods have the same order in both"
    return ours + (f"; not {', '.join(opposite)}" if opposite else ""), not opposite


def fast_search_misses_little(e: Evaluated) -> Verdict:
    found = {name: body["fast"] for name, body in e.methods.items() if body["fast"] is not None}
    n = len(e.scores(PLAIN))
    if not found:
        raise NotTestableError("the fast search was not made")
    ours = "good found: " + ", ".join(
        f"{name} {fast['n_good']} of {e.good(name).sum():.0f}" for name, fast in found.items()
    )
    return ours, all(fast["n_missed_good"] <= FEW * n for fast in found.values())


MORE = "the mean difference is above 0, and so is its interval"
STATEMENTS = (
    Statement(
        claim="Restoration raises the number of good reconstructions",
        where="section 5.1.1",
        theirs="59 -> 214 good of 500 with the mean of 20 samples",
        rule=f"difference of the share of good targets: {MORE}",
        check=good_count_rises,
    ),
    Statement(
        claim="Restoration raises it more than among images that were not trained on",
        where="section 5.1.1",
        theirs="no such images were scored",
        rule=f"difference of the shares, targets less decoys: {MORE}",
        check=good_count_rises_beyond_decoys,
    ),
    Statement(
        claim="The mean of several samples is better than one sample",
        where="section 5.1.1, figure 2",
        theirs="20 samples against 1; curves, no number",
        rule=f"SSIM: {MORE}",
        check=mean_beats_one_sample,
    ),
    Statement(
        claim="Restorers trained on reconstructions beat generic ones",
        where="section 5.1.1, figure 2",
        theirs="diffusion model and BF-DnCNN above all three Restormers; curves, no number",
        rule=f"SSIM, every trained restorer over every generic one: {MORE}",
        check=trained_beat_generic,
    ),
    Statement(
        claim="Generic restorers help only slightly",
        where="section 5.1.1",
        theirs="Restormer: slight, but not dramatic improvements",
        rule="the best of them gains less than half of what the trained one gains: the trained "
        "gain, and that gain less twice the other, are above 0, and so are their intervals",
        check=generic_gain_little,
    ),
    Statement(
        claim="Almost no image is reconstructed worse after restoration",
        where="section 5.1.1, figure 3",
        theirs="none of 500",
        rule=f"at most {FEW:.0%} of the targets lose more than {NOTICEABLE:g} SSIM",
        check=almost_none_is_worse,
    ),
    Statement(
        claim="Almost no good reconstruction is worse after restoration",
        where="section 5.1.1, figure 3",
        theirs="none of 500, so none of these 59",
        rule=f"at most {FEW:.0%} of the targets that were good before lose more than "
        f"{NOTICEABLE:g} SSIM",
        check=almost_none_of_the_good_is_worse,
    ),
    Statement(
        claim="Results are consistent between halves of the attacks",
        where="appendix A.1, figure 5",
        theirs="very consistent; narrow bands, no number",
        rule="SSIM of the i-th best image of one random half less that of the other: the mean of "
        f"the absolute differences is at most {STABLE:g}, of {PLAIN} and of the restored",
        check=halves_agree,
    ),
    Statement(
        claim="Samples disagree where the restoration is wrong",
        where="section 5.1.1, figure 4",
        theirs="vastly different outputs for poor reconstructions; examples, no number",
        rule="Spearman's correlation of disagreement and RMSE over targets: the interval is above "
        "0",
        check=disagreement_grows_with_error,
    ),
    Statement(
        claim="Some attacks go wrong early and are given up",
        where="section 5.1",
        theirs="56 of 303 runs",
        rule="at least one run, and fewer than half of them",
        check=some_runs_are_given_up,
    ),
    Statement(
        claim="Averaging the candidates nearest to an image is better than the best of them",
        where="paper 002, appendix A.1",
        theirs="not in 001, which takes the best candidate",
        rule=f"SSIM: {MORE}",
        check=vote_beats_best,
    ),
    Statement(
        claim="Restored scores are about training images",
        where="section 5.1.1",
        theirs="no image that was not trained on was scored",
        rule="the area under the ROC curve after restoration is above .5 with its interval, and "
        "its change is not below 0 with its interval",
        check=scores_are_about_training_images,
    ),
    Statement(
        claim="SSIM and HaarPSI put methods in the same order",
        where="section 5.1.1, figures 2 and 3",
        theirs="curves and scatter plots alike in both; no number",
        rule="no two methods that differ in both measures, with intervals that exclude 0, do so "
        "in opposite directions",
        check=measures_agree,
    ),
    Statement(
        claim="A fast search finds nearly all good matches",
        where="section 5.1.1, footnote 3",
        theirs="used instead of all pairs; not compared",
        rule=f"of no method does it miss good matches of more than {FEW:.0%} of the targets",
        check=fast_search_misses_little,
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
