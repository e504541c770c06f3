"""Sharing of a machine and a victim by the runs of a batch, for every attack family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import UInt8
from torch import Tensor

from recon_core.threads import Shares, side_by_side, stack_size
from recon_core.types import Progress, RunResult, RunSpec, Victims

Result = TypeVar("Result")
Stack = Sequence[RunSpec]
Runs = Callable[[Stack, UInt8[Tensor, "r n c h w"], torch.device, Progress], list[RunResult]]
"""Does some of a batch's runs, on their images; one result per spec, in order."""


@runtime_checkable
class AtOnce(Protocol):
    """Does jobs and gives their results, in order."""

    def __call__(
        self, jobs: Sequence[Callable[[], Result]], device: torch.device, /
    ) -> list[Result]: ...


def one_after_another(jobs: Sequence[Callable[[], Result]], _device: torch.device) -> list[Result]:
    """For jobs that change what is the whole process's: none may end before another."""
    return [job() for job in jobs]


def share_runs(
    specs: Sequence[RunSpec],
    images: UInt8[Tensor, "r n c h w"],
    *,
    run_stack: Runs,
    run_sweep: Runs,
    has_keeper: bool,
    device: torch.device,
    progress: Progress,
    at_once: AtOnce = side_by_side,
) -> list[RunResult]:
    """The results of a batch: of runs with a victim each in stacks, by `run_stack`, else (and
    always where there is a keeper of victims) sweep after sweep by `run_sweep`."""
    sweeps = [len(list(group)) for _, group in groupby(specs, key=lambda spec: spec.victim)]
    is_alone = len(sweeps) == len(specs) and not has_keeper
    size = stack_size(device, len(specs))
    sizes = [size] * (len(specs) // size) if is_alone else sweeps
    shares = Shares(progress, [n / len(specs) for n in sizes])
    run = run_stack if is_alone else run_sweep
    jobs = [
        partial(run, specs[end - n : end], images[end - n : end], device, shares.of(k))
        for k, (n, end) in enumerate(zip(sizes, accumulate(sizes), strict=True))
    ]
    done = at_once(jobs, device) if is_alone else one_after_another(jobs, device)
    return [result for results in done for result in results]


@runtime_checkable
class Keepable(Protocol):
    """A trained victim."""

    def tensors(self) -> dict[str, Tensor]: ...


Victim = TypeVar("Victim", bound=Keepable)


def kept_or_trained(
    spec: RunSpec,
    victims: Victims | None,
    *,
    read: Callable[[Mapping[str, Tensor]], Victim],
    train: Callable[[], Victim],
    progress: Progress,
) -> Victim:
    """The victim of a run: as it was kept, by `read`; else trained, and put there."""
    known = None if victims is None else victims.get(spec.victim)
    if known is not None:
        progress(1.0)
        return read(known)
    trained = train()
    if victims is not None:
        victims.put(spec.victim, trained.tensors())
    return trained
