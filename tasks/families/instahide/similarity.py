"""Train the similarity of encodings on photographs, once, for attacks on others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.instahide.similarity_network import (
    Similarity,
    SimilarityNetwork,
    load,
    save,
)
from recon_core.types import Progress, no_progress
from storage.errors import SourceError
from storage.files import write_file
from storage.sources.load import ImageSet, load_images


@dataclass(frozen=True, kw_only=True)
class SimilarityJob:
    """`data`: a source of images, none of which need be in the encodings; its split for training.
    `scheme`: how the encodings to be compared are made. `n_steps`: of training; None: the
    network's own."""

    data: str
    out: Path
    scheme: InstaHide = field(default_factory=InstaHide)
    size: int = 32
    n_steps: int | None = None
    seed: int = 0
    skip_corrupt: bool = False

    @property
    def images(self) -> ImageSet:
        """The source's split for training; SourceError if it cannot be read."""
        return load_images(self.data, split="train", size=self.size, skip_corrupt=self.skip_corrupt)

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
    """Writes the network, replacing an earlier one when it is done; what it is.

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
