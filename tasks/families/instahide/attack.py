"""Attack InstaHide encodings from files: inputs, checked, and the methods.

A method is one entry of `METHODS`: its title, and a function that returns a `Recovered`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from recon_core.attacks.instahide.carlini import recover_as_carlini
from recon_core.attacks.instahide.graph import NotALineGraphError
from recon_core.attacks.instahide.mixing import InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.natural_fit import Practical
from recon_core.attacks.instahide.practical import recover_practically
from recon_core.attacks.instahide.recover import Recovered, Status, check_pool, recover
from recon_core.attacks.instahide.similarity_network import SimilarityNetwork
from recon_core.strict import Count, Strict, Tagged, Within
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress, seeded_generator
from storage.challenge import Challenge, read_challenge
from tasks.families.instahide.encode import read_similarity

Floats = npt.NDArray[np.float64]
T = TypeVar("T")
SCHEME: TypeAdapter[Scheme] = TypeAdapter(Annotated[Scheme, Tagged("kind")])
SEVERAL = {"both": ("exact", "practical"), "all": ("exact", "practical", "carlini")}
"""Names for several methods."""
BEYOND = 1.001
"""Pixels above this are none of pictures in [-1, 1]."""
SAME = 1 / 255
"""The largest error of a pixel of an exact image: half of one of 256 grey levels, or as much of a
standard deviation of normal pixels."""


@dataclass(frozen=True, kw_only=True)
class InstaHideJob(Strict):
    """`path`: a challenge's folder, a .npy, or a folder of pictures. The challenge gives settings
    that are None. `method`: one of `METHODS`, `both` or `all`, or `auto`: exact for normal pixels,
    practical for pictures, or carlini if encodings have unknown public images. `similarity`: a
    trained network for carlini; without one it is trained on the public images."""

    path: Path
    out: Path
    public: Path | None = None
    labels: Path | None = None
    truth: Path | None = None
    similarity: Path | None = None
    method: str = "auto"
    scheme: Scheme | None = None
    n_private: Annotated[int | None, Within("[2, inf)", fix="an encoding mixes 2")] = None
    use_public: bool = True
    use_labels: bool = True
    n_levels: int | None = None
    n_rounds: int | None = None
    seed: int = 0
    n_shown: Count = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("public", "labels"):
            if getattr(self, name) is not None and not getattr(self, f"use_{name}"):
                raise ValueError(f"--{name} and --no-{name} contradict each other; give one")


@dataclass(frozen=True, kw_only=True)
class Units:
    """Units of a pixel: grey `levels` of pictures from -1 to 1, or `normal`, which is no picture
    and drawn from -3 to 3. `n_levels`: number of values of a pixel, 0: any."""

    kind: Literal["normal", "levels"]
    n_levels: int = 256

    @property
    def is_normal(self) -> bool:
        return self.kind == "normal"

    @property
    def same_said(self) -> str:
        """`SAME` in words."""
        return "0.004 standard deviations" if self.is_normal else "half a grey level"

    def shown(self, z: npt.NDArray[Any]) -> Floats:
        """Pixels from 0 to 1, as pictures have them."""
        pixels = np.asarray(z, np.float64) / (3 if self.is_normal else 1)
        found: Floats = (pixels.clip(-1, 1) + 1) / 2
        return found


NORMAL = Units(kind="normal", n_levels=0)
LEVELS = Units(kind="levels")


@dataclass(frozen=True)
class PreparedChallenge:
    """A challenge, with the scheme, units and methods of the attack."""

    challenge: Challenge
    scheme: Scheme
    n_private: int | None
    units: Units
    methods: tuple[str, ...]

    def on(self, device: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Encodings, public images and labels, a row each."""
        challenge, arrays = self.challenge, (self.challenge.public, self.challenge.labels)
        public, labels = (
            None if a is None else torch.from_numpy(a.astype(np.float32)).flatten(1).to(device)
            for a in arrays
        )
        return torch.from_numpy(challenge.encodings).flatten(1).to(device), public, labels


def prepare_challenge(job: InstaHideJob) -> PreparedChallenge:
    """Read everything. Raises SourceError or ValueError for what is missing or does not fit."""
    names = ("auto", *SEVERAL, *METHODS)
    if job.method not in names:
        raise ValueError(f"method {job.method!r} is none of {', '.join(names)}")
    challenge = read_challenge(job.path, public=job.public, labels=job.labels, truth=job.truth)
    if not job.use_public:
        challenge = replace(challenge, public=None)
    if not job.use_labels:
        challenge = replace(challenge, labels=None)
    facts, m = challenge.facts, len(challenge.encodings)
    if job.scheme is None and facts.get("scheme") is None:
        raise ValueError(
            "nothing says how the encodings were made; give --scheme and --k-pub (theory: --wa and "
            "--wb, too)"
        )
    scheme = job.scheme or _fact(challenge, "scheme", SCHEME)
    n_private = job.n_private or facts.get("n_private")
    if n_private is not None and (not isinstance(n_private, int) or n_private < 2):
        raise ValueError(
            f"challenge.json: n_private={n_private!r} is no number of images, 2 or more"
        )
    if n_private is not None and n_private > m:
        raise ValueError(
            f"{m} encodings of n_private={n_private} images: fewer encodings than images determine "
            "nothing; give more encodings, or the right --n-private"
        )
    units = _units(challenge, scheme)
    if job.n_levels is not None:
        units = replace(units, n_levels=job.n_levels)
    hidden = scheme.k_pub > 0 and challenge.public is None
    methods = SEVERAL.get(job.method, (job.method,))
    if job.method == "auto":
        of_theory = isinstance(scheme, Mixing) and challenge.public is None
        methods = ("exact",) if units.is_normal or of_theory else ("practical",)
        if hidden and job.similarity is not None:
            methods = ("carlini",)
    if hidden and "carlini" not in methods:
        raise ValueError(
            f"encodings have k_pub={scheme.k_pub} public images, but none are given: give --public "
            "a .npy or a folder of them; or, for pictures, --similarity a network that was trained "
            "on others (palimpsest instahide similarity)"
        )
    if "sdp" in methods and challenge.public is not None and scheme.k_pub:
        check_pool(len(challenge.public), scheme)
    return PreparedChallenge(challenge, scheme, n_private, units, methods)


def _units(challenge: Challenge, scheme: Scheme) -> Units:
    """The challenge's units; without them, normal if pixels exceed those of pictures."""
    if "pixels" in challenge.facts:
        units = _fact(challenge, "pixels", TypeAdapter(Units))
        return NORMAL if units.is_normal else units
    pixels, most = challenge.public, 1.0
    if pixels is None:
        pixels, most = challenge.encodings, 2 * scheme.wa if isinstance(scheme, Mixing) else 1.0
    return NORMAL if float(np.abs(pixels).max(initial=0)) > BEYOND * most else LEVELS


def _fact(challenge: Challenge, name: str, kind: TypeAdapter[T]) -> T:
    """What challenge.json says under this name; ValueError if it makes no sense."""
    try:
        return kind.validate_python(challenge.facts[name])
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, (name, *first["loc"])))
        raise ValueError(f"challenge.json: {at}: {first['msg']}") from error


@dataclass(frozen=True)
class Attacked:
    """Outcome of one method, which took `seconds`; `failure` in words if nothing came back.

    Scores, by `results.scored`: `truth_of`: the true image of each recovered one, -1: none.
    `error`: root mean square over pixels, `worst`: the largest error of a pixel, `ssim` in [-1, 1],
    over the pixels that are known. `edges_right`: the share of encodings with both true images.
    None where there is no truth, or nothing came back.
    """

    name: str
    seconds: float
    found: Recovered | None
    failure: str = ""
    truth_of: npt.NDArray[np.int64] | None = None
    error: Floats | None = None
    worst: Floats | None = None
    ssim: Floats | None = None
    edges_right: float | None = None

    @property
    def n_exact(self) -> int | None:
        return None if self.worst is None else int((self.worst <= SAME).sum())

    @property
    def n_false(self) -> int | None:
        """Images that are called recovered and are not: no method should have any."""
        if self.worst is None or self.found is None:
            return None
        called = np.array([status is Status.RECOVERED for status in self.found.status])
        return int((called & ~(self.worst <= SAME)).sum())


def attack_all(
    job: InstaHideJob, prepared: PreparedChallenge, *, device: str, progress: Progress = no_progress
) -> list[Attacked]:
    """Every method. A ValueError of one method alone is raised; of several it is that method's
    failure."""
    done = []
    n = len(prepared.methods)
    for k, name in enumerate(prepared.methods):
        started, failure = time.perf_counter(), ""
        found: Recovered | None = None
        try:
            share = share_of(progress, k / n, (k + 1) / n)
            found = METHODS[name].run(job, prepared, device, share)
        except ValueError as error:
            if n == 1:
                raise
            failure = str(error)
        done.append(Attacked(name, time.perf_counter() - started, found, failure))
    progress(1.0)
    return done


def _exact(
    job: InstaHideJob,
    prepared: PreparedChallenge,
    device: str,
    progress: Progress,
    *,
    semidefinite: bool = False,
) -> Recovered:
    if isinstance(prepared.scheme, InstaHide):
        raise ValueError(
            "the exact attack is on the model of the InstaHide paper, whose weights are equal; "
            "this scheme is instahide: use --method practical"
        )
    y, public, _labels = prepared.on(device)
    try:
        return recover(
            y, prepared.scheme, public=public, n_private=prepared.n_private,
            generator=seeded_generator(job.seed, 0, "attack"), semidefinite=semidefinite,
            progress=progress,
        )  # fmt: skip
    except NotALineGraphError as error:
        raise ValueError(
            f"{error}. For that, say how many private images there are, with --n-private; or give "
            "images with more pixels; or, if these are photographs, use --method practical"
        ) from error


def _practical(
    job: InstaHideJob, prepared: PreparedChallenge, device: str, progress: Progress
) -> Recovered:
    if prepared.n_private is None:
        raise ValueError("say how many private images there are, with --n-private")
    y, public, labels = prepared.on(device)
    if public is None and prepared.scheme.k_pub:
        raise ValueError(
            "the practical attack needs the public images of encodings; give --public, or use "
            "--method carlini"
        )
    how = Practical(n_levels=prepared.units.n_levels)
    if job.n_rounds is not None:
        how = replace(how, n_rounds=job.n_rounds)
    return recover_practically(
        y, prepared.challenge.shape, mixing=prepared.scheme, public=public,
        n_private=prepared.n_private, labels=labels,
        generator=seeded_generator(job.seed, 0, "attack"), how=how, progress=progress,
    )  # fmt: skip


def _carlini(
    job: InstaHideJob, prepared: PreparedChallenge, device: str, progress: Progress
) -> Recovered:
    if prepared.n_private is None:
        raise ValueError("say how many private images there are, with --n-private")
    if prepared.units.is_normal:
        raise ValueError(
            "--method carlini is for pictures from -1 to 1; these pixels are normal: use --method "
            "exact"
        )
    y, public, labels = prepared.on(device)
    shape, scheme = prepared.challenge.shape, prepared.scheme
    if job.similarity is not None:
        network = read_similarity(job.similarity).to(device)
    elif public is not None:
        how = SimilarityNetwork(scheme=scheme if isinstance(scheme, InstaHide) else InstaHide())
        pool, first = public.cpu().reshape(-1, *shape), share_of(progress, 0.0, 0.5)
        network = how.train(pool, progress=first, device=device)
    else:
        raise ValueError("give --similarity, a network, or public images to train one on")
    return recover_as_carlini(
        y, shape, n_private=prepared.n_private, mixing=scheme, labels=labels, scores=network,
        generator=seeded_generator(job.seed, 0, "attack"), progress=share_of(progress, 0.5, 1.0),
    )  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A way to recover images, by name."""

    title: str
    run: Callable[[InstaHideJob, PreparedChallenge, str, Progress], Recovered]


METHODS: dict[str, Method] = {
    "exact": Method("exact (InstaHide paper)", _exact),
    "practical": Method("practical (photographs)", _practical),
    "carlini": Method("learned similarity (Carlini et al.)", _carlini),
    "sdp": Method(
        "exact, public images by the paper's semidefinite program",
        partial(_exact, semidefinite=True),
    ),
}
