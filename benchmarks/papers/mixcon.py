"""Claims of the MixCon paper, decided by our own studies of split classifiers.

    python -m benchmarks.papers.mixcon [--check] [--json docs/results/claims/mixcon.json] STUDY...

STUDY is an inversion.json, or its folder. Every study checks its claims itself when it is made
(`tasks.families.inversion.study.claims`, with the rules); they are checked again here, on its
numbers, and must come out the same. Hardware and --check are as in `benchmarks.papers.kkt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.papers.kkt import collect, read_record
from tasks.families.inversion.study.claims import check_inversion
from tasks.families.inversion.study.page import INVERSION_PAGE

read_study = partial(read_record, page=INVERSION_PAGE, check=check_inversion)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: prints every claim, and writes them to --json."""
    collect(argv, read=read_study, title=__doc__.splitlines()[0], paper="mixcon")


if __name__ == "__main__":
    main()
