"""Texts of the pages of docs/results: meanings of their words, and what differs from papers."""

from __future__ import annotations

from benchmarks.results.studies import DATA

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
