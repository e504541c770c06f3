"""The paper's trainings and restorations on one CUDA device: are they right, and how fast are they?

    python -m benchmarks.restore.gpu [--quick] [--json docs/results/benchmarks/restore_gpu.json]

First, outputs and gradients in float32 on the device have to agree with float64 on the CPU, or
nothing is timed; TF32 and bfloat16 are compared alike, without a limit. Then training and sampling
at the paper's size are timed in float32, TF32 and bfloat16 (autocast), with plain launches, as one
CUDA graph, and with torch.compile: images a second, the memory of the device, and hours to the
paper's budget (EDM 400,000 steps of 512 images, BF-DnCNN 40,000 of 128). The line of `Fit` is the
training as it is; the others have no `.item()` and no new seeds in a step. What fails is left out,
with its reason on the screen. With --quick it works on a CPU too, at sizes that mean nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.record import Measurement, main, measured, median_seconds
from benchmarks.restore.speed import example_batch, few_steps, lively, relative
from recon_core.cuda_graphs import repeated
from recon_core.precision import matmul_precision
from recon_core.restore import PAPER_TRAININGS, BFDnCNN, Examples, Fit, PaperRestorer
from recon_core.restore.edm import EDM

_line = partial(measured, "restore_gpu")


Kind = Literal["float32", "TF32", "bfloat16"]
Mode = Literal["Fit", "plain launches", "CUDA graph", "torch.compile"]

KINDS: tuple[Kind, ...] = ("float32", "TF32", "bfloat16")
MODES: tuple[Mode, ...] = ("Fit", "plain launches", "CUDA graph", "torch.compile")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
PARITY = {"output": 1e-4, "gradients": 2e-3}
"""Limits for float32. Where a ReLU has an input near 0, rounding turns its gradient on or off."""
PAPER: dict[str, PaperRestorer] = {"edm": EDM(), "bf_dncnn": BFDnCNN()}
QUICK: dict[str, PaperRestorer] = {
    "edm": EDM(size="tiny", resolution=16, n_steps=3),
    "bf_dncnn": BFDnCNN(depth=4, n_channels=8),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Restorers, images in a training step and at once in sampling, steps that are timed."""

    restorers: dict[str, PaperRestorer]
    batch: dict[str, int]
    n_sampled: int
    n_steps: int
    repeats: int
    modes: tuple[Mode, ...]


def sizes_of(quick: bool) -> Sizes:
    """The paper's on a CUDA device; with `quick` fewer repeats, and on a CPU tiny networks."""
    tiny = DEVICE.type != "cuda"
    batch = {kind: 4 if tiny else PAPER_TRAININGS[kind].batch_size for kind in PAPER}
    return Sizes(
        restorers=QUICK if tiny else PAPER,
        batch=batch,
        n_sampled=4 if tiny else 512,
        n_steps=2 if quick else 20,
        repeats=1 if quick else 5,
        modes=MODES[:3] if tiny else MODES,
    )


def measure(quick: bool) -> Iterator[Measurement]:
    """Parity, then speed, memory and projected hours of both restorers."""
    if DEVICE.type != "cuda" and not quick:
        raise SystemExit(
            "benchmarks.restore.gpu needs a CUDA device; benchmarks.restore.speed is for the CPU"
        )
    sizes = sizes_of(quick)
    for restorer in sizes.restorers.values():
        yield from parity(restorer)
    for restorer in sizes.restorers.values():
        for kind in KINDS:
            for mode, what in itertools.product(sizes.modes, (training, sampling)):
                if (mode, what) != ("Fit", sampling):
                    name = f"{what.__name__}, {restorer.kind}, {kind}, {mode}"
                    yield from or_why_not(name, partial(what, restorer, kind, mode, sizes))


def or_why_not(name: str, lines: Callable[[], Iterator[Measurement]]) -> Iterator[Measurement]:
    """The lines, or none and their error on the screen: no compiler, or out of memory."""
    try:
        found = list(lines())
    except RuntimeError as error:
        print(f"{name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
        return
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    yield from found


@contextmanager
def numbers(kind: Kind, *, graph: bool = False) -> Iterator[None]:
    """Convolutions and products of this kind; torch's own default is TF32 for convolutions."""
    cuda = DEVICE.type == "cuda"
    conv: Any = getattr(torch.backends.cudnn, "conv", None)  # torch before 2.9 has none
    name = "fp32_precision" if conv is not None else "allow_tf32"
    where: Any = conv if conv is not None else torch.backends.cudnn
    before = getattr(where, name)
    values = ("tf32", "ieee") if conv is not None else (True, False)
    with ExitStack() as stack:
        stack.callback(setattr, where, name, before)
        if cuda:
            setattr(where, name, values[0] if kind == "TF32" else values[1])
            stack.enter_context(matmul_precision("tf32" if kind == "TF32" else "ieee", DEVICE))
        if kind == "bfloat16":
            stack.enter_context(
                torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=not graph)
            )
        yield


def parity(restorer: PaperRestorer) -> Iterator[Measurement]:
    """Distance of the output and the gradients from float64 on the CPU.

    Raises SystemExit if float32 is off.
    """
    exact = output_and_gradients(restorer, CPU, torch.float64)
    for kind in KINDS:
        with numbers(kind):
            found = output_and_gradients(restorer, DEVICE, torch.float32)
        for what, limit in PARITY.items():
            difference = relative(found[what], exact[what])
            case = f"{restorer.kind}: {what} in {kind} on {DEVICE.type}, float64 on the CPU"
            yield _line(case, difference, "relative difference")
            if kind == "float32" and not difference < limit:
                raise SystemExit(
                    f"{restorer.kind}: {what} in float32 differ by {difference:.2g}, more than "
                    f"{limit}: not timed"
                )


def output_and_gradients(
    restorer: PaperRestorer, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The network's output for four images and its gradients, on the CPU in float64."""
    net = lively(restorer).eval().to(device, dtype)
    draw = torch.Generator().manual_seed(3)
    side = restorer.resolution if isinstance(restorer, EDM) else 32
    inputs = [torch.randn(4, 6 if isinstance(restorer, EDM) else 3, side, side, generator=draw)]
    if isinstance(restorer, EDM):
        inputs += [torch.randn(4, generator=draw), torch.randn(4, 9, generator=draw)]
    target = torch.randn(4, 3, side, side, generator=draw).to(device, dtype)
    output = net(*(value.to(device, dtype) for value in inputs))
    (output - target).square().mean().backward()
    gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    found = {"output": output, "gradients": torch.cat(gradients)}
    return {what: values.detach().cpu().double() for what, values in found.items()}


def training(
    restorer: PaperRestorer, kind: Kind, mode: Mode, sizes: Sizes
) -> Iterator[Measurement]:
    """Images a second of training steps, the memory, and the hours to the paper's budget."""
    n, name = sizes.batch[restorer.kind], f"{restorer.kind}, {kind}, {mode}"
    side = restorer.resolution if isinstance(restorer, EDM) else 32
    batch = example_batch(n, side).to(DEVICE)
    forget_peak()
    with numbers(kind, graph=mode == "CUDA graph"):
        if mode == "Fit":
            fit = Fit(restorer, PAPER_TRAININGS[restorer.kind], device=DEVICE)
            steps = _calls(lambda: fit.update(batch))
        else:
            net = restorer.build(seed=0).to(DEVICE).train()
            step = training_step(restorer, net, batch, compiled=mode == "torch.compile")
            steps = repeated(step, DEVICE, graphs=mode == "CUDA graph")
        per_step = median_seconds(lambda: steps(sizes.n_steps), sizes.repeats) / sizes.n_steps
    case = f"training, batches of {n}, {name}"
    yield _line(case, n / per_step, "img/s", repeats=sizes.repeats)
    yield from peak(case)
    paper = PAPER_TRAININGS[restorer.kind]
    hours = paper.n_steps * paper.batch_size / (n / per_step) / 3600
    budget = f"hours to {paper.n_steps:,} steps of {paper.batch_size}, projected, {name}"
    yield _line(budget, hours, "h", repeats=sizes.repeats)


def _calls(step: Callable[[], object]) -> Callable[[int], None]:
    def steps(n: int) -> None:
        for _ in range(n):
            step()

    return steps


def training_step(
    restorer: PaperRestorer, net: nn.Module, batch: Examples, *, compiled: bool = False
) -> Callable[[], None]:
    """A training step that a CUDA graph can hold: loss, backward, fused Adam, the average.

    Noise comes from the device's own generator, which graphs know.
    """
    ema = [p.detach().clone() for p in net.parameters()]
    draw = (
        torch.cuda.default_generators[torch.cuda.current_device()]
        if DEVICE.type == "cuda"
        else torch.default_generator
    )
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True, capturable=DEVICE.type == "cuda")
    called: Any = torch.compile(net) if compiled else net

    def step() -> None:
        adam.zero_grad(set_to_none=True)
        restorer.loss(called, batch, generator=draw).backward()
        adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(ema, list(net.parameters()), 0.01)

    return step


def sampling(
    restorer: PaperRestorer, kind: Kind, mode: Mode, sizes: Sizes
) -> Iterator[Measurement]:
    """Images a second of `restore`, one sample of each."""
    n, graph = sizes.n_sampled, mode == "CUDA graph"
    net: Any = lively(restorer).to(DEVICE).eval()
    if mode == "torch.compile":
        net = torch.compile(net)
    elif graph:
        net = Graphed(net)
    side = restorer.resolution if isinstance(restorer, EDM) else 32
    pictures = (example_batch(n, side).condition.to(DEVICE) + 1) / 2
    few = restorer if sizes.n_steps > 2 else few_steps(restorer, 2)
    share = evaluations(restorer) / evaluations(few)

    def restore() -> Tensor:
        return few.restore(net, pictures, n_samples=1, seeds=torch.arange(n), batch_size=n)

    forget_peak()
    with numbers(kind, graph=graph):
        taken = median_seconds(restore, sizes.repeats) * share
    of = f"{evaluations(restorer)} evaluations of the network"
    case = f"sampling, {n} at once, {of}, {restorer.kind}, {kind}, {mode}"
    yield _line(case, n / taken, "img/s", repeats=sizes.repeats)
    yield from peak(case)


def evaluations(restorer: PaperRestorer) -> int:
    """Evaluations of the network for one restoration."""
    return 2 * restorer.n_steps - 1 if isinstance(restorer, EDM) else 1


class Graphed(nn.Module):
    """A network that is evaluated as one CUDA graph, for inputs of one shape."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.inputs: list[Tensor] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        """The network's output; it is overwritten by the next call."""
        if not self.inputs:
            self.inputs = [value.clone() for value in inputs]
            self.output: Tensor = self.net(*self.inputs).clone()
            self.repeat = repeated(self._evaluate, self.output.device)
        for held, value in zip(self.inputs, inputs, strict=True):
            held.copy_(value)
        self.repeat(1)
        return self.output

    def _evaluate(self) -> None:
        self.output.copy_(self.net(*self.inputs))


def forget_peak() -> None:
    """The memory so far does not count."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(case: str) -> Iterator[Measurement]:
    """Peak memory of a CUDA device since `forget_peak`."""
    if DEVICE.type == "cuda":
        gib = torch.cuda.max_memory_allocated() / 2**30
        yield _line(f"GPU memory of {case}", gib, "GiB")


if __name__ == "__main__":
    main(measure)
