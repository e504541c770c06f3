"""Treatment of freed blocks by malloc: keep them, so that the next step finds its memory mapped.

By default glibc maps every large block anew and gives it back when it is freed. The temporaries of
each iteration are then cleared by the kernel again and again, which took half of the time of an
attack on a CPU. glibc alone has these settings; elsewhere nothing is set.
"""

from __future__ import annotations

import ctypes
import os
import platform

SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": 1 << 30,
    "MALLOC_MMAP_THRESHOLD_": 1 << 30,
    "MALLOC_TOP_PAD_": 1 << 26,
}
"""For the environment of a process that is started; in bytes."""
_PARAMETERS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
"""mallopt's numbers for them, from malloc.h."""
OLDER_LIMIT = 1 << 25
"""What older versions of glibc take as a threshold for mmap at most (mallopt(3)); they refuse more,
and would then map every block above 128 KiB anew once another of the settings is there."""


def keep_freed_memory() -> dict[str, int]:
    """Sets what `SETTINGS` says in this process; what has been set, which may be nothing.

    What the environment sets already stays as it is.
    """
    if platform.libc_ver()[0] != "glibc":
        return {}
    mallopt = ctypes.CDLL(None).mallopt
    kept = {}
    for name in SETTINGS.keys() - os.environ.keys():
        for value in (SETTINGS[name], OLDER_LIMIT):
            if mallopt(_PARAMETERS[name], value) == 1:
                kept[name] = value
                break
    return kept
