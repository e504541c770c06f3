"""Claims of the MixCon paper, checked on a study of our own; and those that we make of ours.

A difference of two cells is taken seed by seed, on the same images, starts and orders; its interval
of 95 % is Student's over seeds. The sweet spots were chosen by the first seeds; claims about them
are judged by the others, if there are any. A trend is looked for where only lambda or beta differs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tasks.families.inversion.study import checks
from tasks.families.inversion.study.results import InversionResults, Record, score
from tasks.page.formats import OURS
from tasks.study.statements import Statement, decided

TREND = (
    f"the mean over these rows is {{}} {checks.RANKS:g}, and at most {checks.UNLIKELY:.1%} of "
    "shuffles within the rows give as strong a trend; false if it is so the other way round"
)
BELOW, ABOVE = TREND.format("below minus"), TREND.format("above")
KEPT = (
    "at most the share that a sweet spot may lose, with an interval over test images, on every "
    "source; false if all of it is above that"
)
_of_ours = partial(Statement[InversionResults], where=OURS, theirs="not in the paper")
STATEMENTS: tuple[Statement[InversionResults], ...] = (
    Statement(
        claim="Without a defence, images come back from their features",
        where="section 4.3, figure 4 and table 3",
        theirs="SSIM .64, .43 and .76 (MNIST, FashionMNIST, SVHN)",
        rule=f"by the paper's descent at its best rate, mean SSIM is above that of unrelated "
        f"images by more than {checks.CLEARLY:g} on every source",
        check=checks.vanilla_leaks,
    ),
    Statement(
        claim="MixCon brings the features of different images together",
        where="section 4.3, figure 3",
        theirs="mean pairwise distances fall",
        rule="mean distance, no defence minus the sweet spots': above 0 with the interval and for "
        "every seed, on every source",
        check=checks.distance_falls,
    ),
    Statement(
        claim="A larger lambda costs accuracy",
        where="section 4.3, figure 3",
        theirs="larger lambda, lower accuracy",
        rule=f"rank correlation of lambda and accuracy at each beta: {BELOW}",
        check=partial(checks.trend, axis="lam", value=checks.mean_of("accuracy"), sign=-1),
    ),
    Statement(
        claim="A smaller beta costs accuracy",
        where="section 4.3, figure 3",
        theirs="smaller beta, smaller bound of the distance, lower accuracy",
        rule=f"rank correlation of beta and accuracy at each lambda: {ABOVE}",
        check=partial(checks.trend, axis="beta", value=checks.mean_of("accuracy"), sign=1),
    ),
    Statement(
        claim="A smaller beta gives a smaller minimal distance",
        where="section 4.3",
        theirs="beta bounds the minimal pairwise distance",
        rule=f"rank correlation of beta and the smallest distance at each lambda: {ABOVE}",
        check=partial(checks.trend, axis="beta", value=checks.mean_of("min_distance"), sign=1),
    ),
    Statement(
        claim="With the same lambda, a smaller beta gives worse recoveries",
        where="section 4.3, figure 4",
        theirs="columns C3 to C5",
        rule=f"rank correlation of beta and SSIM by the paper's descent (tuned) at each lambda: "
        f"{ABOVE}",
        check=partial(checks.trend, axis="beta", value=checks.mean_ssim, sign=1),
    ),
    Statement(
        claim="With the same beta, a larger lambda gives worse recoveries",
        where="section 4.3, figure 4",
        theirs="columns C3 and C6 to C8",
        rule=f"rank correlation of lambda and SSIM by the paper's descent (tuned) at each beta: "
        f"{BELOW}",
        check=partial(checks.trend, axis="lam", value=checks.mean_ssim, sign=-1),
    ),
    Statement(
        claim="At matched accuracy MixCon lowers SSIM",
        where="section 4.3, table 3",
        theirs=".64 to .14, .43 to .17, .76 to .61",
        rule="SSIM by the paper's descent at its best rate, no defence minus its sweet spot: above "
        "0 with the interval and for every seed, on every source",
        check=partial(checks.table_3, value=score(checks.JUDGE)),
    ),
    Statement(
        claim="... and perceptual similarity",
        where="section 4.3, table 3",
        theirs=".78 to .44, .71 to .42, .69 to .59",
        rule="the same for PSIM",
        check=partial(checks.table_3, value=score(checks.JUDGE, "psim")),
    ),
    Statement(
        claim="... and the SSIM of the image that is recovered best",
        where="section 4.3, table 3, worst case in parentheses",
        theirs=".83 to .48, .78 to .52, .92 to .84",
        rule="the same for the largest SSIM of a seed's images",
        check=partial(checks.table_3, value=score(checks.JUDGE, best=True)),
    ),
    Statement(
        claim="... and the perceptual similarity of the image that is recovered best",
        where="section 4.3, table 3, worst case in parentheses",
        theirs=".88 to .69, .92 to .66, .81 to .72",
        rule="the same for the largest PSIM of a seed's images",
        check=partial(checks.table_3, value=score(checks.JUDGE, "psim", best=True)),
    ),
    Statement(
        claim="At the paper's own setting MixCon costs next to no accuracy",
        where="section 4.3, table 3",
        theirs="(1, 1e-4): 99.1 to 98.6 % (MNIST), 89.8 to 88.9 % (FashionMNIST); (0.5, 1e-4): "
        "88.4 to 88.2 % (SVHN)",
        rule="accuracy without defence minus that with MixCon (1, 1e-4), of the seeds of both: "
        f"{KEPT}",
        check=partial(checks.keeps_accuracy, kind="mixcon", lam=1.0, beta=1e-4),
    ),
    Statement(
        claim="... and UniCon with lambda 1 none",
        where="appendix D.1, table 4",
        theirs="99.1 to 99.2 % (MNIST), 89.8 to 89.6 % (FashionMNIST)",
        rule=f"the same with UniCon (1): {KEPT}",
        check=partial(checks.keeps_accuracy, kind="unicon", lam=1.0, beta=None),
    ),
    Statement(
        claim="UniCon hides less than MixCon",
        where="appendix D.1, table 4",
        theirs="SSIM .19 against .17 (FashionMNIST), .67 against .61 (SVHN)",
        rule="SSIM by the paper's descent at its best rate, UniCon minus MixCon at the setting of "
        "the study: above 0 with the interval and for every seed, on every source where UniCon is "
        "no more than the sweet spot's share less accurate",
        check=partial(checks.table_4, value=score(checks.JUDGE)),
    ),
    Statement(
        claim="UniCon hides less of the image that is recovered best, too",
        where="appendix D.1, table 4, worst case in parentheses",
        theirs="SSIM .59 against .48, .53 against .52, .91 against .84",
        rule="the same for the largest SSIM of a seed's images",
        check=partial(checks.table_4, value=score(checks.JUDGE, best=True)),
    ),
    Statement(
        claim="The earlier the cut, the easier the inversion",
        where="appendix D.2, figures 6 to 17",
        theirs="SSIM falls from cut to cut",
        rule="SSIM by the paper's descent at its best rate, no defence, each cut minus the next: "
        "above 0 with the interval and for every seed, on every source; false if one is below",
        check=checks.earlier_is_easier,
    ),
    Statement(
        claim="MixCon can be put at any cut and hides something there",
        where="appendix D.2",
        theirs="SSIM lower than without defence at every cut",
        rule="the same, no defence minus MixCon at the setting of the study, at every cut",
        check=checks.every_cut,
    ),
    _of_ours(
        claim="Ours: a better attacker gets more, with and without a defence",
        rule="SSIM of our attack minus that of the paper's descent at its best rate: above 0 with "
        "the interval, for no defence, the study's setting and the sweet spots, on every source",
        check=checks.strong_gets_more,
    ),
    _of_ours(
        claim="Ours: ... and undoes the defence: it gets from the sweet spot at least what the "
        "paper's attack gets without any",
        rule="SSIM of our attack on the sweet spot (of the paper's descent), minus that of the "
        "paper's descent without defence: above 0 with the interval, on every source",
        check=checks.strong_undoes,
    ),
    _of_ours(
        claim="Ours: against the better attacker, MixCon still lowers SSIM at matched accuracy",
        rule="SSIM of our attack, no defence minus its own sweet spot: above 0 with the interval "
        "and for every seed, on every source",
        check=partial(checks.table_3, value=score("strong"), attack="strong"),
    ),
    _of_ours(
        claim="Ours: a restorer of the attack's own pairs adds to it",
        rule="SSIM after the restorer minus before: above 0 with the interval, for every cell that "
        "has one",
        check=checks.restorer_adds,
    ),
)


def check_inversion(record: Record) -> list[dict[str, Any]]:
    """Every claim about the study of this record, with the verdict."""
    return decided(STATEMENTS, InversionResults(record))
