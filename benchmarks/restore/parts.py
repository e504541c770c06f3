"""Worth on a CPU of each thing that our restorers do differently, one line each.

Both sides of a line are the same in everything else: channels last against channels first, fused
attention against a softmax of products, the bias-free normalisation as one factor against the
published four passes, fused Adam against torch's loop, the average in place against new tensors,
bfloat16 autocast (`precision="bf16"`) against float32, which pays where the processor has it, and
torch.compile, which we do not use, against what we do.
"""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.record import Measurement, compared
from benchmarks.restore.reference import ReferenceAttention, ReferenceNorm
from recon_core.restore import PaperRestorer
from recon_core.restore.edm import EDM
from recon_core.restore.fit import InBF16
from recon_core.restore.regression import BFDnCNN, BiasFreeBatchNorm
from recon_core.restore.unet import UNET_SIZES, SelfAttention
from recon_core.types import N_AUGMENT

LAST, FIRST = torch.channels_last, torch.contiguous_format
Step = Callable[[], object]


def parts(
    restorer: PaperRestorer, n: int, repeats: int, *, compiled: bool = True
) -> Iterator[Measurement]:
    """Seconds of each part for a batch of n images, ours and otherwise."""
    for what, ours, reference, theirs in _both_sides(restorer, n, compiled=compiled):
        yield compared(
            "restore",
            f"{what}, {restorer.kind}, {n} images, threads: {torch.get_num_threads()}",
            ours=ours,
            reference=reference,
            theirs=theirs,
            repeats=repeats,
        )


def _both_sides(
    restorer: PaperRestorer, n: int, *, compiled: bool
) -> Iterator[tuple[str, Step, str, Step]]:
    net = restorer.build(seed=0)
    inputs = network_inputs(restorer, n)
    first = copy.deepcopy(net).to(memory_format=FIRST)  # type: ignore[call-overload]
    for training, what in ((True, "forward and backward"), (False, "forward, evaluating")):
        yield (
            f"channels last, {what}",
            passes(net, inputs, LAST, training=training),
            "channels first",
            passes(first, inputs, FIRST, training=training),
        )
    yield (
        "bfloat16 autocast, forward and backward",
        passes(InBF16(copy.deepcopy(net)), inputs, LAST, training=True),
        "float32",
        passes(net, inputs, LAST, training=True),
    )
    reason = why_not_compiled() if compiled else "it takes minutes"
    if reason is None:
        faster = torch.compile(copy.deepcopy(net))
        yield (
            "torch.compile, forward and backward",
            passes(faster, inputs, LAST, training=True),
            "what we do: eager, channels last",
            passes(net, inputs, LAST, training=True),
        )
    else:
        print(f"torch.compile is left out: {reason}", file=sys.stderr)
    if isinstance(restorer, EDM):
        yield _attention(restorer, n)
    else:
        yield _normalisation(restorer, n)
    plain = copy.deepcopy(net)
    adam = torch.optim.Adam
    yield (
        "fused Adam, one step",
        adam_step(net, adam(net.parameters(), fused=True)),
        "torch's loop over the parameters",
        adam_step(plain, adam(plain.parameters(), foreach=False, fused=False)),
    )
    yield (
        "average of the weights, in place",
        average_in_place(net, copy.deepcopy(net)),
        "beta ema + (1 - beta) net, copied",
        average_by_the_book(net, copy.deepcopy(net)),
    )


def _attention(restorer: EDM, n: int) -> tuple[str, Step, str, Step]:
    size = UNET_SIZES[restorer.size]
    side = size.attention_at[0] if size.attention_at else 4
    width = size.n_channels * size.channel_mult[-1]
    ours, theirs = SelfAttention(width), ReferenceAttention(width)
    theirs.load_state_dict(ours.state_dict())
    ours.to(memory_format=LAST)  # type: ignore[call-overload]
    x = torch.randn(n, width, side, side)
    return (
        f"fused attention of {side}x{side} positions, channels last, forward and backward",
        passes(ours, (x,), LAST, training=True),
        "softmax of products, channels first",
        passes(theirs, (x,), FIRST, training=True),
    )


def _normalisation(restorer: BFDnCNN, n: int) -> tuple[str, Step, str, Step]:
    width, side = restorer.n_channels, 32 // restorer.patch
    ours, theirs = BiasFreeBatchNorm(width), ReferenceNorm(width)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(n, width, side, side)
    return (
        "bias-free normalisation as one factor, channels last, forward and backward",
        passes(ours, (x,), LAST, training=True),
        "variance of a transposed copy, division, product; channels first",
        passes(theirs, (x,), FIRST, training=True),
    )


def network_inputs(restorer: PaperRestorer, n: int) -> tuple[Tensor, ...]:
    """Inputs of the network, n times."""
    if isinstance(restorer, EDM):
        side = restorer.resolution
        return torch.randn(n, 6, side, side), torch.zeros(n), torch.zeros(n, N_AUGMENT)
    return (torch.randn(n, 3, 32, 32),)


def passes(
    net: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    memory_format: torch.memory_format,
    *,
    training: bool,
) -> Step:
    """A forward pass, and in training a backward pass down to the inputs, in one format."""
    x = inputs[0].contiguous(memory_format=memory_format)

    def step() -> None:
        if isinstance(net, nn.Module):
            net.train(training)
        if not training:
            with torch.inference_mode():
                net(x, *inputs[1:])
            return
        net(x.requires_grad_(), *inputs[1:]).square().sum().backward()

    return step


def adam_step(net: nn.Module, optimiser: torch.optim.Optimizer) -> Step:
    """One step of Adam with made up gradients."""
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return optimiser.step


def average_in_place(net: nn.Module, ema: nn.Module) -> Step:
    """As `Fit` averages."""

    @torch.no_grad()
    def step() -> None:
        for average, value in zip(ema.parameters(), net.parameters(), strict=True):
            average.lerp_(value, 0.01)

    return step


def average_by_the_book(net: nn.Module, ema: nn.Module) -> Step:
    """As the reference averages."""

    @torch.no_grad()
    def step() -> None:
        for average, value in zip(ema.parameters(), net.parameters(), strict=True):
            average.copy_(0.99 * average + 0.01 * value)

    return step


def why_not_compiled() -> str | None:
    """None if torch.compile can work here."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "there is no C++ compiler; install g++"
    if not hasattr(torch, "compile"):
        return "this torch has none"
    return None
