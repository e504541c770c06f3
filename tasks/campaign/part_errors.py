"""Consequences of an error of one part for the campaign.

- *retry*: a network or a file service did not answer as it should; the same again may work.
- *killed*: Dask gave the part up, because worker after worker died that it had been given to.
- *failed*: this part has it, another may not; such are out of memory, a linear system without a
  solution.
- *end*: the device is full, the store is not what it should be, or the program has a mistake:
  no other part would fare better. Numerical divergence is none of these, it is an outcome of a run.
"""

from __future__ import annotations

import errno
from concurrent.futures import CancelledError
from typing import Literal

import torch
from distributed import Future, KilledWorker

from storage.errors import CorruptPartError, StorageError, StoreFullError, UnsettledError
from storage.pairs.receipts import Receipt

FETCH_SECONDS = 30.0

Verdict = Literal["retry", "killed", "failed", "end"]


def verdict(error: BaseException) -> Verdict:
    """Consequence of an error for its part: see the top of this module."""
    if isinstance(error, OSError):
        return "end" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "retry"
    if isinstance(error, KilledWorker):
        return "killed"
    if isinstance(error, CancelledError | UnsettledError) or type(error) is StorageError:
        return "retry"
    if isinstance(error, StoreFullError | CorruptPartError) or not isinstance(error, _OF_A_PART):
        return "end"
    return "failed"


_OF_A_PART = (StorageError, RuntimeError, ValueError, MemoryError, ArithmeticError)
"""Errors that one part may have and another not; others are mistakes in the program."""


def reason_of(error: BaseException) -> str:
    """The error in one line; with what to do, where a part is too large for its GPU."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{text.splitlines()[0]} The runs of a part do not fit into the GPU's memory at once: "
            "free it, or start a new store with a smaller --batch"
        )
    return text


def outcome_of(future: Future[Receipt]) -> Receipt | BaseException | None:
    """Result of an ended future; None if Dask runs it again, because its worker died with it."""
    try:
        if future.status == "error":
            error: BaseException | None = future.exception(timeout=FETCH_SECONDS)
            return error
        receipt: Receipt = future.result(timeout=FETCH_SECONDS)
    except (TimeoutError, CancelledError) as cancelled:
        return cancelled if future.cancelled() else None
    return receipt
