"""Fixtures of the tests of storage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from tests.storage.s3_server import S3Server, s3_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """One S3 server for all tests."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, set in this test's environment, with a prefix that no other test uses."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    return dataclasses.replace(s3_process, prefix=f"test-{next(_numbers)}/")
