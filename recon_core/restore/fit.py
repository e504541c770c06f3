"""One training loop for every restorer: Adam, a learning-rate schedule and weights averaged by EMA.

The averaged weights are the ones that restore (Karras et al. 2022, appendix F.3). Everything random
in step k is drawn from (seed, k) alone, so that a fit that is stopped and loaded again continues
bit for bit. In `accumulate` micro-batches or a process per device (`Ranks`) the gradient is that of
one large batch up to rounding, but for dropout masks and BF-DnCNN's batch statistics. Departure
from EDM's code: a loss that is not finite stops the training with an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from recon_core.precision import NetworkPrecision, float32_arithmetic, require_precision
from recon_core.restore.examples import Examples
from recon_core.strict import Count, Natural, NonNegative, Positive, Strict
from recon_core.types import seeded_generator


@runtime_checkable
class LossAndNetwork(Protocol):
    """Protocol of a restorer that can be trained. With `total`, `batch` is examples `first` and on
    of a batch of that many, and the loss is their share of the whole batch's."""

    def build(self, *, seed: int) -> nn.Module: ...

    def loss(
        self,
        net: nn.Module,
        batch: Examples,
        *,
        generator: torch.Generator,
        first: int = 0,
        total: int | None = None,
    ) -> Tensor: ...


class Ranks:
    """The processes that train one network together, each on its share of every batch; here this
    process alone. Subclasses join several."""

    rank: int = 0
    size: int = 1

    def wrap(self, net: nn.Module) -> nn.Module:
        """`net` so that a backward pass through it leaves the mean of all ranks' gradients."""
        return net

    def place(self, n: int) -> tuple[int, int]:
        """Start of this rank's `n` examples in the whole batch, and the size of that batch."""
        return 0, n

    def sum(self, value: float) -> float:
        """The sum of all ranks' values."""
        return value

    def unsynchronised(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward passes only add up this rank's gradients."""
        del wrapped
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order; of all ranks together, so also a place to wait."""
        return [value]

    def agree(self, flag: bool) -> bool:
        """Rank 0's flag."""
        return flag

    def close(self) -> None:
        """Called at the end, by all ranks."""


class NonfiniteLossError(ArithmeticError):
    """The loss, or the weights after it (`what`), became NaN or infinite in `step`, from 0."""

    def __init__(self, step: int, loss: float, lr: float, *, what: str = "") -> None:
        super().__init__(
            f"{what or f'loss={loss}'} in step {step} with learning rate {lr:.3g}; use a lower lr "
            "or a longer warmup_images, or look for non-finite values in the examples"
        )
        self.step = step

    def with_note(self, note: str) -> NonfiniteLossError:
        self.args = (f"{self}{note}",)
        return self


@dataclass(frozen=True, kw_only=True)
class Training(Strict):
    """Settings of a restorer's training. The defaults are EDM's for CIFAR-10, which the image
    restoration paper used but for a batch of 513 examples and double precision (section 3).

    The learning rate rises linearly over the first `warmup_images`; then `decay` "none" keeps it,
    "halving" halves it after `halve_first_step` steps and every `halve_every_steps` from there on
    (paper, section 4), "cosine" lets it fall to zero at `n_steps`. The EMA forgets half in
    `ema_halflife_images` images, less in the beginning: at most `ema_ramp` times the images seen so
    far. A step goes through its `batch_size` examples in `accumulate` micro-batches. `precision`:
    see `recon_core.precision`. `mirror` flips every example left to right with probability 1/2,
    reconstruction and original alike: ours, for few pairs.
    """

    n_steps: Count = 400_000
    batch_size: Count = 512
    lr: Positive = 1e-3
    warmup_images: Natural = 10_000_000
    decay: Literal["none", "halving", "cosine"] = "none"
    halve_first_step: Count = 25_000
    halve_every_steps: Count = 5_000
    ema_halflife_images: Natural = 500_000
    ema_ramp: NonNegative = 0.05
    seed: int = 0
    precision: NetworkPrecision = "float32"
    accumulate: Count = 1
    mirror: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate={self.accumulate} is more than batch_size={self.batch_size}; a "
                "micro-batch has at least one example"
            )

    def learning_rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ..., n_steps - 1."""
        warm = 1.0
        if self.warmup_images > 0:
            warm = min(1.0, (step + 1) * self.batch_size / self.warmup_images)
        if self.decay == "halving" and step >= self.halve_first_step:
            n_halvings = 1 + (step - self.halve_first_step) // self.halve_every_steps
            return self.lr * warm * 0.5**n_halvings
        if self.decay == "cosine":
            return self.lr * warm * (1 + math.cos(math.pi * step / self.n_steps)) / 2
        return self.lr * warm

    def ema_beta(self, step: int) -> float:
        """Share of the average that survives step 0, 1, ...: .5^(batch_size / halflife)."""
        n_images = step * self.batch_size
        halflife = min(self.ema_halflife_images, self.ema_ramp * n_images)
        return 0.5 ** (self.batch_size / halflife) if halflife > 0 else 0.0


class InBF16(nn.Module):
    """`net` under bfloat16 autocast, its answer in float32."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            answer: Tensor = self.net(x, *others)
        return answer.float()


class Fit:
    """A training in progress: `net` is being trained, `ema` is its average, `step` comes next."""

    def __init__(
        self,
        restorer: LossAndNetwork,
        training: Training,
        *,
        device: torch.device | str,
        ranks: Ranks | None = None,
    ) -> None:
        """Raises ValueError if `device` has no arithmetic of `training.precision`."""
        self.restorer = restorer
        self.training = training
        self.device = torch.device(device)
        self.ranks = ranks or Ranks()
        require_precision(training.precision, self.device)
        self.step = 0
        self.net = restorer.build(seed=training.seed).to(self.device)
        self.ema = restorer.build(seed=training.seed).to(self.device).requires_grad_(False)
        self._wrapped = self.ranks.wrap(self.net)
        self._called = InBF16(self._wrapped) if training.precision == "bf16" else self._wrapped
        self.optimiser = torch.optim.Adam(
            self.net.parameters(), lr=training.lr, betas=(0.9, 0.999), eps=1e-8, fused=True
        )

    @property
    def done(self) -> bool:
        return self.step >= self.training.n_steps

    @property
    def finite(self) -> bool:
        return all(bool(weights.isfinite().all()) for weights in self.net.parameters())

    def update(self, batch: Examples) -> float:
        """Takes one step on the batch (with `ranks`: on those of all) and returns its loss.

        Raises NonfiniteLossError before any weight is changed if the loss is not finite.
        """
        lr = self.training.learning_rate(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self._called.train()
        dropout = self._seed(f"dropout {self.ranks.rank}" if self.ranks.rank else "dropout")
        with (
            float32_arithmetic(self.training.precision, self.device),
            _global_seed(dropout, self.device),
        ):
            self.optimiser.zero_grad(set_to_none=True)
            value = self._gradient(batch.to(self.device), lr)
        self.optimiser.step()
        self._average(self.training.ema_beta(self.step))
        self.step += 1
        return value

    def _gradient(self, batch: Examples, lr: float) -> float:
        """Leaves the gradient of the whole batch's loss in the weights; returns that loss."""
        before, total = self.ranks.place(len(batch))
        n_parts = min(self.training.accumulate, len(batch))
        ends = [len(batch) * part // n_parts for part in range(n_parts + 1)]
        shares = {} if total == len(batch) and n_parts == 1 else {"total": total}
        value = 0.0
        for start, end in itertools.pairwise(ends):
            generator = torch.Generator(self.device).manual_seed(self._seed("noise"))
            shares |= {"first": before + start} if shares else {}
            last = end == len(batch)
            with nullcontext() if last else self.ranks.unsynchronised(self._wrapped):
                rows = batch.rows(start, end)
                if self.training.mirror:
                    draw = torch.Generator().manual_seed(self._seed("mirror"))
                    flip = torch.rand(total, generator=draw)[before + start : before + end] < 0.5
                    rows = rows.mirrored(flip.to(self.device))
                loss = self.restorer.loss(self._called, rows, generator=generator, **shares)
                value += loss.item()
                if last:  # all ranks stop, or none
                    value = self.ranks.sum(value)
                if last and not math.isfinite(value):
                    raise NonfiniteLossError(self.step, value, lr)
                (loss * self.ranks.size if self.ranks.size > 1 else loss).backward()
        return value

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that `load_state_dict` needs to continue bit for bit, as flat tensors."""
        state = {"step": torch.tensor(self.step)}
        state |= {f"net.{name}": value for name, value in self.net.state_dict().items()}
        state |= {f"ema.{name}": value for name, value in self.ema.state_dict().items()}
        for index, moments in self.optimiser.state_dict()["state"].items():
            state |= {f"adam.{index}.{name}": value for name, value in moments.items()}
        return {
            name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues where `state_dict` was taken, of the same restorer and training.

        Raises ValueError or RuntimeError if the state is of another network.
        """
        if "step" not in state:
            raise ValueError(f"this is no training state: it has no step, but {sorted(state)[:5]}")
        self.net.load_state_dict(_below("net.", state))
        self.ema.load_state_dict(_below("ema.", state))
        parameters = list(self.net.parameters())
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _below("adam.", state).items():
            index, _, key = name.partition(".")
            # The fused Adam walks through memory: moments must lie as their parameters do.
            like = value if value.ndim == 0 else parameters[int(index)]
            held = torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)
            moments.setdefault(int(index), {})[key] = held
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})
        self.step = int(state["step"])

    def _seed(self, purpose: str) -> int:
        return seeded_generator(self.training.seed, self.step, f"fit {purpose}").initial_seed()

    @torch.no_grad()
    def _average(self, beta: float) -> None:
        """ema <- beta ema + (1 - beta) net, for weights and running statistics alike."""
        averages = [*self.ema.parameters(), *self.ema.buffers()]
        values = [*self.net.parameters(), *self.net.buffers()]
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, 1 - beta)


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


@contextmanager
def _global_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's global generator of `device` for a while: dropout has no other.

    The states of before are put back at the end, so nothing leaks out.
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
