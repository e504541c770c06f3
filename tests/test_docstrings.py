"""Docstrings of public modules, classes and functions begin with a noun or a verb."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "flows", "recon_core", "storage", "tasks")
OPENINGS = {"How", "Of", "What", "When", "Where", "Whether", "Which", "Who", "Why"}


def openings(body: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first word of the docstring of a module, class or function, and of those inside."""
    text = ast.get_docstring(body) if isinstance(body, DOCUMENTED) else None
    if text:
        yield getattr(body, "lineno", 1), text.split()[0].rstrip(",.:;'s")
    for child in ast.iter_child_nodes(body):
        if isinstance(body, ast.FunctionDef) or not isinstance(child, DOCUMENTED[1:]):
            continue
        if not child.name.startswith("_"):
            yield from openings(child)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in files
        for line, word in openings(ast.parse(file.read_text()))
        if word in OPENINGS
    ]
    assert not wrong, "say what it is: " + ", ".join(wrong)


def test_an_opening_that_says_nothing_is_found() -> None:
    body = ast.parse('"""What it is."""\nclass A:\n    def b(self):\n        """Whether."""\n')
    assert list(openings(body)) == [(1, "What"), (3, "Whether")]
