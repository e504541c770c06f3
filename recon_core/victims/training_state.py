"""A training that was interrupted: what has to be kept for it to go on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor


@dataclass(frozen=True)
class TrainingState:
    """Everything that the rest of a training depends on, after `epoch` epochs.

    `values` are of all R victims: what is trained, in the order of `Parameters.tensors`, or in the
    span of the images its coordinates, to which `span_start` (W_0) belongs. `averages`, the
    optimiser's state of each, are of the `running` victims only. `generators` are the states of the
    victims' generators, (R, 0) without minibatches.
    """

    epoch: int
    running: Int64[Tensor, " k"]
    values: tuple[Tensor, ...]
    averages: tuple[tuple[Tensor, ...], ...]
    loss: Float[Tensor, " r"]
    margins: Float[Tensor, "r n"]
    epochs_done: Int64[Tensor, " r"]
    diverged: Bool[Tensor, " r"]
    generators: UInt8[Tensor, "r b"]
    span_start: Float[Tensor, "r h d"] | None

    def check_fits(self, start: Sequence[Tensor], y: Shaped[Tensor, "r n"], shuffled: bool) -> None:
        """ValueError if a training with such values, labels and minibatches cannot have left it."""
        expected = [tuple(value.shape) for value in start]
        found = [tuple(value.shape) for value in self.values]
        if expected != found or self.margins.shape != y.shape:
            raise ValueError(
                f"the state has values {found} for images {tuple(self.margins.shape)}, this "
                f"training {expected} for {tuple(y.shape)}; resume with the settings it was saved "
                "with"
            )
        if shuffled != (self.generators.shape[1] > 0):
            raise ValueError(
                "the state is of a training with"
                + ("out minibatches, this one has" if shuffled else " minibatches, this one has no")
                + " minibatches; resume with the batch_size it was saved with"
            )

    def restored_generators(self) -> list[torch.Generator]:
        """One per victim, where they were; none without minibatches."""
        if not self.generators.shape[1]:
            return []
        generators = [torch.Generator() for _ in self.generators]
        for generator, saved in zip(generators, self.generators, strict=True):
            generator.set_state(saved.clone())  # torch crashes on a row that is not aligned
        return generators

    def tensors(self) -> dict[str, Tensor]:
        """As named tensors on the CPU, which safetensors can hold."""
        named = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        named["epoch"] = torch.tensor(self.epoch)
        for i, (value, averages) in enumerate(zip(self.values, self.averages, strict=True)):
            named[f"values.{i}"] = value
            named |= {f"averages.{i}.{j}": average for j, average in enumerate(averages)}
        return {name: value.cpu().clone() for name, value in named.items()}

    @classmethod
    def from_tensors(cls, named: Mapping[str, Tensor], device: torch.device) -> TrainingState:
        """The inverse of `tensors`, on a device; ValueError if a tensor is missing."""
        plain = set(cls.__dataclass_fields__) - {"values", "averages", "epoch", "span_start"}
        missing = sorted((plain | {"epoch", "values.0"}) - set(named))
        if missing:
            raise ValueError(f"not the state of a training: {', '.join(missing)} missing")
        moved = {name: value.to(device) for name, value in named.items()}
        n_values = sum(name.startswith("values.") for name in named)
        n_averages = sum(name.startswith("averages.0.") for name in named)
        return cls(
            **{name: moved[name] for name in plain - {"generators"}},
            epoch=int(named["epoch"]),
            values=tuple(moved[f"values.{i}"] for i in range(n_values)),
            averages=tuple(
                tuple(moved[f"averages.{i}.{j}"] for j in range(n_averages))
                for i in range(n_values)
            ),
            generators=named["generators"].cpu(),
            span_start=moved.get("span_start"),
        )
