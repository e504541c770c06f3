"""Decisions of the image restoration paper's claims on an evaluation: our numbers in words,
and the verdict.

Every function takes an `Evaluated` and raises NotTestableError where it lacks what the claim is
about. A verdict is true, false, or None where the numbers leave it open.
`benchmarks.papers.image_restoration` has the claims themselves, and the rules in words.
"""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.evaluation.evaluated import PLAIN, Evaluated
from benchmarks.results.run_summary import disagreement
from recon_core.summary import NOTICEABLE, proportion_interval
from tasks.study.statements import NotTestableError, Verdict, above, every, share_at_most

FEW = 0.01
"""At most this share of images is "almost none"."""
STABLE = 0.02
"""Curves that are no further apart than this, in mean SSIM, are "very consistent"."""
SLACK = 0.02
"""By so much an area under the ROC curve may fall and still count as no lower."""


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
    return ours, share.above()


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
    return ours, excess.above()


def mean_beats_one_sample(e: Evaluated) -> Verdict:
    one, mean = e.samples()
    ssim, haarpsi = (e.mean(e.gain(mean, one, metric)) for metric in ("ssim", "haarpsi"))
    return f"{mean} over {one}: SSIM {ssim}, HaarPSI {haarpsi}", ssim.above()


def trained_beat_generic(e: Evaluated) -> Verdict:
    found = {
        (name, other): e.mean(e.gain(name, other))
        for name, other in itertools.product(e.trained(), e.generic())
    }
    ours = "SSIM " + ", ".join(f"{name} over {other} {d}" for (name, other), d in found.items())
    return ours, every(d.above() for d in found.values())


def generic_gain_little(e: Evaluated) -> Verdict:
    name = e.restored()
    best = max(e.generic(), key=lambda method: e.scores(method).mean())
    gain, theirs = e.mean(e.gain(name)), e.mean(e.gain(best))
    less_than_half = e.mean(e.gain(name) - 2 * e.gain(best))
    ours = f"SSIM {PLAIN} to {best}, the best of {len(e.generic())}: {theirs}; to {name}: "
    ours += f"{gain}, less twice the other {less_than_half}"
    return ours, every([gain.above(), less_than_half.above()])


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
    return ours, share_at_most(n_worse, len(changes), FEW)


def halves_agree(e: Evaluated) -> Verdict:
    if e.methods[PLAIN]["halves"] is None:
        raise NotTestableError("victims were not attacked several times")
    apart = {}
    for name in (PLAIN, e.restored()):
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
    return ours, above(low, high)


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
    return f"{names[0]} over {PLAIN}: SSIM {ssim}, HaarPSI {haarpsi}", ssim.above()


def scores_are_about_training_images(e: Evaluated) -> Verdict:
    name = e.restored()
    before, after = e.detection(PLAIN), e.detection(name)
    area, change = e.mean(after), e.mean(after - before)
    ours = (
        f"area under the ROC curve {before.mean():.3f} -> {area.value:.3f} [{area.low:.3f}, "
        f"{area.high:.3f}] with {name}; change {change}"
    )
    return ours, every([area.above(0.5), change.not_below(SLACK)])


def measures_agree(e: Evaluated) -> Verdict:
    clear, opposite = 0, []
    for one, other in itertools.combinations(e.methods, 2):
        ssim, haarpsi = (e.mean(e.gain(one, other, metric)) for metric in ("ssim", "haarpsi"))
        if any(d.low <= 0 <= d.high for d in (ssim, haarpsi)):
            continue
        clear += 1
        if ssim.above() != haarpsi.above():
            opposite.append(f"{one} and {other}")
    if not clear:
        raise NotTestableError("no two methods differ clearly in both measures")
    ours = f"{clear - len(opposite)} of {clear} pairs of methods have the same order in both"
    return ours + (f"; not {', '.join(opposite)}" if opposite else ""), not opposite


def diffusion_beats_cnn(e: Evaluated) -> Verdict:
    _one, mean = e.samples()
    stem = mean.rpartition("_x")[0]
    others = [name for name in e.trained() if name.rpartition("_x")[0] != stem]
    if not others:
        raise NotTestableError(f"no trained restorer but {stem} was scored")
    found = {name: e.mean(e.gain(mean, name)) for name in others}
    ours = "SSIM " + ", ".join(f"{mean} over {name} {d}" for name, d in found.items())
    return ours, every(d.above() for d in found.values())


def poor_pictures_give_diverse_samples(e: Evaluated) -> Verdict:
    """Disagreement of the samples: of targets that are not good, and of decoys, and of the good."""
    _one, mean = e.samples()
    found = disagreement(e.record, mean)
    if found is None or found.good_interval is None:
        raise NotTestableError(f"no picture of {mean} is good, or its samples were not kept")
    low, high = found.good_interval
    ours, verdicts = f"{mean}: {found.good:.3f} [{low:.3f}, {high:.3f}] of good targets", []
    for name, value, interval in (
        ("other targets", found.others, found.others_interval),
        ("decoys", found.decoys, found.decoys_interval),
    ):
        if value is None or interval is None:
            continue
        ours += f", {value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}] of {name}"
        verdicts.append(True if interval[0] > high else False if interval[1] < low else None)
    if not verdicts:
        raise NotTestableError(f"every picture of {mean} is good")
    return ours, every(verdicts)
