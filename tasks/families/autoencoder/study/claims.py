"""Claims of the autoencoder paper, and questions of our own beside them, decided by our studies.

Comparisons are image by image, at the lowest loss that a victim reached and over all masks unless
the rule says otherwise; the 95 % interval of a difference is a bootstrap over images. Claims about
recovery concern networks that overfit: their loss on unseen images is at least
`figure_specs.MEMORY` times that on their own. A network that copies its input has its own claim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tasks.families.autoencoder.study import checks
from tasks.families.autoencoder.study.checks import Record, RecoveryResults
from tasks.families.autoencoder.study.figure_specs import MEMORY
from tasks.page.formats import OURS
from tasks.study.statements import Statement, decided

EVERY = "for every victim that overfits"
KNOWN = partial(checks.compared, method="known", than="unknown", decide=checks.not_below)
NOISE_AWARE = partial(checks.compared, method="noise_aware", than="unknown")
_of_ours = partial(Statement[RecoveryResults], where=OURS, theirs="not in the paper")
STATEMENTS: tuple[Statement[RecoveryResults], ...] = (
    Statement(
        claim="With an unknown mask the paper's method recovers far more images accurately than "
        "iterating f: fully connected networks",
        where="section 4, figure 3",
        theirs="curves of 10 layers, 600 images, masks 1 to 3; no number",
        rule=f"the share is higher by more than {checks.WIDE:g}, and so is the difference's "
        f"interval, {EVERY}",
        check=partial(checks.beats_iteration, kind="fc"),
    ),
    Statement(
        claim="... and U-Nets",
        where="section 4, figure 3",
        theirs="78 % against 4 % (50 images, loss 1e-8, mask 6)",
        rule="the same of the U-Nets",
        check=partial(checks.beats_iteration, kind="unet"),
    ),
    Statement(
        claim="... and approximately",
        where="appendix F, figure F.1",
        theirs="significantly outperforms, for example under masks 1, 2 and 4",
        rule=f"the share is higher, and so is the difference's interval, {EVERY}",
        check=partial(checks.compared, method="unknown", than="iteration", score="approximate"),
    ),
    Statement(
        claim="... and its mean PSNR is above that of iterating f and of generic inpainting",
        where="appendix F, figure F.2",
        theirs="impressive performance gain in terms of average PSNR",
        rule="its differences to iterating f, diffusion and biharmonic inpainting, with their "
        f"intervals, are above 0 {EVERY}",
        check=checks.higher_psnr,
    ),
    Statement(
        claim="The estimate of the mask converges",
        where="section 3.2, figure 2; appendix D.1",
        theirs="pictures of the estimate along the iterations, no number",
        rule=f"more than {checks.MOSTLY:.0%} of the runs end because the images stop changing, "
        f"with the interval, and under every mask more than {checks.MOSTLY:.0%} of the pixels are "
        f"then right, {EVERY}; undecided if too many were cut short by our limit of alternations",
        check=checks.mask_estimate_converges,
    ),
    Statement(
        claim="It recovers at losses and masks where iterating f recovers nothing",
        where="section 4, figure 3",
        theirs="masks 1, 2 and 3 at loss 1e-7",
        rule="at some loss and mask where iterating f recovers no image accurately, it recovers "
        f"at least {checks.SUCCESS:.0%}",
        check=checks.succeeds_where_iteration_does_not,
    ),
    Statement(
        claim="Knowing the mask is at least as good",
        where="section 4, figure 3",
        theirs="the known mask's curves are on or above those of the unknown",
        rule=f"accurate shares: the difference's interval is not below -{checks.SLACK:g} {EVERY}; "
        "false if all of one is below that",
        check=KNOWN,
    ),
    Statement(
        claim="Generic inpainting that knows the mask recovers nothing accurately",
        where="section 4, figure 3",
        theirs="DDNM 0 % for all settings",
        rule="no image of any victim under any mask is accurate, by diffusion or by biharmonic "
        "inpainting",
        check=checks.generic_recovers_none,
    ),
    Statement(
        claim="... but it recovers some approximately, fewer than the paper's method",
        where="appendix F, figure F.1",
        theirs="some per cent by DDNM under masks 3, 5 and 6, where its mean PSNR is near 33 dB",
        rule="approximate shares: that of diffusion is above 0, and that of the paper's method "
        f"with the mask unknown is above it, both with their intervals, {EVERY}",
        check=checks.generic_recovers_few_approximately,
    ),
    Statement(
        claim="A higher train loss, a lower recovery",
        where="section 4, figure 3",
        theirs="recovery falls as the loss rises",
        rule="accurate shares at the lowest minus the highest loss: above 0, and so is the "
        f"interval, {EVERY}",
        check=checks.falls_with_the_loss,
    ),
    Statement(
        claim="A sufficiently high loss prevents accurate recovery by all methods",
        where="section 4, figure 3",
        theirs="clearly shown",
        rule=f"no image is accurate at the highest loss, {EVERY} and each of the paper's methods",
        check=checks.high_loss_prevents,
    ),
    Statement(
        claim="Test images are not recovered accurately",
        where="section 4",
        theirs="0 % across all architectures and masks",
        rule=f"no test image under any mask, {EVERY}",
        check=partial(checks.of_test_images, score="accurate", at_most=0.0),
    ),
    Statement(
        claim="Test images are hardly ever recovered approximately",
        where="section 4",
        theirs="0 % but for 2 of 600 under mask 3 on the dense network",
        rule=f"at most {checks.RARELY:.0%} of test images over all masks, {EVERY}",
        check=partial(checks.of_test_images, score="approximate", at_most=checks.RARELY),
    ),
    Statement(
        claim="Moderate overfitting, dense network: more approximate recovery than by iterating f",
        where="section 4, table 1",
        theirs="7.64, 0.78, 1.92 % by iterating f; 54.2, 45.2, 56.9 % unknown; 80.6, 75.9, 84.2 % "
        "known mask (25,000 images, loss 1e-4)",
        rule="approximate shares: above that of iterating f, with the interval, under every mask",
        check=partial(checks.moderate_table, kind="fc"),
    ),
    Statement(
        claim="Moderate overfitting, U-Net: more approximate recovery than by iterating f",
        where="section 4, table 2",
        theirs="0.6, 10.2, 1.2 % by iterating f; 50.3, 75.9, 22.9 % unknown; 59.3, 86.2, 28.8 % "
        "known mask (1,000 images, loss 1e-4)",
        rule="approximate shares: above that of iterating f, with the interval, under every mask",
        check=partial(checks.moderate_table, kind="unet"),
    ),
    Statement(
        claim="Moderate overfitting: knowing the mask is at least as good",
        where="section 4, tables 1 and 2",
        theirs="known above unknown in all six columns, by 6 to 31 points",
        rule="approximate shares over all masks: the difference's interval is not below "
        f"-{checks.SLACK:g} {EVERY} moderately; false if all of one is below that",
        check=partial(KNOWN, score="approximate", regime="moderate", beside_theirs=True),
    ),
    Statement(
        claim="Also with noise the paper's method recovers more than iterating f: 10 layers",
        where="appendix G, figure G.1",
        theirs="significantly improves (noise 0.02, mask 1)",
        rule=f"approximate shares: the difference, with its interval, is above 0 {EVERY}",
        check=partial(checks.with_noise, deep=False),
    ),
    Statement(
        claim="... and 20 layers",
        where="appendix G, figure G.1, second row",
        theirs="significantly improves (noise 0.02, mask 1)",
        rule="the same at the lowest loss that a fully connected network of 20 layers reached",
        check=partial(checks.with_noise, deep=True),
    ),
    Statement(
        claim="It recovers more than iterating f whatever error counts as recovered",
        where="appendix F, figure F.3",
        theirs="thresholds from 1e-3 to 1e-6, U-Net, mask 6",
        rule="U-Nets, mask 6: the difference of shares, with its interval, is above 0 at every "
        "threshold from 1e-3 to 1e-6",
        check=checks.at_every_threshold,
    ),
    Statement(
        claim="A low train loss alone is no memory: what copies its input gives nothing back",
        where=OURS,
        theirs="section 4: the recovery stems from the overfitted autoencoder",
        rule=f"networks whose test loss is below {MEMORY} times their train loss: at most "
        f"{checks.RARELY:.0%} of images and masks are recovered approximately, by iterating f, the "
        "paper's method and ours with unknown masks",
        check=checks.copying_gives_nothing,
    ),
    _of_ours(
        claim="Ours: the noise-aware mask step is at least as good as the paper's",
        rule=f"accurate shares, ours minus the paper's with the mask unknown: the interval is not "
        f"below -{checks.SLACK:g} {EVERY}; false if all of one is below that",
        check=partial(NOISE_AWARE, decide=checks.not_below),
    ),
    _of_ours(
        claim="Ours: ... and better",
        rule=f"the same difference, with its interval, is above 0 {EVERY}",
        check=NOISE_AWARE,
    ),
    _of_ours(
        claim="Ours: ... and better under moderate overfitting",
        rule="approximate shares, ours minus the paper's with the mask unknown: the difference, "
        f"with its interval, is above 0 {EVERY} moderately",
        check=partial(NOISE_AWARE, score="approximate", regime="moderate"),
    ),
    _of_ours(
        claim="Ours: ... and recovers no test image accurately either",
        rule="no test image of any victim under any mask",
        check=checks.ours_no_test_image,
    ),
)


def check_recovery(record: Record) -> list[dict[str, Any]]:
    """Decide every claim about the study of this record."""
    return decided(STATEMENTS, RecoveryResults(record))
