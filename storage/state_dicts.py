"""The state dict of one network in what a training script saved, and the weights in it: counters,
indices, masks and averages over steps are left out, each with its reason. Files that hold no plain
network are named, by their first bytes and the names of their tensors, with the next step."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from storage.errors import WeightsError, listed

HOW_TO_SAVE = (
    "save the tensors alone: torch.save(net.state_dict(), 'victim.pt'), or "
    "safetensors.torch.save_file(net.state_dict(), 'victim.safetensors')"
)
HOW_TO_SAVE_GRADIENTS = (
    "save the gradients by their tensors' names: "
    "torch.save({n: p.grad for n, p in net.named_parameters()}, 'gradients.pt')"
)
HOW_TO_SAVE_STATE = "save it as torch.save(optimizer.state_dict(), 'optimizer.pt')"

CONVERT = (
    "make its arrays torch tensors under the layers' names, dense ones as (out, in), and "
    "torch.save(tensors, 'victim.pt')"
)
FORMATS = (
    (b"\x89HDF", "an HDF5 file, as Keras writes", CONVERT),
    (b"\x93NUMPY", "a single numpy array", CONVERT),
    (b"GGUF", "a GGUF file of a language model", "no attack here knows such networks"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it with gunzip"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself: git lfs pull"),
    (b"<", "a page of HTML or XML", "download the file itself, not the page about it"),
)
MEMBERS = (
    (".npy", "an archive of numpy arrays (.npz)", CONVERT),
    (".weights.h5", "a Keras archive", CONVERT),
    (".onnx", "an archive with an ONNX network", HOW_TO_SAVE),
)
SHARD = re.compile(r"-(\d+)-of-(\d+)\.\w+$")
MERGE_SHARDS = (
    "merge the shards: save_file({k: t for p in Path('.').glob('*-of-*.safetensors') for k, t in "
    "load_file(p).items()}, 'victim.safetensors')"
)
ADAPTERS = re.compile(
    r"lora_|\.hada_w\d|\.lokr_w\d|\.oft_[rs]|\.ia3_l|dora_scale|\.base_layer\.|adapter_(up|down)"
)
NORMALISING = ("running_mean", "running_var", "num_batches_tracked")
Sizes = tuple[int, ...]
MOMENTS = re.compile(r"(exp_avg(_sq)?|momentum_buffer|square_avg|acc_delta|exp_inf)$")

STATE_DICT_KEYS = (
    *("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params"),
    *("ema", "model_ema", "state_dict_ema", "ema_state_dict"),
)
"""Where training scripts put the state dict beside an optimiser and an epoch, best first. Averages
over steps come last: they are no point at which a training ended."""

NOT_OF_NETWORKS = ("optim", "sched", "scaler")

DEEPEST = 4

PREFIXES = (
    *("module.", "_module.", "_orig_mod.", "model.", "net.", "network."),
    *("_forward_module.", "_fsdp_wrapped_module.", "ema_model.", "online_model."),
)
"""What wrappers put before every name: data parallel, Opacus, torch.compile, Lightning, EMA."""

COUNTERS = ("num_batches_tracked", "relative_position_index")
"""The only integers that belong to a network: of batch normalisations and of windowed attention."""

KEPT_BESIDE = re.compile(
    r"(^|[._])(n_averaged|initted|num_updates|(global_)?steps?|epoch|decay|update_count)$"
)
"""Single numbers that averages over steps (SWA, EMA) and training scripts keep beside a network."""

AVERAGES = re.compile(r"(^|_)(ema|shadow|averaged?)(_|$)")
"""First part of the names of an average over steps that is saved beside its network."""


WIDENING = 16
"""A state dict has this many times its file's bytes at most: layers may share their weights."""


def refuse_formats(content: bytes, path: Path) -> None:
    """Raises WeightsError for files of other formats, and for one shard of several."""
    if (shard := SHARD.search(path.name)) and int(shard[2]) > 1:
        raise WeightsError(f"{path} is shard {int(shard[1])} of {int(shard[2])}; {MERGE_SHARDS}")
    if content.lstrip()[:1] == b"{":
        if b'"weight_map"' in content[:100_000]:
            raise WeightsError(
                f"{path} is an index of shards, with no tensors in it; {MERGE_SHARDS}"
            )
        raise WeightsError(f"{path} is a JSON file, with no tensors in it; {HOW_TO_SAVE}")
    for start, what, fix in FORMATS:
        if content.startswith(start):
            raise WeightsError(f"{path} is {what}; {fix}")


def refuse_tensors(names: Iterable[str], path: Path) -> None:
    """Raises WeightsError for tensors that are no layers of a network, by their names."""
    for name in names:
        if ADAPTERS.search(name):
            raise WeightsError(
                f"{path} holds LoRA adapters ({name}), which change a network that is not whole "
                "without them; merge them (peft: model.merge_and_unload(), diffusers: "
                "fuse_lora()) and give the merged network"
            )
        if MOMENTS.search(name):
            raise WeightsError(
                f"{path} holds an optimiser's state ({name}), not the network; {HOW_TO_SAVE}"
            )


def state_dict_in(loaded: Any, path: Path) -> tuple[dict[str, Any], list[str]]:
    """The state dict in what was saved, and what is left out beside it."""
    import torch

    if not isinstance(loaded, Mapping):
        what = type(loaded).__name__
        if _is_list_of_tensors(loaded):
            what = f"{what} of {len(loaded)} tensors without names"
        raise WeightsError(f"{path} holds a {what}, no state dict; {HOW_TO_SAVE}")
    if "param_groups" in loaded and "state" in loaded:
        raise WeightsError(
            f"{path} holds the state of an optimiser, not of a network: give it as --optimizer, "
            "and the network's weights as --weights"
        )
    others = {str(k): v for k, v in loaded.items() if not torch.is_tensor(v)}
    own = {str(name): tensor for name, tensor in loaded.items() if torch.is_tensor(tensor)}
    if not others:
        return own, []
    found = _state_dicts(loaded)
    ranks = {key: rank for rank, key in enumerate(STATE_DICT_KEYS)}
    ranked = {keys: ranks.get(keys[0], len(ranks)) for keys in found}
    best = [keys for keys, rank in ranked.items() if rank == min(ranked.values())]
    if len(best) == 1:
        return {str(name): tensor for name, tensor in found[best[0]].items()}, []
    if best:
        named = ", ".join(f"{'.'.join(k)} ({len(found[k])} tensors)" for k in best[:6])
        inner = "".join(f"[{key!r}]" for key in best[0])
        raise WeightsError(
            f"{path} holds {len(best)} dicts of tensors: {named}; save the one that is meant, "
            f"torch.save(torch.load('{path.name}'){inner}, 'victim.pt')"
        )
    plain = all(value is None or isinstance(value, int | float | str) for value in others.values())
    if plain and any(tensor.dim() > 1 for tensor in own.values()):
        return own, [f"{name} (a {type(v).__name__})" for name, v in others.items()]
    if any("_packed_params" in name for name in others):
        raise WeightsError(_quantised(next(iter(others)), path))
    lists = [name for name, value in others.items() if _is_list_of_tensors(value)]
    if lists:
        average = "shadow_params" in lists
        fix = "ema.copy_to(net.parameters()), then " if average else ""
        raise WeightsError(
            f"{path} holds {lists[0]}, a list of tensors without names, no state dict; "
            f"{fix}{HOW_TO_SAVE}"
        )
    types = [f"{name} ({type(value).__name__})" for name, value in others.items()]
    raise WeightsError(
        f"{path} holds {listed(types)}, and no dict of tensors under state_dict, model or "
        f"any other key; {HOW_TO_SAVE}"
    )


def _is_list_of_tensors(value: Any) -> bool:
    import torch

    return isinstance(value, list | tuple) and bool(value) and any(map(torch.is_tensor, value))


def _state_dicts(loaded: Mapping[Any, Any]) -> dict[tuple[str, ...], Mapping[Any, Any]]:
    import torch

    found: dict[tuple[str, ...], Mapping[Any, Any]] = {}
    seen = {id(loaded)}
    left: deque[tuple[tuple[str, ...], Mapping[Any, Any]]] = deque([((), loaded)])
    while left:
        above, outer = left.popleft()
        for key, inner in outer.items():
            if not isinstance(key, str) or key.lower().startswith(NOT_OF_NETWORKS):
                continue
            if not isinstance(inner, Mapping) or not inner or id(inner) in seen:
                continue
            if "param_groups" in inner:
                continue
            seen.add(id(inner))
            if all(torch.is_tensor(value) for value in inner.values()):
                if any(value.dim() > 1 for value in inner.values()):
                    found[*above, key] = inner
            elif len(above) + 1 < DEEPEST:
                left.append(((*above, key), inner))
    return found


def weights_alone(found: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """(the tensors of one network, names without prefixes; what was left out, with reasons)."""
    kept, left_out = {}, []
    for name, tensor in found.items():
        if (why := _no_weight(name, tensor, path)) is None:
            kept[name] = tensor
        else:
            left_out.append(f"{name} ({why})")
    averages = [n for n in kept if AVERAGES.search(n.partition(".")[0]) and "." in n]
    if 0 < len(averages) < len(kept):
        kept = {name: tensor for name, tensor in kept.items() if name not in averages}
        left_out.append(f"{len(averages)} tensors such as {averages[0]} (an average over steps)")
    if not kept:
        raise WeightsError(f"{path} has no weights in it, only {listed(left_out)}; {HOW_TO_SAVE}")
    return without_prefixes(kept), left_out


def _no_weight(name: str, tensor: Any, path: Path) -> str | None:
    """Why a tensor is none of a network's weights; None if it is one. Raises WeightsError for those
    that are weights and cannot be used."""
    import torch

    last = name.rpartition(".")[2]
    if tensor.is_quantized:
        raise WeightsError(_quantised(name, path))
    if last in COUNTERS or tensor.is_complex() or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if tensor.numel() == 1 and KEPT_BESIDE.search(name):
        return "a counter"
    if tensor.is_floating_point():
        return None
    if tensor.numel() == 1:
        return "a single whole number"
    small = tensor.dtype in (torch.int8, torch.uint8) and tensor.dim() > 1
    if small or re.search(r"(^|\.|q|_)(weight|zeros)$", name):
        raise WeightsError(_quantised(name, path))
    return "a mask" if tensor.dtype == torch.bool else "indices"


def _quantised(name: str, path: Path) -> str:
    return (
        f"{name} in {path} is quantised; the attack needs the weights as training left them: save "
        "the network before it is quantised"
    )


def without_prefixes(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors by their names, without what wrappers put before all of these."""
    while tensors:
        prefix = next((p for p in PREFIXES if all(n.startswith(p) for n in tensors)), None)
        if prefix is None:
            break
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def check_sizes(tensors: Mapping[str, Any], n_bytes: int, path: Path) -> None:
    """WeightsError for tensors that are larger than the file of `n_bytes`, or empty."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    if sum(sizes.values()) > WIDENING * n_bytes:
        shape = tuple(tensors[largest].shape)
        raise WeightsError(
            f"{path} has {n_bytes:,} bytes, but its tensors would take {sum(sizes.values()):,}, "
            f"{largest} {shape} most: they repeat few numbers (expand) or are of no device; save "
            "them whole: torch.save({k: v.clone() for k, v in net.state_dict().items()}, "
            "'victim.pt')"
        )
    empty = next((name for name, size in sizes.items() if not size), None)
    if empty is not None:
        raise WeightsError(
            f"{empty} in {path} has no numbers in it, shape {tuple(tensors[empty].shape)}; save "
            "the network without it"
        )
