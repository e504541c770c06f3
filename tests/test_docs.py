"""docs/ says nothing of the machine on which it was made, and names the data of its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.results.studies import DATA

DOCS = Path(__file__).parents[1] / "docs"
SUFFIXES = (".md", ".json", ".csv", ".html", ".log", ".svg", ".txt")
TEXTS = [file for file in sorted(DOCS.rglob("*")) if file.suffix in SUFFIXES]
PAGES = sorted(DOCS.rglob("*.md"))
OF_A_MACHINE = re.compile(r"/(?:tmp|root|home|Users|work|mnt|private|scratch)/[\w.-]+")
OF_THE_ORIGINAL = (
    "copy of CIFAR-10",
    "The CIFAR-10 of the results",
    "CIFAR-10 as it is published",
    "For CIFAR-10 the labels are",
    "CIFAR-10's test set has hundreds",
    "Tiny ImageNet, SVHN and CIFAR-10",
)
"""Where the data set itself is meant, of which nothing was measured."""


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.relative_to(DOCS).as_posix())
def test_no_file_has_a_path_of_a_machine(file: Path) -> None:
    assert OF_A_MACHINE.findall(file.read_text()) == []


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.relative_to(DOCS).as_posix())
def test_numbers_of_the_jpeg_copy_are_not_said_to_be_of_cifar_10(file: Path) -> None:
    text = " ".join(file.read_text().split())
    for meant in OF_THE_ORIGINAL:
        text = text.replace(meant, "")
    found = [text[k.start() - 60 : k.end() + 30] for k in re.finditer(r"CIFAR-10\b", text)
             if not text.startswith(DATA, k.start())]  # fmt: skip
    assert found == []


def test_commands_on_the_copy_say_which_data_that_is() -> None:
    explained = "images.md#the-cifar-10-of-the-results"
    for file in PAGES:
        text = file.read_text()
        if "folder:cifar10" in text and file.name != "images.md":
            assert explained in text, file
