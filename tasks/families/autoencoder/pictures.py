"""The images of an attack on an autoencoder: read, degraded, and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.degradation import check_degraded, degrade, mask_from_picture, mask_pattern
from recon_core.types import seeded_generator
from storage.errors import SourceError, shown
from storage.sources.load import HELDOUT_FOLDERS, load_images
from storage.sources.picture_files import Reading, facts_of, read_picture_files
from storage.sources.pictures import CorruptPictureError, is_picture, read_picture_as_it_is
from tasks.families.autoencoder.inputs import NO_CONTROL, AutoencoderJob, Split
from tasks.families.autoencoder.networks import Shape
from tasks.families.weights.inputs import LUMA

SIDES = {
    **{"cifar10": 32, "cifar100": 32, "svhn": 32, "tiny-imagenet": 64},
    **{"mnist": 28, "fashion-mnist": 28, "digits": 8},
}
"""Of the pictures of a source, as they are published."""


@dataclass(frozen=True, eq=False)
class Named:
    """Images in [0, 1] of a victim's shape, and what each is called; `labels` index `class_names`
    and are None of a folder without class folders."""

    source: str
    images: Float[Tensor, "n c h w"]
    names: tuple[str, ...]
    labels: tuple[int, ...] | None = None
    class_names: tuple[str, ...] = ()
    reading: Reading | None = None

    @property
    def facts(self) -> dict[str, str]:
        """What was read, for people."""
        return facts_of(len(self), self.class_names, self.reading)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, eq=False)
class Case:
    """Degraded images of one kind: what the attack is given.

    `side` is "train" or "control". `mask`: the truth, True where a pixel was kept, or None.
    `original`: None where it is not known.
    """

    mask_name: str
    side: str
    names: tuple[str, ...]
    y: Float[Tensor, "n c h w"]
    mask: Bool[Tensor, "n c h w"] | None
    original: Float[Tensor, "n c h w"] | None


@dataclass(frozen=True, eq=False)
class Material:
    """All pictures of a job; `train` and `control` are None where they are not known."""

    train: Named | None
    control: Named | None
    cases: tuple[Case, ...]


def shape_hint(job: AutoencoderJob) -> Shape | None:
    """The shape of the job's images, as far as the pictures themselves say it."""
    if job.degraded is not None:
        files = _files(job.degraded, "--degraded")
        height, width = _first_size(files)
        return 3, height, width
    kind, _colon, path = (job.data or "").partition(":")
    if kind == "folder":
        height, width = _first_size(_files(Path(path).expanduser(), "--data"))
        return (3, height, width) if height == width else None
    return (3, SIDES[kind], SIDES[kind]) if kind in SIDES else None


def picture_size(folder: Path) -> tuple[int, int]:
    """(height, width) of a folder's first picture that can be read; SourceError without one."""
    return _first_size(_files(folder, "the source"))


def read_material(job: AutoencoderJob, shape: Shape) -> Material:
    """Everything that is attacked, and what is known beside it.

    Raises SourceError for pictures that are not there, cannot be read or do not fit, ValueError for
    settings that do not fit together.
    """
    if job.degraded is not None:
        return _degraded_material(job, shape, job.degraded)
    assert job.data is not None
    split = job.split or _default_split(job.data)
    train = _read(job, job.data, split, shape)
    control = _control(job, split, shape)
    _check_disjoint(train, control)
    sides = [("train", train), *([] if control is None else [("control", control)])]
    masks = _masks(job, shape)
    cases = [
        _case(job, name, side, named, mask) for name, mask in masks.items() for side, named in sides
    ]
    return Material(train, control, tuple(cases))


def _read(job: AutoencoderJob, source: str, split: Split, shape: Shape) -> Named:
    return read_source(source, split, shape, job.limit, job.seed, skip_corrupt=job.skip_corrupt)


def read_source(
    source: str, split: Split, shape: Shape, limit: int, seed: int, *, skip_corrupt: bool = False
) -> Named:
    """At most `limit` images of a source, drawn by the seed, in the source's order."""
    channels, height, width = shape
    if channels not in (1, 3) or height != width:
        raise ValueError(
            f"no picture has the shape {channels}x{height}x{width}: expected 1 or 3 channels and a "
            "square; give --shape"
        )
    kind, _colon, path = source.partition(":")
    if split == "all" and kind != "folder":
        raise ValueError(f"--split all is for folders; {source} has train and heldout")
    reading: Reading | None
    if split == "all":
        files = _files(Path(path).expanduser(), "the source")
        chosen = [files[row] for row in _drawn(len(files), limit, seed)]
        root = Path(path).expanduser()
        pixels, kept, reading = read_picture_files(
            chosen, height, below=root, skip_corrupt=skip_corrupt
        )
        chosen = [chosen[place] for place in kept]
        names = [shown(str(file.relative_to(root))) for file in chosen]
        labels, classes = _class_folders(files, chosen, root)
    else:
        found = load_images(
            source,
            split="train" if split == "train" else "heldout",
            size=height,
            skip_corrupt=skip_corrupt,
        )
        reading = found.reading
        rows = _drawn(len(found), limit, seed)
        pixels, names = found.images[rows], [f"{split} {row}" for row in rows]
        labels, classes = tuple(found.labels[rows].tolist()), found.class_names
    images = _floats(pixels, channels)
    return Named(f"{source} ({split})", images, tuple(names), labels, classes, reading)


def _class_folders(
    files: list[Path], chosen: list[Path], root: Path
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """The classes of the chosen files by the folders below `root`, in their sorted order; no labels
    where a file lies in none."""
    parts = {file: file.relative_to(root).parts for file in files}
    if min(len(names) for names in parts.values()) < 2:
        return None, ()
    classes = sorted({names[0] for names in parts.values()})
    labels = tuple(classes.index(parts[file][0]) for file in chosen)
    return labels, tuple(shown(name) for name in classes)


def _control(job: AutoencoderJob, split: Split, shape: Shape) -> Named | None:
    """Images that the network never saw: given, or what the source holds out."""
    if job.control == NO_CONTROL:
        return None
    if job.control is not None:
        own: Split = "all" if job.control.startswith("folder:") else "heldout"
        return _read(job, job.control, own, shape)
    if job.data is None or split == "all":
        return None
    other: Split = "heldout" if split == "train" else "train"
    return _read(job, job.data, other, shape)


def _default_split(source: str) -> Split:
    """A folder is taken as it is, unless it is divided into train and test itself."""
    kind, _colon, path = source.partition(":")
    root = Path(path).expanduser()
    divided = (root / "train").is_dir() and any((root / n).is_dir() for n in HELDOUT_FOLDERS)
    return "all" if kind == "folder" and not divided else "train"


def _masks(job: AutoencoderJob, shape: Shape) -> dict[str, Bool[Tensor, "h w"]]:
    """By name, those that are drawn and those that are pictures."""
    _c, height, width = shape
    masks = {
        name: mask_pattern(name, height, width, generator=seeded_generator(job.seed, 0, name))
        for name in job.masks
    }
    for path in job.mask_files:
        if path.stem in masks:
            raise ValueError(f"two masks are called {path.stem}; rename {path}")
        masks[path.stem] = _read_mask(path, shape)
    return masks


def _read_mask(path: Path, shape: Shape) -> Bool[Tensor, "h w"]:
    """True where a picture is white; ValueError if it does not fit or erases all or nothing."""
    if not path.is_file():
        raise SourceError(f"--mask {path} does not exist")
    try:
        return mask_from_picture(_pixels(path), *shape[1:])
    except ValueError as error:
        raise ValueError(f"--mask {path}: {error}") from error


def _case(job: AutoencoderJob, name: str, side: str, named: Named, mask: Bool[Tensor, ...]) -> Case:
    """Images degraded by one mask, or by one each, with noise of each image's own."""
    generators = tuple(
        seeded_generator(job.seed, row, f"noise {name} {side}") for row in range(len(named))
    )
    y = degrade(named.images, mask, sigma=job.noise, generators=generators if job.noise else ())
    wide = (mask if mask.dim() == 3 else mask.expand(len(named), -1, -1)).unsqueeze(1)
    return Case(name, side, named.names, y, wide.expand_as(y).contiguous(), named.images)


def _degraded_material(job: AutoencoderJob, shape: Shape, folder: Path) -> Material:
    """Pictures that are degraded already; their originals by name, and control images with the
    same pixels missing."""
    files = _files(folder, "--degraded")[: job.limit]
    y = _floats(_same_size(files, shape, "--degraded"), shape[0])
    check_degraded(y, job.noise or None)
    inside = [file.relative_to(folder) for file in files]
    names = tuple(shown(str(file)) for file in inside)
    train = None
    if job.originals is not None:
        absent = [file for file in inside if not (job.originals / file).is_file()]
        if absent:
            raise SourceError(
                f"{job.originals / absent[0]} does not exist; --originals need a picture of the "
                f"same name for each of the {len(names)} in {folder}"
            )
        originals = [job.originals / file for file in inside]
        pixels = _same_size(originals, shape, "--originals")
        train = Named(f"folder:{job.originals}", _floats(pixels, shape[0]), names)
    known = None
    if job.mask_files:
        mask = _read_mask(job.mask_files[0], shape)
        known = mask.expand(y.shape).contiguous()
    cases = [Case("given", "train", names, y, known, None if train is None else train.images)]
    control = _control(job, "all", shape)
    if control is not None:
        _check_disjoint(train, control)
        holes = (y > 0).any(1) if known is None else known[:, 0]
        rows = torch.arange(len(control)) % len(holes)
        cases.append(_case(job, "given", "control", control, holes[rows]))
    return Material(train, control, tuple(cases))


def _check_disjoint(train: Named | None, control: Named | None) -> None:
    if train is None or control is None:
        return
    seen = {image.numpy().tobytes() for image in train.images}
    n_shared = sum(image.numpy().tobytes() in seen for image in control.images)
    if n_shared:
        raise ValueError(
            f"{n_shared} of {len(control)} control images of {control.source} are among the "
            "training images, too; a control is what the network never saw"
        )


def _files(path: Path, option: str) -> list[Path]:
    if not path.is_dir():
        raise SourceError(f"{path} is not a folder; give {option} a folder of pictures")
    files = sorted(p for p in path.rglob("*") if is_picture(p, below=path))
    if not files:
        raise SourceError(f"{path} has no pictures in it (.png, .jpg, .webp, ...)")
    return files


def _first_size(files: list[Path]) -> tuple[int, int]:
    """(height, width) of the first that can be read, or SourceError for the first of all: whether
    others are refused is asked where all are read."""
    for file in files:
        try:
            height, width = read_picture_as_it_is(file).shape[:2]
        except CorruptPictureError:
            continue
        return height, width
    height, width = _pixels(files[0]).shape[:2]
    return height, width


def _same_size(files: list[Path], shape: Shape, option: str) -> npt.NDArray[np.uint8]:
    """(n, 3, h, w), every one exactly of the network's size: what is degraded is not resized."""
    pictures = []
    for file in files:
        pixels = _pixels(file)
        if pixels.shape[:2] != shape[1:]:
            raise SourceError(
                f"{file} has {pixels.shape[0]}x{pixels.shape[1]} pixels, expected "
                f"{shape[1]}x{shape[2]} as the network takes them; {option} pictures are not "
                "resized, as that would mix missing pixels with known ones"
            )
        pictures.append(pixels.transpose(2, 0, 1))
    return np.stack(pictures)


def _pixels(file: Path) -> npt.NDArray[np.uint8]:
    """(h, w, 3) as it is; transparent parts are black."""
    try:
        return read_picture_as_it_is(file)
    except CorruptPictureError as error:
        raise SourceError(f"{file} cannot be read as a picture ({error}); remove it") from error


def _drawn(n: int, limit: int, seed: int) -> list[int]:
    if n <= limit:
        return list(range(n))
    order = torch.randperm(n, generator=seeded_generator(seed, 0, "images"))
    return sorted(order[:limit].tolist())


def _floats(pixels: npt.NDArray[np.uint8], channels: int) -> Float[Tensor, "n c h w"]:
    """In [0, 1]; grey as it is, or the luma of colours."""
    images = torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255
    if channels == 3:
        return images
    if channels != 1:
        raise ValueError(f"no picture has {channels} channels; expected 1 or 3")
    if bool((images == images[:, :1]).all()):
        return images[:, :1].contiguous()
    return (images * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
