"""Optimisers' states in what a training script saved: the averages of gradients of each parameter.

torch's optimisers save `state`, by the parameters' numbers, and `param_groups`, which list them in
groups; some scripts name the parameters in place of numbers. Adam's and its relatives' `exp_avg`
and SGD's `momentum_buffer` are sums of raw gradients. What other rules keep is scaled weight by
weight (RMSprop, Adafactor) or holds squares alone (Adadelta, Adagrad), and is of no use here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from storage.errors import WeightsError, listed
from storage.state_dicts import DEEPEST, NORMALISING, Sizes, check_sizes, without_prefixes

MOMENTS = ("exp_avg", "momentum_buffer")
SCALED = ("square_avg", "exp_avg_sq_row")
"""Beside these the averages are of gradients that were divided weight by weight."""


@dataclass(frozen=True, eq=False)
class OptimiserState:
    """Averages of gradients, in the order of the optimiser's groups.

    `inside`: the keys that lead to it, "optimizer"; empty where it is the whole file. `kind`:
    "exp_avg" or "momentum_buffer". `moments`: None for a parameter without one. `decays`: whether
    weight decay was part of the gradients. `names` of the parameters, empty if they are numbered.
    """

    path: Path
    inside: str
    kind: str
    moments: tuple[npt.NDArray[Any] | None, ...]
    decays: tuple[bool, ...]
    names: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        return f"{self.kind} in {self.path}{f' ({self.inside})' if self.inside else ''}"

    def numbers(self, shapes: Mapping[str, Sizes]) -> dict[str, int]:
        """The number in `moments` of each of a network's tensors, whose `shapes` are in the order
        of its layers: by names, by this order, or by the order of tensors of one shape, which
        groups keep. Tensors that do not fit are left out."""
        sizes = [None if m is None else m.shape for m in self.moments]
        named = {name: number for number, name in enumerate(self.names)}
        if named.keys() & shapes.keys():
            return {n: named[n] for n in shapes if n in named and sizes[named[n]] == shapes[n]}
        names = [name for name in shapes if name.rpartition(".")[2] not in NORMALISING]
        if len(names) == len(sizes) and all(
            size in (None, shapes[name]) for name, size in zip(names, sizes, strict=True)
        ):
            return {n: i for i, n in enumerate(names) if sizes[i] is not None}
        found: dict[str, int] = {}
        for size in {size for size in sizes if size is not None}:
            alike = [name for name in names if shapes[name] == size]
            numbers = [i for i, other in enumerate(sizes) if other == size]
            if len(alike) == len(numbers):
                found |= dict(zip(alike, numbers, strict=True))
        return found

    def check_fits(self, wanted: Mapping[str, Sizes], shapes: Mapping[str, Sizes]) -> None:
        """WeightsError if a tensor of `wanted` has no number (`numbers`)."""
        numbers = self.numbers(shapes)
        missing = next((name for name in wanted if name not in numbers), None)
        if missing is not None:
            own = listed(
                [f"{self.names[i] if self.names else i} {m.shape}"
                 for i, m in enumerate(self.moments) if m is not None]
            )  # fmt: skip
            raise WeightsError(
                f"{self.said} does not fit the network: none of its parameters, {own}, can be told "
                f"to be {missing} {wanted[missing]}; give the state of the training that made "
                "these weights, or torch.optim(net.named_parameters()), which saves names"
            )


def states_in(loaded: Any, n_bytes: int, path: Path) -> tuple[list[OptimiserState], list[str]]:
    """(the states with averages of gradients in a file of `n_bytes`, the others, each with its
    reason). Raises WeightsError for more numbers than the file has bytes for."""
    import torch

    found, left_out = [], []
    for keys, saved in _saved(loaded, (), {id(loaded)}):
        state, inside = saved["state"], ".".join(keys)
        groups = [g for g in saved["param_groups"] if isinstance(g, Mapping)]
        own = [entry for entry in state.values() if isinstance(entry, Mapping)]
        kept = sorted({str(name) for entry in own for name in entry})
        kind = next((m for m in MOMENTS if m in kept), None)
        if kind is None or any(name in kept for name in SCALED):
            names = [name for name in kept if name != "step"]
            why = f"keeps {listed(names)}" if names else "keeps nothing"
            left_out.append(f"{inside or path.name} ({why}, no average of gradients)")
            continue
        keys_of = [(key, group) for group in groups for key in _list(group.get("params"))]
        keys_of = keys_of or [(key, {}) for key in state]
        entries = [state.get(key) for key, _group in keys_of]
        saved_moments = [e.get(kind) if isinstance(e, Mapping) else None for e in entries]
        tensors = [
            moment
            if torch.is_tensor(moment)
            and moment.is_floating_point()
            and moment.layout == torch.strided
            and not moment.is_meta
            and moment.numel()
            else None
            for moment in saved_moments
        ]
        if all(tensor is None for tensor in tensors):
            left_out.append(f"{inside or path.name} (its {kind} are no dense numbers)")
            continue
        check_sizes(
            {f"{kind} {i}": t for i, t in enumerate(tensors) if t is not None}, n_bytes, path
        )
        names = [str(name) for group in groups for name in _list(group.get("param_names"))]
        if len(names) != len(keys_of):
            names = [key for key, _group in keys_of if isinstance(key, str)]
        names = names if len(set(names)) == len(keys_of) else []
        found.append(
            OptimiserState(
                path,
                inside,
                kind,
                tuple(None if t is None else _array(t) for t in tensors),
                tuple(
                    bool(g.get("weight_decay")) and not g.get("decoupled_weight_decay")
                    for _key, g in keys_of
                ),
                tuple(without_prefixes(dict.fromkeys(names))),
            )
        )
    return found, left_out


def _array(tensor: Any) -> npt.NDArray[Any]:
    import torch

    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    array: npt.NDArray[Any] = wide.detach().contiguous().numpy()
    return array


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _saved(
    outer: Any, above: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Every optimiser's dict in nested dicts and lists, with the keys that lead to it."""
    if isinstance(outer, Mapping):
        if isinstance(outer.get("state"), Mapping) and isinstance(outer.get("param_groups"), list):
            yield above, outer
            return
        inner = list(outer.items())
    else:
        inner = list(enumerate(outer)) if isinstance(outer, list | tuple) else []
    if len(above) < DEEPEST:
        for key, value in inner:
            if isinstance(value, Mapping | list | tuple) and id(value) not in seen:
                seen.add(id(value))
                yield from _saved(value, (*above, str(key)), seen)
