"""Layers that the tensors of a file make: their order, their biases, the architecture's name.

Only shapes and names are looked at: matrices (out, in), convolutions (out, in, k, k), and vectors
that go with one of them. Layers are put in the order of the file or of their names where that makes
a chain, otherwise in the order in which they do make one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from storage.errors import WeightsError, listed
from storage.state_dicts import NORMALISING, Sizes
from storage.weights import WeightFile

Bias = Literal["none", "first", "all"]
UnknownKind = Literal["normalisation", "activation", "other"]

INPUT_MEAN = re.compile(r"(^|[._])(mean|mu|rgb_mean|img_mean)$")
INPUT_STD = re.compile(r"(^|[._])(std|sigma|stdev)$")
"""Last parts of the names of constants that inputs are normalised by."""
AMBIGUOUS = 2
ELSEWHERE = (
    "try its features instead, as a program: palimpsest attack inversion --weights net.pt2 --trust"
)
AUTOENCODER = "palimpsest attack autoencoder --weights"

REFUSED = (
    (
        r"weight_(g|v|orig|mask)$|parametrizations",
        "has weights in parts ({}): weight norm, spectral norm or pruning. What was trained is not "
        "the weights themselves, so the condition that this attack solves does not hold for them; "
        "attack a network that is trained without",
    ),
    (
        r"weight_[ih]h_l\d",
        f"is a recurrent network ({{}}), not a plain multilayer one; {ELSEWHERE}",
    ),
    (
        r"(^|[._])(self_)?attn[._]|attention|in_proj_weight|(^|[._])(qkv|q_proj)[._]",
        f"is a network with attention ({{}}), not a plain multilayer one; {ELSEWHERE}",
    ),
    (
        r"(^|[._])(time|timesteps?|t_?emb(ed)?|t_mlp|noise_level|map_noise)([._]|$)"
        r"|(time|noise|sigma)_?(step|mlp|emb|proj|fc)",
        "takes a time or noise level besides images ({}), as diffusion models do; no attack here "
        "knows such networks: give a classifier or an autoencoder",
    ),
)
"""Patterns of the names of tensors that no plain network has, and why it is refused."""
EMBEDDING = re.compile(r"emb(ed|edding|eddings|eds)?s?[._]weight|(^|[._])w[tp]e[._]")
CODERS = re.compile(r"(^|[._])(encoder|decoder|enc|dec)[._0-9]", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """A layer's tensors by name; `shape` is that of the weight."""

    weight: str
    bias: str | None
    shape: tuple[int, ...]

    @property
    def n_inputs(self) -> int:
        """Inputs of a dense layer; a convolution's are known from the layer that follows."""
        return self.shape[1]

    @property
    def n_outputs(self) -> int:
        return self.shape[0]


@dataclass(frozen=True)
class Unknown:
    """Tensors that are no layer: the name they share, and what they probably are. Of the kind
    "other" each is named with its shape, and with the renaming that would make it a bias."""

    name: str
    kind: UnknownKind


@dataclass(frozen=True)
class Layers:
    """The layers from input to output, and what was found beside them. `architecture` is
    `mlp:3072-1000-1000-1` or `conv:3x32:3072-1000-1`. `shape` (c, h, w) is the given one; without,
    that of a convolution is guessed, as with stride 1 and no padding. `note` says what was guessed.
    """

    layers: tuple[Layer, ...]
    unknown: tuple[Unknown, ...]
    architecture: str
    shape: tuple[int, int, int] | None
    bias: Bias
    note: str

    def in_order(self, tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        names = [name for layer in self.layers for name in (layer.weight, layer.bias) if name]
        return {name: tensors[name] for name in names}


def find_layers(file: WeightFile, shape: tuple[int, int, int] | None = None) -> Layers:
    """The layers in a file of weights; `shape` (c, h, w) of the images, if it is known. Raises
    WeightsError if the tensors make no chain of dense layers with at most one convolution before
    them, are stored transposed, or have biases in some later layers only."""
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    for pattern, why in REFUSED:
        if (named := next((n for n in shapes if re.search(pattern, n)), None)) is not None:
            raise WeightsError(f"{file.path} {why.format(named)}")
    constants = {only_named(shapes, pattern) for pattern in (INPUT_MEAN, INPUT_STD)}
    constant_shapes = {name: shapes.pop(name) for name in constants if name is not None}
    natural = sorted(shapes, key=natural_key)
    names = list(shapes) if file.in_order else natural
    convolutions = [
        name
        for name in names
        if len(shapes[name]) == 4
        # not a constant with one axis only, such as (1, 3, 1, 1)
        and (math.prod(shapes[name]) != max(shapes[name]) or name.endswith("weight"))
    ]
    others = [n for n in names if len(shapes[n]) in (3, 5) and n.endswith("weight")]
    dense = [name for name in names if len(shapes[name]) == 2]
    if len(convolutions) > 1 or others:
        elsewhere = ELSEWHERE
        if any(CODERS.search(name) for name in names):
            elsewhere = f"is it an autoencoder? {AUTOENCODER} {file.path}"
        found = [*convolutions, *others]
        kind = "convolutions" if len(found) > 1 else "convolution in one or three dimensions"
        raise WeightsError(
            f"{file.path} has {len(found)} {kind} ({', '.join(found[:4])}); "
            "this attack knows networks of dense layers with at most one convolution before them; "
            f"{elsewhere}"
        )
    if not dense:
        raise WeightsError(
            f"{file.path} has no dense layer, that is no matrix, among {_listed(shapes)}; expected "
            "the state dict of a network that ends in dense layers"
        )
    ordered, note = _ordered(dense, natural, shapes, file)
    weights = convolutions + ordered
    biases, unknown = _biases(weights, names, shapes)
    layers = tuple(Layer(name, biases.get(name), shapes[name]) for name in weights)
    if len(layers) - len(convolutions) < 2:
        if (shapes[ordered[0]][1],) in [shapes[name] for name in names]:
            raise WeightsError(
                f"{file.path} has one matrix, {ordered[0]} {shapes[ordered[0]]}, and a bias of its "
                "inputs' length: an autoencoder whose decoder is the transposed encoder; save both "
                f"as layers and give them to {AUTOENCODER}"
            )
        raise WeightsError(
            f"{file.path} has a single dense layer, {ordered[0]} {shapes[ordered[0]]}; the attack "
            "needs at least one hidden dense layer: a linear model keeps one direction per output, "
            "not its images; attack one with a hidden layer"
        )
    has_bias = [layer.bias is not None for layer in layers]
    bias: Bias = "all" if all(has_bias) else "first" if has_bias[0] else "none"
    if bias != "all" and any(has_bias[1:]):
        those = ", ".join(layer.weight for layer in layers if layer.bias is not None)
        raise WeightsError(
            f"in {file.path} only {those} have biases; this attack knows networks with biases in "
            "no layer, in the first, or in all; if others are there under another name, rename "
            f"them as {stem_of(layers[0].weight)}.bias, or {ELSEWHERE}"
        )
    architecture, shape, guess = _architecture(layers, shape, file)
    note = " ".join(text for text in (note, guess) if text)
    for name, size in constant_shapes.items():
        if math.prod(size) not in (1, 3, layers[0].n_inputs):
            unknown = (*unknown, Unknown(f"{name} {size}", "other"))
    return Layers(layers, unknown, architecture, shape, bias, note)


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


def stem_of(name: str) -> str:
    """The part that the names of a layer's tensors share: `0.weight` and `0.bias` have `0`."""
    stem, dot, _last = name.rpartition(".")
    return stem if dot else name


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts layer 2 before layer 10, and a layer's weight before its bias."""
    ranked = name.replace("weight", "a").replace("bias", "b")
    parts = re.split(r"(\d+)", ranked)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _ordered(
    dense: Sequence[str],
    natural: Sequence[str],
    shapes: Mapping[str, Sizes],
    file: WeightFile,
) -> tuple[list[str], str]:
    """The dense layers from input to output, and what was guessed."""
    by_name = [name for name in natural if name in dense]
    turned = _turned(dense, shapes)
    if turned is not True:
        for names in (list(dense), by_name):
            if all(shapes[b][1] == shapes[a][0] for a, b in itertools.pairwise(names)):
                _check_widths(names, shapes, file)
                return names, ""
    if turned is not False:
        for names in (list(dense), by_name):
            falls = shapes[names[0]][0] >= shapes[names[-1]][1]
            if falls and all(shapes[b][0] == shapes[a][1] for a, b in itertools.pairwise(names)):
                raise WeightsError(_transposed(names, shapes, file))
    chains: list[tuple[str, ...]] = []
    stack: list[tuple[str, ...]] = [(name,) for name in reversed(by_name)]
    while stack and len(chains) < AMBIGUOUS:
        chain = stack.pop()
        if len(chain) == len(dense):
            chains.append(chain)
        fits = (n for n in reversed(by_name) if shapes[n][1] == shapes[chain[-1]][0])
        stack += [(*chain, name) for name in fits if name not in chain]
    widths = [(shapes[chain[0]][1], shapes[chain[-1]][0]) for chain in chains[:1]]
    if not chains or (turned is False and widths[0][0] < widths[0][1]):
        embedding = next(filter(EMBEDDING.search, dense), None)
        why = f"{embedding} is of an embedding"
        if embedding is None:
            why = "this attack knows no branches or skips"
        raise WeightsError(
            f"the matrices in {file.path} make no chain of dense layers "
            f"({_listed({name: shapes[name] for name in dense}, 4)}): {why}; {ELSEWHERE}"
        )
    chain = chains[0]
    if turned is True:
        raise WeightsError(_transposed(chain[::-1], shapes, file))
    _check_widths(chain, shapes, file, sure=False)
    note = "The names do not tell the order of the layers; it was found from their shapes."
    if len(chains) == AMBIGUOUS:
        note += (
            " Some layers have the same shape and could be exchanged: "
            f"{', '.join(chain)} was taken; if that is wrong, give them numbers in their names."
        )
    return list(chain), note


def _turned(dense: Sequence[str], shapes: Mapping[str, Sizes]) -> bool | None:
    """True if matrices are stored as (in, out), by their names or by the lengths of their biases;
    None if neither tells."""
    if any("kernel" in name.lower() for name in dense):
        return True
    vectors = [name for name in shapes if len(shapes[name]) == 1]
    said = set()
    for weight in dense:
        rows, columns = shapes[weight]
        own = next((v for v in vectors if _belongs(v, weight)), None)
        if own is not None and rows != columns and shapes[own] in ((rows,), (columns,)):
            said.add(shapes[own] == (columns,))
    return said.pop() if len(said) == 1 else None


def _check_widths(
    names: Sequence[str], shapes: Mapping[str, Sizes], file: WeightFile, *, sure: bool = True
) -> None:
    """Raises WeightsError for a chain that gives more numbers than it takes."""
    n_inputs, n_outputs = shapes[names[0]][1], shapes[names[-1]][0]
    if n_inputs >= n_outputs:
        return
    other = (
        ""
        if sure
        else "; or, if its matrices are stored as (in, out), as Keras and JAX do, transpose each "
        "(w.T.contiguous())"
    )
    raise WeightsError(
        f"{file.path} takes {n_inputs} numbers and gives {n_outputs}: a generator or decoder, "
        f"which takes no images in; give a network that does{other}"
    )


def _transposed(names: Sequence[str], shapes: Mapping[str, Sizes], file: WeightFile) -> str:
    first = names[0]
    return (
        f"the matrices in {file.path} are stored as (in, out), as Keras and JAX do: {first} is "
        f"{shapes[first]}; torch and this attack have (out, in): transpose every matrix "
        "(w.T.contiguous()) and save again"
    )


def _biases(
    weights: Sequence[str], names: Sequence[str], shapes: Mapping[str, Sizes]
) -> tuple[dict[str, str], tuple[Unknown, ...]]:
    left = [name for name in names if name not in weights]
    vectors = [name for name in left if len(shapes[name]) == 1]
    biases: dict[str, str] = {}
    for weight in weights:
        match = next((v for v in vectors if _belongs(v, weight)), None)
        if match is not None and shapes[match] == (shapes[weight][0],):
            biases[weight] = match
            vectors.remove(match)
    left = [name for name in left if name not in biases.values()]
    fits = [shapes[v] for v in vectors] == [(shapes[w][0],) for w in weights]
    if fits and not biases and all(_kind(v, left, shapes) == "other" for v in vectors):
        # One vector per layer, of the right lengths in the right order, however it is called.
        biases = dict(zip(weights, vectors, strict=True))
        left = [name for name in left if name not in vectors]
    kinds: dict[str, UnknownKind] = {}
    for name in left:
        kind = _kind(name, left, shapes)
        shown = stem_of(name)
        if kind == "other":
            open_weights = [w for w in weights if w not in biases]
            fitting = [w for w in open_weights if shapes[name] == (shapes[w][0],)]
            near = [w for w in fitting if stem_of(w) == stem_of(name)] or fitting
            shown = f"{name} {shapes[name]}"
            if len(near) == 1:
                shown += f" (if it is the bias of {near[0]}, rename it to {stem_of(near[0])}.bias)"
        kinds.setdefault(shown, kind)
    return biases, tuple(Unknown(stem, kind) for stem, kind in kinds.items())


def _belongs(vector: str, weight: str) -> bool:
    """`fc1.bias` to `fc1.weight`, `b1` to `W1`, `fc1_bias` to `fc1_weight`, `bias` to `weight`."""
    if "." in weight or "." in vector:
        return stem_of(vector) == stem_of(weight) and vector.rpartition(".")[2] in ("bias", "b")
    plain = [re.sub(r"weights?|bias(es)?|kernel|^w|^b", "", n.lower()) for n in (vector, weight)]
    return plain[0] == plain[1]


def _kind(name: str, left: Sequence[str], shapes: Mapping[str, Sizes]) -> UnknownKind:
    stem = stem_of(name)
    siblings = [other for other in left if stem_of(other) == stem]
    if any(other.rpartition(".")[2] in NORMALISING for other in siblings):
        return "normalisation"
    if any(other.rpartition(".")[2] == "weight" for other in siblings) and len(shapes[name]) == 1:
        single = len(siblings) == 1 and shapes[name] == (1,)
        return "activation" if single else "normalisation"
    return "other"


def _architecture(
    layers: Sequence[Layer], shape: tuple[int, int, int] | None, file: WeightFile
) -> tuple[str, tuple[int, int, int] | None, str]:
    """(the architecture's name, the images' shape if it is known, what was guessed)."""
    dense = [layer for layer in layers if len(layer.shape) == 2]
    sizes = [dense[0].n_inputs, *(layer.n_outputs for layer in dense)]
    if dense[0] is layers[0]:
        if shape is not None and math.prod(shape) != sizes[0]:
            raise WeightsError(
                f"the first layer of {file.path} takes {sizes[0]} numbers, but images of "
                f"{'x'.join(map(str, shape))} have {math.prod(shape)}; correct --shape"
            )
        return "mlp:" + "-".join(map(str, sizes)), shape, ""
    n_channels, n_colours, kernel, kernel_wide = layers[0].shape
    n_positions, rest = divmod(sizes[0], n_channels)
    side = math.isqrt(n_positions)
    where = f"{layers[0].weight} {layers[0].shape} in {file.path}"
    if kernel != kernel_wide:
        raise WeightsError(f"{where} has no square kernel, which this attack needs; {ELSEWHERE}")
    guess = ""
    if shape is None and side**2 == n_positions and not rest:
        shape = (n_colours, side + kernel - 1, side + kernel - 1)
        guess = (
            f"Images of {shape[1]}x{shape[2]} are a guess, as if {layers[0].weight} had stride 1 "
            f"and no padding; if they are of {side}x{side} it has padding, which this attack does "
            "not know, and if larger, a stride or pooling. Give --shape."
        )
    expected = [] if shape is None else [edge - kernel + 1 for edge in shape[1:]]
    fits = shape is not None and shape[0] == n_colours and min(expected) > 0
    if shape is None or not fits or math.prod(expected) != n_positions or rest:
        images = "" if shape is None else f" on images of {'x'.join(map(str, shape))}"
        if shape is not None and math.prod(shape[1:]) == n_positions and not rest:
            raise WeightsError(
                f"{where}{images} has padding, by the {n_positions} places of its outputs; this "
                f"attack knows convolutions without padding only; {ELSEWHERE}"
            )
        raise WeightsError(
            f"{where}{images} is followed by a layer of {sizes[0]} inputs, which no convolution "
            "with stride 1, without padding and without pooling gives; give --shape if the images "
            f"are no squares, or {ELSEWHERE}"
        )
    text = f"conv:{kernel}x{n_channels}:" + "-".join(map(str, [math.prod(shape), *sizes[1:]]))
    return text, shape, guess


def _listed(shapes: Mapping[str, Sizes], limit: int = 6) -> str:
    return listed([f"{name} {shape}" for name, shape in shapes.items()], limit)
