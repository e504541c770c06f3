"""Inputs of an attack on InstaHide's encodings: files, units and settings, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from recon_core.attacks.instahide.mixing import Mixing, Scheme
from recon_core.attacks.instahide.public_images import check_pool
from recon_core.strict import Count, Strict, Within
from recon_core.tagged import Tagged
from storage.challenge import Challenge, read_challenge

SCHEME: TypeAdapter[Scheme] = TypeAdapter(Annotated[Scheme, Tagged("kind")])
AUTO = "auto"
SEVERAL = {"both": ("exact", "practical"), "all": ("exact", "practical", "carlini")}
"""Names for several methods."""
SEMIDEFINITE = "sdp"
"""The exact method with the paper's program for public images, which takes few of them."""
BLIND = "carlini"
"""The method that needs no public images."""
BEYOND = 1.001
"""Pixels above this are none of pictures in [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class InstaHideJob(Strict):
    """`path`: a challenge's folder, a .npy, or a folder of pictures. Settings that a challenge says
    itself are None. `method`: one of `tasks.families.instahide.attack.METHODS`, `both` or `all`, or
    `auto`: exact for normal pixels, practical for pictures, or carlini if public images are in
    encodings and not known. `similarity`: a trained network for carlini, else one is trained on the
    public images."""

    path: Path
    out: Path
    public: Path | None = None
    labels: Path | None = None
    truth: Path | None = None
    similarity: Path | None = None
    method: str = AUTO
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
        if self.public is not None and not self.use_public:
            raise ValueError("--public and --no-public contradict each other; give one of them")
        if self.labels is not None and not self.use_labels:
            raise ValueError("--labels and --no-labels contradict each other; give one of them")


@dataclass(frozen=True, kw_only=True)
class Units:
    """Units of a pixel z: it is the pixel z sd + mean of a picture from -1 to 1.

    `kind`: levels (z is that pixel), standardised, or normal, which has no picture and is drawn
    from -3 to 3. `n_levels`: values that a pixel can have, 0: any.
    """

    kind: str
    mean: float = 0.0
    sd: float = 1.0
    n_levels: int = 0

    @property
    def is_normal(self) -> bool:
        return self.kind == "normal"

    @property
    def low(self) -> float:
        return (-1 - self.mean) / self.sd

    @property
    def high(self) -> float:
        return (1 - self.mean) / self.sd

    @property
    def same(self) -> float:
        """The largest error of a pixel of an image that is called exact: half of one of 256 grey
        levels; as much of a standard deviation of normal pixels."""
        return (1 / 255) if self.is_normal else 1 / 255 / self.sd

    @property
    def same_said(self) -> str:
        return "0.004 standard deviations" if self.is_normal else "half a grey level"

    def shown(self, z: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Pixels from 0 to 1, as pictures have them."""
        pixels = np.asarray(z, np.float64) * self.sd + self.mean
        found: npt.NDArray[np.float64] = (pixels.clip(-1, 1) + 1) / 2
        return found


NORMAL = Units(kind="normal", sd=1 / 3)
LEVELS = Units(kind="levels", n_levels=256)


@dataclass(frozen=True)
class PreparedChallenge:
    """A challenge, with all that it does not say itself."""

    challenge: Challenge
    scheme: Scheme
    n_private: int | None
    units: Units
    methods: tuple[str, ...]


def prepare_challenge(job: InstaHideJob, known: tuple[str, ...]) -> PreparedChallenge:
    """Reads everything. `known`: the methods there are.

    Raises SourceError or ValueError for what is missing or does not fit.
    """
    names = (AUTO, *SEVERAL, *known)
    if job.method not in names:
        raise ValueError(f"method {job.method!r} is none of {', '.join(names)}")
    challenge = read_challenge(job.path, public=job.public, labels=job.labels, truth=job.truth)
    if not job.use_public:
        challenge = replace(challenge, public=None)
    if not job.use_labels:
        challenge = replace(challenge, labels=None)
    scheme = job.scheme or _scheme(challenge)
    n_private = job.n_private or _n_private(challenge)
    m = len(challenge.encodings)
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
    if job.method == AUTO:
        of_theory = isinstance(scheme, Mixing) and challenge.public is None
        methods = ("exact",) if units.is_normal or of_theory else ("practical",)
        if hidden and job.similarity is not None:
            methods = (BLIND,)
    if hidden and BLIND not in methods:
        raise ValueError(
            f"encodings have k_pub={scheme.k_pub} public images, but none are given: give --public "
            "a .npy or a folder of them; or, for pictures, --similarity a network that was trained "
            "on others (palimpsest instahide similarity)"
        )
    if SEMIDEFINITE in methods and challenge.public is not None and scheme.k_pub:
        check_pool(len(challenge.public), scheme)
    return PreparedChallenge(challenge, scheme, n_private, units, methods)


def _units(challenge: Challenge, scheme: Scheme) -> Units:
    """As the challenge says; else normal if pixels are beyond those of pictures."""
    about = challenge.facts.get("pixels")
    if about is None:
        if challenge.public is not None:
            beyond = float(np.abs(challenge.public).max(initial=0)) > BEYOND
        else:
            most = 2 * scheme.wa if isinstance(scheme, Mixing) else 1.0  # k_pub is 0
            beyond = float(np.abs(challenge.encodings).max()) > BEYOND * most
        return NORMAL if beyond else LEVELS
    kinds = ("normal", "levels", "standardised")
    kind = about.get("kind") if isinstance(about, Mapping) else about
    if kind not in kinds:
        raise ValueError(f"challenge.json: pixels.kind={kind!r} is none of {', '.join(kinds)}")
    if kind == "normal":
        return NORMAL
    try:
        mean, sd = float(about.get("mean", 0.0)), float(about.get("sd", 1.0))
        n_levels = int(about.get("n_levels", 256))
    except (TypeError, ValueError) as error:
        raise ValueError(f"challenge.json: pixels: {error}") from error
    if not (math.isfinite(mean) and math.isfinite(sd) and sd > 0):
        raise ValueError(f"challenge.json: pixels: mean={mean}, sd={sd} must be finite, sd above 0")
    return Units(kind=str(kind), mean=mean, sd=sd, n_levels=n_levels)


def _n_private(challenge: Challenge) -> int | None:
    found = challenge.facts.get("n_private")
    if found is None:
        return None
    if not isinstance(found, int) or found < 2:
        raise ValueError(f"challenge.json: n_private={found!r} is no number of images, 2 or more")
    return found


def _scheme(challenge: Challenge) -> Scheme:
    about = challenge.facts.get("scheme")
    if about is None:
        raise ValueError(
            "nothing says how the encodings were made; give --scheme and --k-pub (theory: --wa and "
            "--wb, too)"
        )
    try:
        return SCHEME.validate_python(about)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"challenge.json: scheme.{'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
