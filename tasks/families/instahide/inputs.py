"""Inputs of an attack on InstaHide's encodings: files, units and settings, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from recon_core.attacks.instahide.mixing import Mixing, Scheme
from recon_core.attacks.instahide.public_images import check_pool
from recon_core.strict import Count, Strict, Tagged, Within
from storage.challenge import Challenge, read_challenge

T = TypeVar("T")
SCHEME: TypeAdapter[Scheme] = TypeAdapter(Annotated[Scheme, Tagged("kind")])
AUTO = "auto"
SEVERAL = {"both": ("exact", "practical"), "all": ("exact", "practical", "carlini")}
"""Names for several methods."""
SEMIDEFINITE, BLIND = "sdp", "carlini"
"""The exact method with the paper's program, for few public images; the method that needs none."""
BEYOND = 1.001
"""Pixels above this are none of pictures in [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class InstaHideJob(Strict):
    """`path`: a challenge's folder, a .npy, or a folder of pictures. The challenge gives settings
    that are None. `method`: one of `tasks.families.instahide.attack.METHODS`, `both` or `all`, or
    `auto`: exact for normal pixels, practical for pictures, or carlini if encodings have unknown
    public images. `similarity`: a trained network for carlini; without one it is trained on the
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
    """Units of a pixel z, which is the pixel z sd + mean of a picture from -1 to 1.

    `kind`: levels (z is that pixel), standardised, or normal, which has no picture and is drawn
    from -3 to 3. `n_levels`: number of values of a pixel, 0: any.
    """

    kind: Literal["normal", "levels", "standardised"]
    mean: FiniteFloat = 0.0
    sd: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    n_levels: int = 256

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
        """The largest error of a pixel of an exact image: half of one of 256 grey levels, or as
        much of a standard deviation of normal pixels."""
        return (1 / 255) if self.is_normal else 1 / 255 / self.sd

    @property
    def same_said(self) -> str:
        return "0.004 standard deviations" if self.is_normal else "half a grey level"

    def shown(self, z: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Pixels from 0 to 1, as pictures have them."""
        pixels = np.asarray(z, np.float64) * self.sd + self.mean
        found: npt.NDArray[np.float64] = (pixels.clip(-1, 1) + 1) / 2
        return found


NORMAL = Units(kind="normal", sd=1 / 3, n_levels=0)
LEVELS = Units(kind="levels")


@dataclass(frozen=True)
class PreparedChallenge:
    """A challenge, with the scheme, units and methods of the attack."""

    challenge: Challenge
    scheme: Scheme
    n_private: int | None
    units: Units
    methods: tuple[str, ...]


def prepare_challenge(job: InstaHideJob, known: tuple[str, ...]) -> PreparedChallenge:
    """Read everything. `known`: names of all methods.

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
    if job.scheme is None and challenge.facts.get("scheme") is None:
        raise ValueError(
            "nothing says how the encodings were made; give --scheme and --k-pub (theory: --wa and "
            "--wb, too)"
        )
    scheme = job.scheme or _fact(challenge, "scheme", SCHEME)
    n_private = job.n_private or challenge.facts.get("n_private")
    if n_private is not None and (not isinstance(n_private, int) or n_private < 2):
        raise ValueError(
            f"challenge.json: n_private={n_private!r} is no number of images, 2 or more"
        )
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
    """The challenge's units; without them, normal if pixels exceed those of pictures."""
    if "pixels" in challenge.facts:
        units = _fact(challenge, "pixels", TypeAdapter(Units))
        return NORMAL if units.is_normal else units
    if challenge.public is not None:
        beyond = float(np.abs(challenge.public).max(initial=0)) > BEYOND
    else:
        most = 2 * scheme.wa if isinstance(scheme, Mixing) else 1.0  # k_pub is 0
        beyond = float(np.abs(challenge.encodings).max()) > BEYOND * most
    return NORMAL if beyond else LEVELS


def _fact(challenge: Challenge, name: str, kind: TypeAdapter[T]) -> T:
    """What challenge.json says under this name; ValueError if it makes no sense."""
    try:
        return kind.validate_python(challenge.facts[name])
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, (name, *first["loc"])))
        raise ValueError(f"challenge.json: {at}: {first['msg']}") from error
