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
    """The line of an error that explains itself, or that another caused which does; None for one
    that nobody expects."""
    if isinstance(error, OSError):
        line = _of_files(error)
        return None if line is None else shown(line)
    if isinstance(error, StorageError):
        return shown(str(error))
    from recon_core.restore.fit import NonfiniteLossError
    from tasks.campaign.watch import CampaignError
    from tasks.dataset.curate import NothingToLearnError

    known = (CampaignError, NothingToLearnError, NonfiniteLossError)
    return str(error) if isinstance(error, known) else _of_exhausted(error)


def _of_exhausted(error: BaseException) -> str | None:
    """The line of what the machine has no more of, at the root of a library's error."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in _EXHAUSTED:
            return f"{cause.strerror}; {_FIXES[cause.errno]}"
        cause = cause.__cause__ or cause.__context__
    return None


def commands_known(error: BaseException) -> str | None:
    """The commands that there are, after one that there is not; None after anything else."""
    context = getattr(error, "ctx", None)
    known = getattr(getattr(context, "command", None), "commands", None)
    if context is None or not known or "No such command" not in str(error):
        return None
    return f"Commands of {context.command_path}: {', '.join(known)}"


def _of_files(error: OSError) -> str | None:
    """The file, what the system says about it, and the fix; without a file only those of devices,
    since a socket's error says the same of a machine."""
    fix = _FIXES.get(error.errno or 0)
    if fix is None or (error.filename is None and error.errno not in _EXHAUSTED):
        return None
    if error.filename is None:
        return f"{error.strerror}; {fix}"
    names = [Path(str(name)) for name in (error.filename, error.filename2) if name is not None]
    path = names[-1]  # of two it is the one that was to be made
    if path.name.startswith(TEMPORARY_PREFIX):  # which nobody has named
        path = path.parent
    return f"{path}: {error.strerror}; {fix}"
