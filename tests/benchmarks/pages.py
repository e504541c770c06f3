"""All pages of results as one text."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results.page import build_pages


def build_page(files: Mapping[str, str]) -> str:
    """Pages one after another."""
    return "\n".join(build_pages(files).values())
