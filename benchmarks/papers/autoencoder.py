"""Claims of the autoencoder paper, decided by our own studies of autoencoders.

    python -m benchmarks.papers.autoencoder [--check] [--json FILE] STUDY...

STUDY is a recovery.json, or its folder. Every study checks its claims itself when it is made
(`tasks.families.autoencoder.study.claims`, with the rules); they are checked again here, on its
numbers, and must come out the same. Hardware and --check are as in `benchmarks.papers.kkt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.papers.kkt import collect, read_record
from tasks.families.autoencoder.study.claims import check_recovery
from tasks.families.autoencoder.study.page import RECOVERY_PAGE

read_study = partial(read_record, page=RECOVERY_PAGE, check=check_recovery)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: prints every claim, and writes them to --json."""
    collect(argv, read=read_study, title=__doc__.splitlines()[0], paper="autoencoder")


if __name__ == "__main__":
    main()
