"""What an InstaHide attack can be tried on: challenges (encodings, public images, labels, and the
secret), and the similarity of encodings, trained once on photographs for attacks on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from recon_core.attacks.instahide.mixing import Encodings, InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.similarity_network import (
    Similarity,
    SimilarityNetwork,
    load,
    save,
)
from recon_core.strict import Strict, Within
from recon_core.types import Progress, no_progress, seeded_generator
from storage.challenge import Challenge, write_challenge
from storage.errors import SourceError
from storage.files import check_replaceable, write_file
from storage.sources.load import ImageSet, load_images
from tasks.devices import check_memory

GAUSSIAN = "gaussian"
"""A source of standard normal images, the model of the InstaHide paper."""


@dataclass(frozen=True, kw_only=True)
class _ImagesJob(Strict):
    data: str
    out: Path
    size: int = 32
    seed: int = 0
    skip_corrupt: bool = False

    @property
    def images(self) -> ImageSet:
        """The source's split for training; SourceError if it cannot be read."""
        return load_images(self.data, split="train", size=self.size, skip_corrupt=self.skip_corrupt)


@dataclass(frozen=True, kw_only=True)
class EncodeJob(_ImagesJob):
    """`data`: a source of images, or `gaussian`. `scheme`: Mixing needs `m`, the number of
    encodings; InstaHide has n_epochs. Pixels of photographs are from -1 to 1."""

    scheme: Scheme = field(default_factory=InstaHide)
    n_private: Annotated[int, Within("[2, inf)", fix="an encoding mixes 2")] = 100
    n_public: int = 1000
    m: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_public < self.scheme.k_pub:
            raise ValueError(
                f"n_public={self.n_public} is fewer than k_pub={self.scheme.k_pub}, the public "
                "images of an encoding"
            )
        if isinstance(self.scheme, InstaHide) and self.m is not None:
            raise ValueError(
                f"m={self.m}: InstaHide makes n_epochs={self.scheme.n_epochs} encodings of each "
                "private image; set --epochs"
            )
        if isinstance(self.scheme, Mixing) and (self.m is None or self.m < 1):
            raise ValueError(f"m={self.m}; say how many encodings to make with --m")
        n_epochs = self.scheme.n_epochs if isinstance(self.scheme, InstaHide) else 0
        images = self.n_private * (1 + n_epochs) + self.n_public + (self.m or 0)
        check_memory(
            2 * 4.0 * 3 * self.size**2 * images,
            f"{images:,} images and encodings of {self.size}x{self.size}",
            "lower --size, --n-private, --n-public, or --epochs and --m",
        )


def encode(job: EncodeJob) -> dict[str, Any]:
    """Write the challenge, the same bytes for the same job; return its facts. Raises SourceError if
    the images cannot be read, ValueError if the folder is not empty or there are too few images."""
    check_replaceable(job.out, fresh=False)
    labels: Tensor | None = None
    pixels: dict[str, Any] = {"kind": "normal"}
    wanted, drawn = job.n_private + job.n_public, seeded_generator(job.seed, 0, "images")
    if job.data == GAUSSIAN:
        images = torch.randn((wanted, 3, job.size, job.size), generator=drawn)
        source = f"standard normal pixels, {job.size} by {job.size}"
    else:
        found = job.images
        if len(found) < wanted:
            raise ValueError(
                f"{job.data} has {len(found)} images to train on, fewer than n_private="
                f"{job.n_private} and n_public={job.n_public}; lower one of them"
            )
        rows = torch.randperm(len(found), generator=drawn)[:wanted]
        images = torch.from_numpy(found.images)[rows].float() * (2 / 255) - 1
        if (n_classes := len(found.class_names)) > 1:
            of_private = torch.from_numpy(found.labels)[rows[: job.n_private]]
            labels = functional.one_hot(of_private, n_classes).float()
        pixels = {"kind": "levels", "n_levels": 256}
        source = f"{found.name} {found.content_hash}"
    private, public = images[: job.n_private], images[job.n_private :]
    make: Callable[..., Encodings] = job.scheme.encode
    if isinstance(job.scheme, Mixing):
        make = partial(job.scheme.encode, m=job.m or 0)
    drawn = seeded_generator(job.seed, 0, "encodings")
    made = make(private.flatten(1), public.flatten(1), generator=drawn, labels=labels)
    signed = made.flipped(seeded_generator(job.seed, 0, "signs"))
    facts = {
        "scheme": TypeAdapter(type(job.scheme)).dump_python(job.scheme),
        "pixels": pixels,
        "n_private": job.n_private,
        "m": len(made.y),
    }
    challenge = Challenge(
        encodings=signed.reshape(-1, *images.shape[1:]).float().numpy(),
        public=public.float().numpy() if len(public) else None,
        labels=None if made.labels is None else made.labels.float().numpy(),
        facts=facts,
        secret={
            "private": private.float().numpy(),
            "edges": made.private.numpy(),
            "weights": made.private_weights.double().numpy(),
            "public_ids": made.public.numpy(),
            "public_weights": made.public_weights.double().numpy(),
        },
    )
    write_challenge(job.out, challenge, {"seed": job.seed, "source": source})
    return facts


@dataclass(frozen=True, kw_only=True)
class SimilarityJob(_ImagesJob):
    """`data`: a source of images, none of which need be in the encodings; its split for training.
    `scheme`: how the encodings to be compared are made. `n_steps`: of training; None: the default
    of the network."""

    scheme: InstaHide = field(default_factory=InstaHide)
    n_steps: int | None = None

    @property
    def how(self) -> SimilarityNetwork:
        how = SimilarityNetwork(scheme=self.scheme)
        training = replace(how.training, seed=self.seed)
        if self.n_steps is not None:
            training = replace(training, n_steps=self.n_steps)
        return replace(how, training=training)


def train_similarity(
    job: SimilarityJob, *, device: str, progress: Progress = no_progress
) -> dict[str, Any]:
    """Train and write the network, which replaces an earlier file; return its facts.

    Raises SourceError for images that cannot be read, ValueError for too few or of a wrong size.
    """
    if job.out.is_dir():
        raise ValueError(f"{job.out} is a folder; give --out a file, for example similarity.st")
    found = job.images
    images = torch.from_numpy(found.images).float() * (2 / 255) - 1
    network = job.how.train(images, progress=progress, device=device)
    data = save(network.cpu())
    job.out.parent.mkdir(parents=True, exist_ok=True)
    write_file(job.out, data)
    return {
        "source": f"{found.name} {found.content_hash}",
        "n_images": len(images),
        "n_steps": job.how.training.n_steps,
        "bytes": len(data),
    }


def read_similarity(path: Path) -> Similarity:
    """Read what `train_similarity` wrote. Raises SourceError for anything else."""
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise SourceError(
            f"{path} is no similarity network ({error}); make one with palimpsest instahide "
            "similarity"
        ) from error
