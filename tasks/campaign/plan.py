"""A campaign: the settings that make a store of pairs, and the plan that follows from them.

Which images each part trains on follows from the store's manifest, which is made of exactly these
settings, and from the receipts of earlier rounds, never from time, workers or order.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import recon_core
from recon_core.experiments import FAMILIES, KKT, Experiment
from recon_core.sampling import History, Sampling, check_balance, plan_hash, plan_part
from recon_core.strict import Count, Natural, Strict
from recon_core.types import RunSpec
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import CorruptPartError, StoreFullError
from storage.object_store import Location
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import Encoding
from storage.pairs.receipts import Receipt
from storage.sources.load import ImageSet
from tasks import __version__
from tasks.devices import usable_cores


@dataclass(frozen=True, kw_only=True)
class Campaign(Strict):
    """Settings of the victims that are trained and attacked.

    `threads`: CPU threads of one part, on which the order of floating-point sums depends.
    `encoding`: how the store keeps reconstructions (docs/dataset.md).
    """

    experiment: Experiment = field(default_factory=KKT)
    sampling: Sampling = field(default_factory=Sampling)
    root_seed: Natural = 0
    threads: Count = 1
    encoding: Encoding = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_balance(self.sampling.images_per_run, self.experiment.n_labels)
        self.experiment.check_sweep(self.sampling.attacks_per_victim)
        self.experiment.check_images(self.sampling.images_per_run)

    def manifest(self, images: ImageSet) -> dict[str, Any]:
        """Manifest of the store, without the number of runs of the last phase, which may grow, and
        what only another sampler reads."""
        settings = asdict(self)
        for phase in settings["sampling"]["phases"]:
            if phase["sampler"] != "adaptive":
                for name in ("enough", "prior_back", "prior_runs"):
                    del phase[name]
        del settings["sampling"]["phases"][-1]["n_runs"]
        source = {"split": images.split, "hash": images.content_hash, "n": len(images.labels)}
        return {"campaign": settings, "source": source}

    def fingerprint(self, images: ImageSet) -> str:
        """sha256 of the manifest."""
        return sha256_of(self.manifest(images))

    def victims_fingerprint(self, images: ImageSet) -> str | None:
        """`victims_key` of a sweep; None if every victim is attacked once."""
        return None if self.sampling.attacks_per_victim == 1 else victims_key(self.manifest(images))


def victims_key(manifest: Mapping[str, Any]) -> str:
    """sha256 of what the v-th victim of a store depends on, which is not how it is attacked."""
    campaign = manifest["campaign"]
    experiment = dict(campaign["experiment"])
    without_attack(experiment)
    kept = {name: campaign[name] for name in ("root_seed", "threads")}
    kept |= {"images_per_run": campaign["sampling"]["images_per_run"]}
    return sha256_of(kept | {"experiment": experiment, "source": manifest["source"]})


AFTER_VICTIMS = ("attack", "keep", "confident_ssim", "confident_gap")
"""Settings of every experiment that come after its victims are trained."""


def without_attack(experiment: dict[str, Any]) -> None:
    """Remove the settings that come after the victims are trained."""
    family = FAMILIES.get(experiment.get("family", ""))
    for name in (*AFTER_VICTIMS, *(family.experiment.after_victims if family else ())):
        experiment.pop(name, None)


@dataclass(frozen=True)
class PlannedPart:
    """One part's runs and the hash of that plan."""

    part: int
    specs: tuple[RunSpec, ...]
    plan_hash: str
    experiment: Experiment

    def check(self, receipt: Receipt) -> None:
        """Raise CorruptPartError if the receipt is not of these runs."""
        if receipt.plan_hash != self.plan_hash:
            raise CorruptPartError(
                f"part {self.part} was made from another plan ({receipt.plan_hash[:12]}, "
                f"expected {self.plan_hash[:12]}); verify the store, or start a new one"
            )


class Plan:
    """The parts of a campaign, or of a study, on a set of images.

    `labels` has an entry per image of the source, -1 for one that no run may use. Raises ValueError
    if the images cannot fill the planned runs.
    """

    campaign: Any  # or a study, with threads, encoding, manifest and fingerprints
    images: ImageSet
    labels: npt.NDArray[np.int64]

    def __init__(self, campaign: Campaign, images: ImageSet) -> None:
        self.campaign = campaign
        self.images = images
        self.labels, self.task = campaign.experiment.labels_of(images.labels, images.class_names)
        self.part(0)  # too few images is said before anything is written

    @functools.cached_property
    def sampling(self) -> Sampling:
        sampling: Sampling = self.campaign.sampling
        return sampling

    def part(self, part: int, history: History | None = None) -> PlannedPart:
        """The plan of one part, given the counts of exactly the rounds that it may know."""
        specs = plan_part(
            self.sampling, part, labels=self.labels,
            history=history or History.empty(len(self.labels)),
            root_seed=self.campaign.root_seed, n_labels=self.campaign.experiment.n_labels,
        )  # fmt: skip
        return PlannedPart(part, specs, plan_hash(specs), self.campaign.experiment)


def open_store(root: Location, campaign: Any, images: ImageSet) -> Dataset:
    """Open the campaign's store at `root`, or create it; StoreMismatchError if it is another's."""
    return create_or_open(root, campaign.manifest(images), encoding=campaign.encoding)


def sha256_of(body: Any) -> str:
    """Hash of a JSON value, whatever the order of its keys."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def made_with(packages: Iterable[str]) -> dict[str, Any]:
    """Versions, machine and time of what is made now."""
    versions = {"code": code_version(), "python": platform.python_version()}
    return {
        "versions": versions | {name: version_of(name) for name in packages},
        "machine": f"{platform.machine()}, {usable_cores()} cores, {platform.system()}",
        "created": datetime.now(UTC).isoformat(timespec="minutes"),
    }


@functools.cache
def code_version() -> str:
    """The release and a hash of the core's sources: what computed the pairs."""
    digest = hashlib.sha256()
    folder = Path(recon_core.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def version_of(package: str) -> str:
    """The version of an installed package, or of Palimpsest, which may run from its tree.

    Raises PackageNotFoundError for any other that is missing.
    """
    return __version__ if package == "palimpsest" else importlib.metadata.version(package)


VICTIMS = "victims"
"""Beside a store's parts: the victims of a sweep, or of several attacks, which may be removed."""


@dataclass(frozen=True)
class VictimFiles:
    """A `recon_core.types.Victims` in a folder; `key` says what its victims were trained from."""

    folder: Path
    key: str

    def get(self, victim: int) -> Mapping[str, torch.Tensor] | None:
        """Tensors of a victim; None if it is missing, damaged or of another key."""
        try:
            found = load_checkpoint(self.folder, f"victim_{victim:08d}")
        except (CorruptPartError, OSError):
            return None
        if found is None or found[1].get("key") != self.key:
            return None
        return {name: torch.from_numpy(array.copy()) for name, array in found[0].items()}

    def put(self, victim: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store a victim, if the folder can be written."""
        arrays = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
        with contextlib.suppress(StoreFullError, OSError):
            save_checkpoint(self.folder, f"victim_{victim:08d}", arrays, {"key": self.key})


def version_key(fingerprint: str, code: str, torch_version: str, device: str) -> str:
    """Origin of a trained victim: settings, code, torch, kind of device."""
    return f"{fingerprint} {code} {torch_version} {device}"


@dataclass(frozen=True)
class VictimsOfStore:
    """The victims that a store's parts were made with, whatever made them; read only, as other code
    or another device would train other ones. `receipts` by victim."""

    folder: Path
    fingerprint: str
    receipts: Mapping[int, Receipt]

    def get(self, victim: int) -> Mapping[str, torch.Tensor] | None:
        """Tensors of a victim; None if it is not stored."""
        made = self.receipts.get(victim)
        if made is None:
            return None
        key = version_key(self.fingerprint, made.code_version, made.torch_version, made.device)
        return VictimFiles(self.folder, key).get(victim)

    def put(self, victim: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store nothing."""


def kept_victims(victims: tuple[str, str] | None, device: str) -> VictimFiles | None:
    """Stored victims of (folder, fingerprint), this code and this kind of device; None for None."""
    if victims is None:
        return None
    folder, fingerprint = victims
    key = version_key(fingerprint, code_version(), torch.__version__, device)
    return VictimFiles(Path(folder), key)
