"""Claims of the KKT paper, and questions of our own beside them, decided by our studies.

Cells are compared by good reconstructions per victim. A comparison holds if the difference is above
0, its 95 % interval (a bootstrap over the images of each victim) excludes 0, and no single pair of
victims, which share images and random numbers, says the opposite. It does not hold if the whole
interval is at 0 or below. Otherwise the claim is undecided; where the study lacks what the claim is
about, it is not testable. A claim that images come back is undecided, not false, where fewer or
shorter attacks than the paper's bring none.

Claims of the KKT paper count good images by the window of 3 of its authors' code, with the numbers
by our window of 11 beside them. Questions about the span attack use the window of 11 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tasks.families.weights.study import results as checks
from tasks.families.weights.study import span_claims as span
from tasks.families.weights.study.results import Results
from tasks.study.statements import AT_OUR_SIZE, Statement, decided


def check_claims(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Decide every claim about the study of this record: the KKT paper's by its authors' window,
    with the numbers by our window beside them where they differ."""
    statements = STATEMENTS.get(str(record["name"]), ())
    by_ours = decided(statements, Results(record))
    if statements is span.STATEMENTS:
        return by_ours
    by_theirs = decided(statements, Results(record, window=3))
    for claim, ours in zip(by_theirs, by_ours, strict=True):
        numbers, other, more = claim["ours"], ours["ours"], ""
        if numbers == other:
            continue
        if claim["outcome"] != ours["outcome"]:
            more = f" ({ours['outcome']})"
        else:
            numbers, less, size = numbers.partition(AT_OUR_SIZE)
            other, more = other.partition(AT_OUR_SIZE)[0], less + size
        claim["ours"] = f"window of 3: {numbers}; window of 11: {other}{more}"
    return by_theirs


MORE = "the difference holds in every row"
EFFECTIVE = (
    "a larger effective number of images behind the weights, (sum c)^2 / sum c^2 with c the slopes "
    "of the loss (equation 14), for every victim"
)
MORE_CANDIDATES = "more candidates improve the visual quality; no number"
_by_vote = partial(
    Statement[Results],
    claim="The mean of the candidates nearest to an image is better than the nearest alone",
    where="appendix A.1",
    rule="mean SSIM of a cell's images by the mean of all candidates within B times the nearest "
    "one's distance, minus that by the nearest alone, which is not chosen by SSIM: above 0 with "
    "Student's interval over cells",
    check=checks.vote_beats_nearest,
)
_takes_attacks = partial(Statement[Results], short_of=Results.short_of)
"""A claim that may fail because too little was spent on the attack."""
_near_the_boundary = partial(
    Statement[Results],
    claim="What comes back lies close to the decision boundary",
    theirs="scatter plots",
    rule="Spearman's correlation of distance and SSIM within victims is below 0, and so is its "
    "interval over victims",
    check=checks.near_the_boundary,
)
STATEMENTS: dict[str, tuple[Statement[Results], ...]] = {
    "multiclass": (
        Statement(
            claim="With equally many images per class, more classes give more good reconstructions",
            where="section 4.2, figure 3b",
            theirs="the count rises with C for 1, 5, 10 and 50 images per class",
            rule="good images per victim, most classes minus fewest: " + MORE,
            check=checks.more_classes_more_good,
        ),
        Statement(
            claim="With equally many images per class, more classes give a larger share of good "
            "reconstructions",
            where="ours; beside section 4.2, figure 3a",
            theirs="not claimed; the ability to reconstruct grows although the training set does",
            rule="share of good images, most classes minus fewest: " + MORE,
            check=partial(checks.more_classes_more_good, share=True),
        ),
        Statement(
            claim="With a fixed number of images, more classes give more good reconstructions",
            where="appendix C.1, figure 9",
            theirs="more than 6 times as many for 10 classes as for 2, of 500 images",
            rule="good images per victim, most classes minus fewest: the difference holds",
            check=checks.fixed_number,
        ),
        Statement(
            claim="A classifier of ten classes is more vulnerable than a binary one",
            where="section 4.2, figure 2",
            theirs="101 against 40 good of 500",
            rule="good images per victim: the difference holds",
            check=checks.ten_against_binary,
        ),
        Statement(
            claim="More classes put more images on the margin",
            where="section 4.2",
            theirs="given as the intuitive explanation",
            rule="most classes against fewest at a fixed number of images: " + EFFECTIVE,
            check=checks.more_images_matter,
        ),
        _near_the_boundary(where="section 4.2, figures 2 and 3a"),
        _by_vote(theirs=f"{MORE_CANDIDATES} (B = 1.1)"),
    ),
    "losses": (
        _takes_attacks(
            claim="Victims of regression losses with weight decay reconstruct",
            where="section 5.2, figure 4",
            theirs="for MSE, |.|^2.5 and Huber",
            rule="fewest images: the share of good targets is above that of good decoys, for every "
            "loss",
            check=checks.regression_reconstructs,
        ),
        _takes_attacks(
            claim="... large portions of the training set",
            where="section 5.2",
            theirs="seen in figure 4, of 300 images",
            rule="at the largest number of images at least a quarter of them, with the interval of "
            "the share, for every loss",
            check=checks.large_portions,
        ),
        Statement(
            claim="Images with a higher loss are easier to reconstruct",
            where="section 5.2, figure 4",
            theirs="scatter plots for every loss, BCE with and without weight decay among them",
            rule="Spearman's correlation of loss and SSIM within victims is above 0, and so is its "
            "interval over victims, for every loss",
            check=checks.higher_loss_comes_back_better,
        ),
        Statement(
            claim="Fewer images, a larger share of them",
            where="section 6.2 (Haim et al. 2022)",
            theirs="fewer samples are more susceptible in quantity and quality",
            rule="share of good images, fewest minus most: the difference holds for every loss",
            check=checks.fewer_images_larger_share,
        ),
    ),
    "weight-decay": (
        Statement(
            claim="A standard start without weight decay gives nothing back",
            where="section 6.1",
            theirs="models with standard initialization did not yield reconstructed samples",
            rule="at most 5 % of the images are good, of two classes and of ten; false if more "
            "are, with the exact interval of the share",
            check=checks.none_without_decay,
        ),
        _takes_attacks(
            claim="Weight decay makes reconstruction possible from a standard start",
            where="section 6.1, figure 5a, b",
            theirs="counts far above the baseline without weight decay",
            rule="good images per victim at the weight decay that is best for the other victims, "
            "minus the standard start without: the difference holds",
            check=partial(checks.against_start, start="standard"),
        ),
        _takes_attacks(
            claim="For some values it is above what a small start gives",
            where="section 6.1, figure 5a, b",
            theirs="significantly higher for some values",
            rule="the same against the small start without weight decay",
            check=partial(checks.against_start, start="small"),
        ),
        Statement(
            claim="Weight decay puts more images on the margin",
            where="appendix E, figure 14",
            theirs="more training samples on the margin, for some values",
            rule="the weight decay with most good images against the small start: " + EFFECTIVE,
            check=checks.decay_makes_more_images_matter,
        ),
        Statement(
            claim="The test error does not change much with it",
            where="appendix E",
            theirs="does not change significantly",
            rule="mean accuracies on other images of all weight decays and the standard start lie "
            "within 0.05",
            check=checks.test_error_hardly_changes,
        ),
        _takes_attacks(
            claim="Victims that do not fit their images can give them back, too",
            where="appendix E",
            theirs="reconstruction is possible with non-zero training error",
            rule="in some cell with a victim that misclassifies an image, the share of good "
            "targets is above that of good decoys",
            check=checks.unfitted_come_back,
        ),
    ),
    "cnn": (
        _takes_attacks(
            claim="Convolutional victims with weight decay and a standard start reconstruct",
            where="section 6.1, figure 6",
            theirs="Conv(3, 32)-1000-1 with weight decay 1e-3",
            rule="at the best weight decay, the share of good targets is above that of good decoys",
            check=checks.cnn_comes_back,
        ),
        Statement(
            claim="... which they do not without it",
            where="section 6.1",
            theirs="Haim et al. 2022 failed on convolutions",
            rule="good images per victim at the weight decay that is best for the other victims, "
            "minus each start without: the difference holds",
            check=checks.cnn_needs_decay,
        ),
        Statement(
            claim="Fewer channels, fewer reconstructions",
            where="appendix F, figure 15",
            theirs="as expected for models with fewer parameters",
            rule="share over all kernels, most channels minus fewest: the difference holds",
            check=checks.fewer_channels_fewer_good,
        ),
        Statement(
            claim="Kernels of middle size are safer than small ones and than full ones",
            where="appendix F, figure 15",
            theirs="many models with no reconstruction at all in between",
            rule="the smallest and the largest kernel are above the lowest in between, both "
            "differences hold",
            check=checks.middle_kernels_are_safer,
        ),
        _near_the_boundary(where="appendix F, figure 15"),
        _by_vote(theirs=f"{MORE_CANDIDATES} (B = 1.5)"),
    ),
    "width": (
        Statement(
            claim="The share of good reconstructions grows with W/N: wider at equal N",
            where="section 6.2, figure 7",
            theirs="as W/N increases, more samples are reconstructed",
            rule="share over all N, widest minus narrowest: the difference holds for both losses",
            check=checks.wider_means_more,
        ),
        Statement(
            claim="The share of good reconstructions grows with W/N: fewer images at equal W",
            where="section 6.2, figure 7",
            theirs="N = 10: all of them; N = 500: up to 8 %",
            rule="share at the largest width, fewest minus most images: the difference holds for "
            "both losses",
            check=checks.fewer_images_at_a_width,
        ),
        _takes_attacks(
            claim="Of ten images all come back from a network that is wide enough",
            where="section 6.2",
            theirs="W above 50 (MSE) and 10 (BCE)",
            rule="every image is good at the fewest images and the largest width",
            check=checks.all_of_ten,
        ),
    ),
    "large": (
        _takes_attacks(
            claim="Some of very many images come back",
            where="appendix G, figure 17",
            theirs="a few dozens of 5,000 with SSIM above .4",
            rule="the share of good targets is above that of good decoys",
            check=checks.some_come_back,
        ),
        _takes_attacks(
            claim="Victims trained with stochastic gradients give images back, too",
            where="appendix B and appendix G",
            theirs="some of them can be reconstructed; no number",
            rule="the share of good targets is above that of good decoys, in every cell whose "
            "victims were trained on batches smaller than their images",
            check=checks.minibatches_come_back,
        ),
        Statement(
            claim="Far more images are on the margin than come back good",
            where="appendix G, figure 17b",
            theirs="most are on or close to the margin, a few dozens are good",
            rule="fewer good images than the effective number of images behind the weights, for "
            "every victim",
            check=checks.most_near_few_good,
        ),
    ),
    "span-networks": span.STATEMENTS,
}
