"""Attack InstaHide encodings that are given as files, and score what comes back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from pydantic import TypeAdapter, ValidationError
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from recon_core.attacks.instahide.determined import Equations, determined
from recon_core.attacks.instahide.line_graph import incidence_of
from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.practical import Practical, recover_practically
from recon_core.attacks.instahide.recover import Exact, Recovered, recover
from recon_core.similarity import similarities
from recon_core.tagged import Tagged
from recon_core.types import Progress, no_progress, seeded_generator
from storage.challenge import Challenge, read_challenge

Name = Literal["exact", "practical"]
Scheme = Mixing | InstaHide
SCHEME: TypeAdapter[Scheme] = TypeAdapter(Annotated[Scheme, Tagged("kind")])

TITLES: dict[Name, str] = {"exact": "exact (paper 004)", "practical": "practical (photographs)"}
SAME = 1 / 255
"""The largest error of a pixel of an image that is called exact: half a grey level of [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class AttackJob:
    """`path`: a challenge's folder, a .npy, or a folder of pictures. Settings that a challenge says
    itself are None. `method` auto: exact for normal pixels, else practical."""

    path: Path
    out: Path
    public: Path | None = None
    labels: Path | None = None
    truth: Path | None = None
    method: Literal["auto", "exact", "practical", "both"] = "auto"
    scheme: Scheme | None = None
    n_private: int | None = None
    use_public: bool = True
    use_labels: bool = True
    n_levels: int | None = None
    n_rounds: int | None = None
    seed: int = 0
    n_shown: int = 40


@dataclass(frozen=True)
class Prepared:
    """A challenge, with all that it does not say itself."""

    challenge: Challenge
    scheme: Scheme
    n_private: int | None
    methods: tuple[Name, ...]
    n_levels: int


@dataclass(frozen=True)
class Scored:
    """One method's outcome. `truth_of`: the true image that each found one is; `error`: root mean
    square over pixels, `worst`: the largest error of a pixel, `ssim` in [-1, 1]; `edges_right`: of
    each encoding, whether both its images are. None where there is no truth, or nothing came back.
    """

    name: Name
    found: Recovered | None
    seconds: float
    failure: str = ""
    truth_of: npt.NDArray[np.int64] | None = None
    error: npt.NDArray[np.float64] | None = None
    worst: npt.NDArray[np.float64] | None = None
    ssim: npt.NDArray[np.float64] | None = None
    edges_right: npt.NDArray[np.bool_] | None = None

    @property
    def n_exact(self) -> int | None:
        return None if self.worst is None else int((self.worst <= SAME).sum())


def prepare(job: AttackJob) -> Prepared:
    """Reads everything. Raises SourceError or ValueError for what is missing or does not fit."""
    challenge = read_challenge(job.path, public=job.public, labels=job.labels, truth=job.truth)
    if not job.use_public:
        challenge = replace(challenge, public=None)
    if not job.use_labels:
        challenge = replace(challenge, labels=None)
    scheme = job.scheme or _scheme(challenge)
    n_private = job.n_private or challenge.facts.get("n_private")
    m = len(challenge.encodings)
    if n_private is not None and n_private > m:
        raise ValueError(
            f"{m} encodings of n_private={n_private} images: fewer encodings than images determine "
            "nothing; give more encodings, or the right --n-private"
        )
    normal = challenge.facts.get("pixels", {}).get("kind") == "normal"
    methods: tuple[Name, ...]
    if job.method == "auto":
        methods = ("exact",) if normal else ("practical",)
    else:
        methods = ("exact", "practical") if job.method == "both" else (job.method,)
    if "exact" in methods and isinstance(scheme, InstaHide):
        raise ValueError(
            "the exact attack is on the model of 004, whose weights are equal; this scheme is "
            "instahide: use --method practical"
        )
    if "practical" in methods and n_private is None:
        raise ValueError("say how many private images there are, with --n-private")
    if scheme.k_pub and challenge.public is None:
        raise ValueError(
            f"encodings have k_pub={scheme.k_pub} public images, but none are given: give --public "
            "a .npy or a folder of them"
        )
    n_levels = job.n_levels if job.n_levels is not None else (0 if normal else 256)
    return Prepared(challenge, scheme, n_private, methods, n_levels)


def attack_all(
    job: AttackJob, prepared: Prepared, *, device: str, progress: Progress = no_progress
) -> list[Scored]:
    """Every method, with its scores where the truth is known."""
    done = []
    for k, name in enumerate(prepared.methods):
        started = time.perf_counter()

        def of_all(share: float, k: int = k) -> None:
            progress((k + share) / len(prepared.methods))

        try:
            found = METHODS[name](job, prepared, device, of_all)
        except ValueError as error:
            if len(prepared.methods) == 1:
                raise
            seconds = time.perf_counter() - started
            done.append(Scored(name, None, seconds, failure=str(error)))
            continue
        done.append(scored(name, found, prepared.challenge, time.perf_counter() - started))
    progress(1.0)
    return done


def _exact(job: AttackJob, prepared: Prepared, device: str, progress: Progress) -> Recovered:
    assert isinstance(prepared.scheme, Mixing)
    y, public, _labels = _tensors(prepared, device)
    return recover(
        y,
        prepared.scheme,
        public=public,
        n_private=prepared.n_private,
        generator=seeded_generator(job.seed, 0, "attack"),
        how=Exact(),
        progress=progress,
    )


def _practical(job: AttackJob, prepared: Prepared, device: str, progress: Progress) -> Recovered:
    assert prepared.n_private is not None
    y, public, labels = _tensors(prepared, device)
    how = Practical()
    refinement = replace(how.refinement, n_levels=prepared.n_levels)
    if job.n_rounds is not None:
        refinement = replace(refinement, n_rounds=job.n_rounds)
    return recover_practically(
        y,
        prepared.challenge.shape,
        mixing=prepared.scheme,
        public=y.new_zeros((0, y.shape[1])) if public is None else public,
        n_private=prepared.n_private,
        labels=labels,
        generator=seeded_generator(job.seed, 0, "attack"),
        how=replace(how, refinement=refinement),
        progress=progress,
    )


METHODS: dict[Name, Callable[[AttackJob, Prepared, str, Progress], Recovered]] = {
    "exact": _exact,
    "practical": _practical,
}


def scored(name: Name, found: Recovered, challenge: Challenge, seconds: float) -> Scored:
    """Compared with the truth, if it is known: images are matched by their pixels."""
    private = challenge.secret.get("private")
    if private is None:
        return Scored(name, found, seconds)
    truth = torch.from_numpy(np.asarray(private, np.float64)).flatten(1)
    images = found.images.cpu()
    there = ~images.isnan().all(1)
    filled = images.nan_to_num(0.0)
    signed = found.public is not None and found.public.shape[1] > 0
    apart = _distances(filled if signed else filled.abs(), truth if signed else truth.abs())
    apart[~there] = apart.max() + 1
    rows, ids = linear_sum_assignment(apart.numpy())
    truth_of = np.full(len(images), -1)
    truth_of[rows] = ids
    truth_of[~there.numpy()] = -1
    error, worst, ssim = (np.full(len(images), np.nan) for _ in range(3))
    own = np.flatnonzero(truth_of >= 0)
    if len(own):
        a, b = filled[own], truth[truth_of[own]]
        if not signed:
            a, b = a.abs(), b.abs()
        off = (a - b).abs()
        error[own] = off.square().mean(1).sqrt().numpy()
        worst[own] = off.amax(1).numpy()
        ssim[own] = _ssim(a, b, challenge.shape)
    return Scored(
        name,
        found,
        seconds,
        truth_of=truth_of,
        error=error,
        worst=worst,
        ssim=ssim,
        edges_right=_edges_right(found, challenge, len(truth)),
    )


def _edges_right(found: Recovered, challenge: Challenge, n: int) -> npt.NDArray[np.bool_] | None:
    """Encodings whose two images are the true ones, images numbered so that most are."""
    edges = challenge.secret.get("edges")
    if edges is None or (found.edges < 0).all():
        return None
    known = (found.edges >= 0).all(1)
    n_found = max(len(found.status), int(found.edges.max()) + 1)
    ours, theirs = incidence_of(found.edges[known], n_found), incidence_of(edges, n)
    match = np.full(n_found, -1)
    rows, ids = linear_sum_assignment(-(ours.T @ theirs[known]))
    match[rows] = ids
    right = np.zeros(len(edges), bool)
    both = np.sort(match[found.edges[known]], axis=1) == np.sort(edges[known], axis=1)
    right[known] = both.all(1)
    return right


def record_of(scored: Scored, prepared: Prepared) -> dict[str, Any]:
    """As JSON, image by image."""
    base = {
        "method": scored.name,
        "title": TITLES[scored.name],
        "seconds": round(scored.seconds, 2),
    }
    found = scored.found
    if found is None:
        return base | {"failure": scored.failure}
    m = len(found.edges)
    n_seen = np.bincount(found.edges[found.edges >= 0], minlength=len(found.status))
    images = [
        {"status": status.value, "n_encodings": int(n_seen[k])} | scores_of(scored, k)
        for k, status in enumerate(found.status)
    ]
    known = scored.error is not None
    return base | {
        "n_images": len(found.status),
        "by_status": dict(Counter(s.value for s in found.status)),
        "n_explained": int(found.explained.sum()),
        "n_encodings": m,
        "exact_graph": found.exact,
        "n_graphs": found.n_graphs,
        "n_exact": scored.n_exact,
        "n_false": _n_false(scored) if known else None,
        "edges_right": None if scored.edges_right is None else float(scored.edges_right.mean()),
        "ssim_mean": _mean(scored.ssim),
        "error_median": _number(float(np.nanmedian(scored.error)))
        if scored.error is not None and not np.isnan(scored.error).all()
        else None,
        "ambiguity": ambiguity(found, with_public=prepared.scheme.k_pub > 0),
        "images": images,
    }


def ambiguity(found: Recovered, *, with_public: bool) -> dict[str, Any]:
    """What the explained encodings leave open, by theory, before any pixel is looked at."""
    known = (found.edges >= 0).all(1) & found.explained
    if not known.any():
        return {"n_equations": 0, "n_parts": 0, "n_coloops": 0, "log2_solutions": None}
    equations = Equations(found.edges[known], found.weights[known], len(found.status))
    what = determined(equations, with_public=with_public)
    solutions = what.n_solutions
    return {
        "n_equations": int(known.sum()),
        "n_parts": len(what.parts),
        "n_coloops": int(what.coloops.sum()),
        "log2_solutions": round(math.log2(solutions)) if 1 <= solutions < math.inf else None,
        "n_ambiguous": int(what.ambiguous.sum()),
        "n_free": int(what.free.sum()),
    }


def _n_false(scored: Scored) -> int:
    """Images that are called recovered and are not: no method should have any."""
    assert scored.found is not None
    assert scored.worst is not None
    called = np.array([s.value == "recovered" for s in scored.found.status])
    return int((called & ~(scored.worst <= SAME)).sum())


def scores_of(scored: Scored, k: int) -> dict[str, Any]:
    if scored.truth_of is None or scored.error is None:
        return {}
    assert scored.worst is not None
    assert scored.ssim is not None
    return {
        "truth": int(scored.truth_of[k]),
        "rms_error": _number(float(scored.error[k])),
        "worst_error": _number(float(scored.worst[k])),
        "ssim": _number(float(scored.ssim[k])),
    }


def _tensors(prepared: Prepared, device: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    challenge = prepared.challenge
    y = torch.from_numpy(challenge.encodings).flatten(1).to(device)
    public, labels = challenge.public, challenge.labels
    return (
        y,
        None if public is None else torch.from_numpy(public).flatten(1).to(device),
        None if labels is None else torch.from_numpy(labels.astype(np.float32)).to(device),
    )


def _distances(a: Float64[Tensor, "n d"], b: Float64[Tensor, "k d"]) -> Float64[Tensor, "n k"]:
    found: Tensor = torch.cdist(a, b)
    return found


def _ssim(
    a: Float64[Tensor, "n d"], b: Float64[Tensor, "n d"], shape: Sequence[int]
) -> npt.NDArray[np.float64]:
    """As pictures from 0 to 1; NaN where they are smaller than SSIM's window."""
    if min(shape[1:]) < SSIM_SIDE:
        return np.full(len(a), np.nan)
    first, second = (((x + 1) / 2).clamp(0, 1).float().reshape(-1, *shape) for x in (a, b))
    return np.asarray(2 * similarities(first, second).ssim - 1)


SSIM_SIDE = 11


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


def _mean(values: npt.NDArray[np.float64] | None) -> float | None:
    if values is None or np.isnan(values).all():
        return None
    return _number(float(np.nanmean(values)))


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
