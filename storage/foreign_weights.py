"""Files that hold no plain network: what they are, by their first bytes and the names of their
tensors, and the next step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from storage.errors import SourceError

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
INPUT_MEAN = re.compile(r"(^|[._])(mean|mu|rgb_mean|img_mean)$")
INPUT_STD = re.compile(r"(^|[._])(std|sigma|stdev)$")
"""Last parts of the names of constants that inputs are normalised by."""
KINDS = (
    (re.compile(r"weight_[ih]h_l\d"), "a recurrent network"),
    (
        re.compile(r"(^|[._])(self_)?attn[._]|attention|in_proj_weight|(^|[._])(qkv|q_proj)[._]"),
        "a network with attention",
    ),
)
TIME = re.compile(
    r"(^|[._])(time|timesteps?|t_?emb(ed)?|t_mlp|noise_level|map_noise)([._]|$)"
    r"|(time|noise|sigma)_?(step|mlp|emb|proj|fc)"
)
EMBEDDING = re.compile(r"emb(ed|edding|eddings|eds)?s?[._]weight|(^|[._])w[tp]e[._]")
CODERS = re.compile(r"(^|[._])(encoder|decoder|enc|dec)[._0-9]", re.IGNORECASE)
Sizes = tuple[int, ...]
MOMENTS = re.compile(r"(exp_avg(_sq)?|momentum_buffer|square_avg|acc_delta|exp_inf)$")


class WeightsError(SourceError):
    """The weights cannot be used as asked: fix the file or the `--weights` argument."""


def foreign_format(content: bytes, path: Path) -> str | None:
    """The message that refuses another format or one shard of several; None for other files."""
    if (shard := SHARD.search(path.name)) and int(shard[2]) > 1:
        return f"{path} is shard {int(shard[1])} of {int(shard[2])}; {MERGE_SHARDS}"
    if content.lstrip()[:1] == b"{":
        if b'"weight_map"' in content[:100_000]:
            return f"{path} is an index of shards, with no tensors in it; {MERGE_SHARDS}"
        return f"{path} is a JSON file, with no tensors in it; {HOW_TO_SAVE}"
    for start, what, fix in FORMATS:
        if content.startswith(start):
            return f"{path} is {what}; {fix}"
    return None


def foreign_archive(members: Iterable[str], path: Path) -> str | None:
    """The message that refuses a zip archive that torch.save did not write."""
    names = list(members)
    for end, what, fix in MEMBERS:
        if any(name.endswith(end) for name in names):
            return f"{path} is {what}; {fix}"
    return None


def foreign_tensors(names: Iterable[str], path: Path) -> str | None:
    """The message that refuses tensors that are no layers of a network, by their names."""
    listed = list(names)
    adapters = [name for name in listed if ADAPTERS.search(name)]
    if adapters:
        return (
            f"{path} holds LoRA adapters ({adapters[0]}), which change a network that is not whole "
            "without them; merge them (peft: model.merge_and_unload(), diffusers: fuse_lora()) and "
            "give the merged network"
        )
    moments = [name for name in listed if MOMENTS.search(name)]
    if moments:
        return f"{path} holds an optimiser's state ({moments[0]}), not the network; {HOW_TO_SAVE}"
    return None


def foreign_layers(shapes: Mapping[str, Sizes], path: Path, elsewhere: str) -> str | None:
    """The message that refuses a network that is no chain of layers, by its tensors' names."""
    for pattern, what in KINDS:
        named = [name for name in shapes if pattern.search(name)]
        if named:
            return f"{path} is {what} ({named[0]}), not a plain multilayer one; {elsewhere}"
    timed = [name for name in shapes if TIME.search(name)]
    if timed:
        return (
            f"{path} takes a time or noise level besides images ({timed[0]}), as diffusion models "
            "do; no attack here knows such networks: give a classifier or an autoencoder"
        )
    return None


def only_named(shapes: Mapping[str, Sizes], pattern: re.Pattern[str]) -> str | None:
    """The only constant of that name which is no layer's own statistic."""
    named = [
        name
        for name in shapes
        if pattern.search(name)
        and name.rpartition(".")[2] not in NORMALISING
        and f"{stem_of(name)}.weight" not in shapes
    ]
    return named[0] if len(named) == 1 else None


def is_row(name: str, size: Sizes) -> bool:
    """True for constants with one axis only, such as (1, 3, 1, 1), that are no layer's weight."""
    return math.prod(size) == max(size) and name.rpartition(".")[2] != "weight"


def stem_of(name: str) -> str:
    """The part that the names of a layer's tensors share: `0.weight` and `0.bias` have `0`."""
    stem, dot, _last = name.rpartition(".")
    return stem if dot else name
