"""Scaling of a training over the GPUs of a machine: plain DistributedDataParallel.

    torchrun --nproc-per-node 8 -m benchmarks.restore.scaling [--quick] [--json FILE]

The paper's batch is divided among the processes, one per GPU. One process alone with the whole
batch is the reference: the ratio is the speed-up, and its share of the number of processes the
efficiency. Without CUDA, and with --quick, the processes share the CPU at sizes that mean nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import Measurement, main, measured, median_seconds
from benchmarks.restore import gpu as restore_gpu
from benchmarks.restore.gpu import Kind, Sizes, numbers, sizes_of
from benchmarks.restore.speed import example_batch
from recon_core.restore import PAPER_TRAININGS, PaperRestorer
from recon_core.restore.edm import EDM


def scaling(quick: bool) -> Iterator[Measurement]:
    """Seconds per image of N processes, beside one; the first process has the lines."""
    with process_group():
        if restore_gpu.DEVICE.type != "cuda" and not quick:
            raise SystemExit("scaling is measured on CUDA devices; --quick tries it on a CPU")
        sizes = sizes_of(quick)
        kinds: tuple[Kind, ...] = ("float32", "TF32", "bfloat16")
        for restorer in sizes.restorers.values():
            for kind in kinds:
                if everywhere(f"{restorer.kind}, {kind}", partial(trial, restorer, kind, sizes)):
                    lines = list(scaled(restorer, kind, sizes))
                    if dist.get_rank() == 0:
                        yield from lines


def trial(restorer: PaperRestorer, kind: Kind, sizes: Sizes) -> None:
    """A step of this process alone, on its share of the batch."""
    with numbers(kind):
        ddp_step(restorer, sizes.batch[restorer.kind] // dist.get_world_size(), alone=True)()


def everywhere(name: str, action: Callable[[], None]) -> bool:
    """True if the action worked in all processes; says why not, so that none waits for another."""
    worked = torch.ones((), device=restore_gpu.DEVICE)
    try:
        action()
    except RuntimeError as error:
        print(f"{name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
        worked.zero_()
    dist.all_reduce(worked, op=dist.ReduceOp.MIN)
    return bool(worked.item())


@contextmanager
def process_group() -> Iterator[None]:
    """The processes that torchrun has started, each on a device of its own."""
    device = restore_gpu.DEVICE
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        restore_gpu.DEVICE = device
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def scaled(restorer: PaperRestorer, kind: Kind, sizes: Sizes) -> Iterator[Measurement]:
    """The paper's batch divided among all processes, and on the first one alone."""
    n_processes, n = dist.get_world_size(), sizes.batch[restorer.kind]
    if n % n_processes:
        raise SystemExit(
            f"a batch of {n} images cannot be divided among {n_processes} processes; start a "
            "divisor of it"
        )
    alone = 1.0
    with numbers(kind):
        if dist.get_rank() == 0:
            alone = timed(ddp_step(restorer, n, alone=True), sizes)
        dist.barrier()
        together = timed(ddp_step(restorer, n // n_processes, alone=False), sizes)
    case = f"{restorer.kind}, {kind}, batches of {n}, {n_processes} processes with DDP"
    yield measured(
        "restore_gpu",
        f"training, per image, {case}",
        together / n,
        "s",
        repeats=sizes.repeats,
        reference="one process, plain launches, the same batch",
        reference_value=alone / n,
    )
    efficiency = 100 * alone / together / n_processes
    yield measured("restore_gpu", f"efficiency, {case}", efficiency, "%", repeats=sizes.repeats)
    paper = PAPER_TRAININGS[restorer.kind]
    hours = paper.n_steps * paper.batch_size * together / n / 3600
    yield measured(
        "restore_gpu", f"hours to {paper.n_steps:,} steps of {paper.batch_size}, {case}", hours, "h"
    )


def timed(step: Callable[[], None], sizes: Sizes) -> float:
    """Seconds of a step."""

    def steps() -> None:
        for _ in range(sizes.n_steps):
            step()

    return median_seconds(steps, sizes.repeats) / sizes.n_steps


def ddp_step(restorer: PaperRestorer, n: int, *, alone: bool) -> Callable[[], None]:
    """A step on n images: loss, backward with the mean over processes, Adam, the average."""
    device = restore_gpu.DEVICE
    net = restorer.build(seed=0).to(device).train()
    wrapped = net if alone else DistributedDataParallel(net)
    ema = [p.detach().clone() for p in net.parameters()]
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    side = restorer.resolution if isinstance(restorer, EDM) else 32
    batch = example_batch(n, side, seed=dist.get_rank()).to(device)

    def step() -> None:
        adam.zero_grad(set_to_none=True)
        restorer.loss(wrapped, batch, generator=draw).backward()
        adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(ema, list(net.parameters()), 0.01)

    return step


if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")) == 0:
        main(scaling)
    else:  # of several processes the first one prints and writes
        for _line in scaling("--quick" in sys.argv):
            pass
