"""Failures that end a command in one line: what they say, and what helps.

Anything else deserves its traceback.
"""

from __future__ import annotations

import errno
from pathlib import Path

from storage.errors import StorageError, shown
from storage.files import TEMPORARY_PREFIX

_FIXES = {
    errno.EROFS: "it is mounted read-only; use a folder that can be written to",
    errno.EACCES: "ask its owner for access, or use another folder",
    errno.EPERM: "ask its owner for access, or use another folder",
    errno.ENAMETOOLONG: "give a shorter name; most file systems take 255 bytes between slashes",
    errno.ENOSPC: "make room or use another device; the same command goes on from what is whole",
    errno.EDQUOT: "make room or use another device; the same command goes on from what is whole",
    errno.EFBIG: "use a file system that takes larger files",
    errno.ENOTDIR: "a file stands where a folder is needed; use another path, or move the file",
    errno.EISDIR: "a folder stands where a file is needed; use another path, or move the folder",
    errno.EEXIST: "something else stands there; use another path, or move it",
    errno.ENOENT: "give a path that is there",
    errno.ELOOP: "its links lead in a circle; give the path that is meant",
    errno.EIO: "the device does not answer as it should; look at the system's log",
    errno.ESTALE: "the network's file system has lost it; mount it again",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENFILE: "the machine has no more open files to give; end other programs",
    errno.ENOMEM: "end other programs, or use fewer workers",
}
_EXHAUSTED = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def expected_line(error: Exception) -> str | None:
    """Return the one-line message of an expected error, or of its expected cause; None if the error
    is unexpected."""
    if isinstance(error, OSError):
        fix, name = _FIXES.get(error.errno or 0), error.filename2 or error.filename
        if fix is None or (name is None and error.errno not in _EXHAUSTED):
            return None  # without a file, since a socket's error says the same of a machine
        path = Path(str(name))
        if path.name.startswith(TEMPORARY_PREFIX):  # which nobody has named
            path = path.parent
        return shown(f"{'' if name is None else f'{path}: '}{error.strerror}; {fix}")
    if isinstance(error, StorageError):
        return shown(str(error))
    from recon_core.restore.fit import NonfiniteLossError
    from tasks.campaign.state import CampaignError
    from tasks.dataset.curate import NothingToLearnError

    if isinstance(error, CampaignError | NothingToLearnError | NonfiniteLossError):
        return str(error)
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # what the machine has no more of
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in _EXHAUSTED:
            return f"{cause.strerror}; {_FIXES[cause.errno]}"
        cause = cause.__cause__ or cause.__context__
    return None
