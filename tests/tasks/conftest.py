"""One browser for all pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tasks.browser import Browser, chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
