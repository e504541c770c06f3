"""Places at which a network can be cut, and images it takes: found by asking it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from storage.weights import WeightsError
from tasks.attack_file.pictures import Shape, side_of
from tasks.families.inversion.networks import OUTPUT, Network

MIN_SIDE = 11
"""SSIM's window."""
MAX_SIDE = 2048
DEFAULT_SIDE = 32
N_NAMED = 20
"""Modules that an error names."""


def check_size(size: int) -> None:
    """ValueError for images that are too small to be scored, or too large to be inverted."""
    if size < MIN_SIDE:
        raise ValueError(
            f"images of {size}x{size} are smaller than the {MIN_SIDE}x{MIN_SIDE} window of SSIM, "
            f"by which they are scored; give --size {MIN_SIDE} or more, if the network takes it"
        )
    if size > MAX_SIDE:
        raise ValueError(
            f"images of {size}x{size} are larger than {MAX_SIDE}x{MAX_SIDE}; give --size as the "
            "network was trained with"
        )


def image_shape(network: Network, size: int | None, data: str | None) -> Shape:
    """Shape of the images: as the file has it, as `--size` says, or as the pictures are.

    Raises ValueError if the file's shape is another than --size, no square or too small.
    """
    if network.shape is not None:
        _channels, height, width = network.shape
        if size not in (None, height) or height != width:
            wanted = "a square" if size is None else f"--size {size}"
            raise ValueError(
                f"{network.path} takes images of {height}x{width}, not {wanted}; leave out --size, "
                "and give a network of square images"
            )
        check_size(height)
        return network.shape
    side = size or (None if data is None else side_of(data)) or DEFAULT_SIDE
    check_size(side)
    return network.channels or 3, side, side


def modules_of(network: Network, shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Every place where the network can be cut, with the shape of one image's features there, in
    the order in which they are computed."""
    module = network.on(shape, "cpu")
    rows = network.batch or 2
    with outputs_of(module, network.parts(module), rows) as found:
        output = _applied(network, module, torch.full((rows, *shape), 0.5))
    shapes = {name: tuple(maps.shape[1:]) for name, maps in found.items()}
    return [*shapes.items(), (OUTPUT, tuple(output.shape[1:]))]


@contextmanager
def outputs_of(module: nn.Module, names: Iterable[str], n_rows: int) -> Iterator[dict[str, Tensor]]:
    """Outputs of the modules that give a tensor with a row per image, as soon as `module` is
    applied to `n_rows` of them; in the order in which they are computed."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.dim() >= 2 and len(output) == n_rows:
                found.setdefault(name, output.clone())  # what follows may work in place

        return hook

    hooks = [module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def _applied(network: Network, module: nn.Module, x: Tensor) -> Tensor:
    """WeightsError if the network does not take such images."""
    try:
        with torch.no_grad():
            output = module(x)
    except Exception as error:  # a network may fail in any way
        raise WeightsError(
            f"{network.path} fails on images of {'x'.join(map(str, x.shape[1:]))} "
            f"({type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}); "
            "give --size as it was trained with"
        ) from error
    if not isinstance(output, Tensor) or output.dim() < 2 or len(output) != len(x):
        raise WeightsError(
            f"{network.path} gives no tensor with a row per image; save a network that does"
        )
    return output


def probed(network: Network, shape: Shape) -> Shape:
    """The channels that a program takes, found by trying; as it was if neither works."""
    for channels in (3, 1):
        tried = (channels, *shape[1:])
        try:
            _applied(network, network.on(tried, "cpu"), torch.full((2, *tried), 0.5))
        except WeightsError:
            continue
        return tried
    return shape


def chosen_cut(name: str | None, network: Network, shape: Shape) -> str:
    """The cut, if there is one of that name."""
    known = dict(modules_of(network, shape))
    if name in known:
        return str(name)
    short = sorted(known, key=lambda n: (n.count("."), list(known).index(n)))[:N_NAMED]
    listed = ", ".join(f"{n} ({'x'.join(map(str, known[n]))})" for n in known if n in short)
    what = "give --cut" if name is None else f"there is no cut {name!r}; give --cut"
    more = "" if len(short) == len(known) else f"; all {len(known)}: --cut list"
    inside = "" if network.cut_inside else " (TorchScript runs its modules out of reach)"
    raise ValueError(f"{what} one of: {listed}{more}{inside}")
