"""A device without space: one clear line, a store that verifies, and the same end afterwards.

On a small tmpfs in a mount namespace of its own, at every page that a part needs; and by failing
each call in turn by which a store changes.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import StoreFullError
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from tests.storage.calls import Calls
from tests.storage.stores import MANIFEST, columns, provenance, store, write

SHAPE = {"n_runs": 1, "n_images": 8, "n_pairs": 40, "size": 8}
N_PARTS = 6
DEVICE_PAGES = 600
PAGE = 4096
_ROOT = Path(__file__).parents[2]


def refused(root: Path, part: int) -> None:
    """Writing `part` fails for want of space, says so in one line, and leaves nothing behind."""
    before = Dataset(root).content_hash
    with pytest.raises(StoreFullError) as full:
        write_part(root, part, columns(seed=part, **SHAPE), provenance=provenance())
    message = str(full.value)
    assert "no space left to write" in message
    assert "free some space" in message
    assert "run the same command again" in message
    assert "\n" not in message
    report = Dataset(root).verify()
    assert report.ok, report.problems
    assert report.orphans == ()
    assert Dataset(root).content_hash == before


# a real device


@pytest.fixture(scope="module")
def apart() -> list[str]:
    """A command that runs another one where it may mount: as root, or as root of a namespace."""
    for options in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *options, "--mount"]
        try:
            mount = [*command, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
            done = subprocess.run(mount, capture_output=True, text=True)
        except FileNotFoundError as error:
            pytest.skip(f"no {error.filename} command here, so no tmpfs can be made")
        if done.returncode == 0:
            return command
    pytest.skip(f"not permitted to mount a tmpfs here ({done.stderr.strip()})")


@pytest.mark.slow
@pytest.mark.parametrize("scarce", ["pages", "inodes"])
def test_a_device_that_fills_up(tmp_path: Path, apart: list[str], scarce: str):
    mount = tmp_path / "device"
    mount.mkdir()
    expected = store(tmp_path / "s", N_PARTS, **SHAPE).content_hash
    size = f"size={DEVICE_PAGES * PAGE}" if scarce == "pages" else "nr_inodes=700"
    script = f'mount -t tmpfs -o {size} tmpfs "$1" && exec "$2" -m {__spec__.name} "$1" "$3" "$4"'
    done = subprocess.run(
        [*apart, "sh", "-c", script, "sh", str(mount), sys.executable, scarce, expected],
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    n_refused = int(done.stdout)
    assert n_refused > 20


def fill_up_and_resume(mount: Path, scarce: str, expected: str) -> int:
    """A campaign on the small device at `mount`; how often it was refused.

    A ballast leaves less than the next part needs, at first nothing, then a little more each time,
    so that the device is full at every step of a write.
    """
    root, ballast = mount / "s", mount / "ballast"
    ballast.mkdir()
    leave(ballast, scarce, 0)
    with pytest.raises(StoreFullError):
        create_or_open(root, MANIFEST)
    free(ballast)
    create_or_open(root, MANIFEST)
    n_refused = 0
    for part in range(2):
        step = 3 if scarce == "pages" else 2
        for n_left in range(part, 10_000, step):
            leave(ballast, scarce, n_left)
            try:
                write_part(root, part, columns(seed=part, **SHAPE), provenance=provenance())
            except StoreFullError:
                refused(root, part)
                n_refused += 1
            else:
                break
        assert Dataset(root).verify().ok
    leave(ballast, scarce, 4)
    refused(root, 2)
    free(ballast)
    for part in range(2, N_PARTS):
        write_part(root, part, columns(seed=part, **SHAPE), provenance=provenance())
    dataset = Dataset(root)
    report = dataset.verify()
    assert report.ok
    assert report.orphans == ()
    assert dataset.content_hash == expected
    return n_refused


def leave(ballast: Path, scarce: str, n: int) -> None:
    """Fills the device until `n` pages or inodes are free."""
    free(ballast)
    status = os.statvfs(ballast)
    if scarce == "pages":
        with (ballast / "0").open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail - n) * PAGE)
        return
    for number in range(status.f_ffree - n):
        (ballast / str(number)).touch()


def free(ballast: Path) -> None:
    for file in ballast.iterdir():
        file.unlink()


# calls that fail in turn


def full(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("code", "once"),
    [
        pytest.param(errno.ENOSPC, False, marks=pytest.mark.slow),
        (errno.EDQUOT, False),
        pytest.param(errno.ENOSPC, True, marks=pytest.mark.slow),
    ],
    ids=["full", "over quota", "full for a moment"],
)
def test_no_space_at_any_call(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, once: bool
):
    """Whichever call fails, the part is not there and nothing of it is; then it can be written.

    Only after its receipt has its name a part is there although the last sync failed. A quota is
    another code on the same paths, so every ninth call and the last ten are enough for it.
    """
    root = memory_path / "s"
    dataset = store(root, 1, **SHAPE)
    with monkeypatch.context() as patch:
        calls = Calls(patch, lambda: full(code))
        write(root, 1, **SHAPE)
        n_moments = calls.n
    assert n_moments > 100
    part, n_there = 2, 0
    for at in range(n_moments):
        if code == errno.EDQUOT and at % 9 and at < n_moments - 10:
            continue
        with monkeypatch.context() as patch:
            Calls(patch, lambda: full(code), at=at, once=once)
            with pytest.raises(StoreFullError, match="free some space"):
                write(root, part, **SHAPE)
        report = dataset.verify()
        assert report.ok, (at, report.problems)
        assert report.orphans == (), at
        assert report.n_checked in {part, part + 1}
        there = report.n_checked == part + 1
        assert not there or at > n_moments - 3
        if there or at % 30 == 0:
            write(root, part, **SHAPE)
            part += 1
            n_there += there
    assert n_there < 3
    write(root, part, **SHAPE)
    assert Dataset(root).content_hash == store(memory_path / "calm", part + 1, **SHAPE).content_hash


def test_no_space_for_a_new_store(memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        calls = Calls(patch, lambda: full(errno.ENOSPC))
        create_or_open(memory_path / "first", MANIFEST)
        n_moments = calls.n
    for at in range(n_moments):
        root = memory_path / f"s{at}"
        with monkeypatch.context() as patch:
            Calls(patch, lambda: full(errno.ENOSPC), at=at)
            with pytest.raises(StoreFullError, match="free some space"):
                create_or_open(root, MANIFEST)
        write(root, 0)
        assert Dataset(root).verify().ok
        assert sorted(path.name for path in root.iterdir()) == ["parts", "receipts", "store.json"]


if __name__ == "__main__":
    sys.stdout.write(str(fill_up_and_resume(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
