"""Several processes, one per device, that train one restorer together: `torchrun` starts them,
`accelerate` (optional) joins them, DistributedDataParallel averages gradients. Each takes
`batch_size / ranks` of its own share of the pairs a step; rank 0 validates and writes."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from recon_core.restore.fit import OneRank, Ranks


class Group(Ranks, Protocol):
    """Ranks that also agree on when to save, and on where all of them are."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order; of all ranks together, so also a place to wait."""

    def agree(self, flag: bool) -> bool:
        """Rank 0's flag."""

    def close(self) -> None:
        """Called at the end, by all ranks."""


class OneProcess(OneRank):
    """A training in one process."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, flag: bool) -> bool:
        return flag

    def close(self) -> None:
        return


class Accelerated:
    """The processes that torchrun has started, `device` being each one's own.

    Raises ValueError if `accelerate` is not installed.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise ValueError(
                f"several processes need accelerate, which cannot be imported ({error}); "
                "pip install '.[multigpu]', or start one process"
            ) from error
        self._accelerator: Any = Accelerator(cpu=cpu, mixed_precision="no")
        self.rank: int = self._accelerator.process_index
        self.size: int = self._accelerator.num_processes

    @property
    def device(self) -> str:
        return str(self._accelerator.device)

    def wrap(self, net: nn.Module) -> nn.Module:
        wrapped: nn.Module = self._accelerator.prepare_model(net)
        return wrapped

    def place(self, n: int) -> tuple[int, int]:
        counts = self.gather(n)
        return sum(counts[: self.rank]), sum(counts)

    def sum(self, value: float) -> float:
        held = torch.tensor(value, dtype=torch.float64, device=self._accelerator.device)
        return float(self._accelerator.reduce(held, reduction="sum"))

    def unsynchronised(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._accelerator.no_sync(wrapped)
        return context

    def gather(self, value: Any) -> list[Any]:
        from accelerate.utils import gather_object

        return list(gather_object([value]))

    def agree(self, flag: bool) -> bool:
        return self.sum(float(flag and self.rank == 0)) > 0

    def close(self) -> None:
        """Ends the connections; a process that ends with them open may end with an error."""
        self.gather(None)  # nobody leaves while another waits for it
        self._accelerator.end_training()


def leave() -> NoReturn:
    """Ends this process at once, all of its work being done and written.

    With torch 2.13 a rank sometimes aborts in the destructors of its libraries ("terminate called
    without an active exception"), and torchrun would call a finished training failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def started_by_torchrun() -> bool:
    """True if this is one of several processes that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
