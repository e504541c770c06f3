"""InstaHide's challenge on photographs: how far every statistic and every attack gets.

Two parts of `benchmarks.papers.instahide`, on images of `--data`. The setting is the challenge's:
100 private images, 50 encodings of each, 4 of 1,000 public images in every one, random
coefficients, labels. `similarity` asks which encodings seem to have an image in common, by every
statistic, and what that is worth: pairs, and images as Carlini et al. find them. `photographs` runs
the practical attack, which knows the public images. Both keep the same private images as they find
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from benchmarks.instahide.figure import draw_photographs
from benchmarks.instahide.oracles import auc, oracle_similarity
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.carlini import Carlini, recover_as_carlini
from recon_core.attacks.instahide.coherence import centred, gradient_windows, whitening
from recon_core.attacks.instahide.descent import Descent
from recon_core.attacks.instahide.groups import Components, Growth
from recon_core.attacks.instahide.line_graph import incidence_of
from recon_core.attacks.instahide.mixing import Encodings, InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.pair_statistics import (
    STATISTICS,
    Seen,
    left_by,
    likeness,
    pursued,
)
from recon_core.attacks.instahide.practical import Practical, recover_practically
from recon_core.attacks.instahide.recover import Recovered, Status, recover
from recon_core.attacks.instahide.similarity_network import Similarity, SimilarityNetwork
from recon_core.similarity import similarities
from storage.sources.load import load_images

HALF_A_LEVEL = 1 / 255
"""Of pixels from -1 to 1."""
SHOWN = 16
"""Private images that pictures show."""
N_THREADS = 2
ORACLE_NOISE = 1.0
TRUE_PUBLICS = "pursuit, true public images"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the challenge. `n_others`: photographs that the network is trained on. `n_model`:
    encodings that the model of the InstaHide paper makes of the same images, for the exact
    attack."""

    n: int = 100
    p: int = 1000
    n_others: int = 4000
    n_model: int = 1000
    side: int = 32
    seeds: tuple[int, ...] = (0, 1)
    scheme: InstaHide = field(default_factory=InstaHide)
    network: SimilarityNetwork = field(default_factory=SimilarityNetwork)
    practical: Practical = field(default_factory=Practical)


def sizes_of(run: Run) -> Sizes:
    """The challenge's, or small ones."""
    if not run.quick:
        return Sizes()
    network = SimilarityNetwork(width=8, deep_width=8, n_private=6, n_calibration=40)
    training = replace(network.training, n_steps=4, batch_size=16)
    practical = Practical()
    return Sizes(
        n=8,
        p=20,
        n_others=60,
        n_model=80,
        side=16,
        seeds=(0,),
        scheme=InstaHide(k_pub=2, n_epochs=20),
        network=replace(network, training=training),
        practical=replace(practical, refinement=replace(practical.refinement, n_rounds=2)),
    )


@dataclass(frozen=True)
class Case:
    """Photographs in [-1, 1], different ones for every purpose, and encodings of the private ones;
    `classes`: one-hot."""

    shape: tuple[int, int, int]
    private: Float[Tensor, "n d"]
    public: Float[Tensor, "p d"]
    others: Float[Tensor, "q d"]
    classes: Float[Tensor, "n n_classes"]
    scheme: Scheme
    encodings: Encodings

    @classmethod
    def drawn(cls, data: str, sizes: Sizes, seed: int) -> Case:
        """Raises ValueError if `data` has too few images."""
        found = load_images(data, split="train", size=sizes.side)
        wanted = sizes.n + sizes.p + sizes.n_others
        if len(found.images) < wanted:
            raise ValueError(
                f"{data} has {len(found.images)} images; {wanted} are needed: give --data"
            )
        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randperm(len(found.images), generator=drawn)[:wanted].numpy()
        images = torch.from_numpy(found.images[ids]).flatten(1).float() * (2 / 255) - 1
        private, public, others = images.split([sizes.n, sizes.p, sizes.n_others])
        labels = torch.from_numpy(found.labels[ids[: sizes.n]])
        classes = functional.one_hot(labels, len(found.class_names)).float()
        made = sizes.scheme.encode(private, public, generator=drawn, labels=classes)
        shape = (3, sizes.side, sizes.side)
        return cls(shape, private, public, others, classes, sizes.scheme, made)

    def in_the_model(self, m: int) -> Case:
        """The same images in m encodings of the InstaHide paper's model, with one weight for all
        images, in units of their standard deviation."""
        both = torch.cat([self.private, self.public]).double()
        mean, sd = both.mean(), both.std()
        mixing = Mixing.as_a_whole(self.scheme.k_pub)
        private, public = ((x.double() - mean) / sd for x in (self.private, self.public))
        made = mixing.encode(private, public, m, generator=torch.Generator().manual_seed(0))
        return replace(self, private=private, public=public, scheme=mixing, encodings=made)

    def seen(self, network: Similarity | None = None) -> Seen:
        largest = self.scheme.largest if isinstance(self.scheme, InstaHide) else self.scheme.wa
        return Seen(self.encodings.y, self.shape, self.public, largest, network)

    def labels(self, given: bool) -> Float[Tensor, "m n_classes"] | None:
        return self.encodings.labels if given else None


@dataclass(frozen=True)
class Outcome:
    """Recovery of one case. `pairs`: the share of encodings with both images right. Medians over
    private images of the correlation of pixels with the true ones and of SSIM in [-1, 1]; `exact`
    images are within half a grey level; `false` ones are called recovered and are not."""

    pairs: float
    correlation: float
    ssim: float
    exact: int
    false: int
    seconds: float

    @classmethod
    def of(
        cls, found: Recovered, case: Case, seconds: float, same: float = HALF_A_LEVEL
    ) -> Outcome:
        """NaN images count as grey: of a correlation and an SSIM of 0."""
        truth = case.private.double()
        ids = matched(found.images, truth)
        mine = found.images.nan_to_num(0.0)
        own, true = mine - mine.mean(1, keepdim=True), truth[ids]
        theirs = true - true.mean(1, keepdim=True)
        alike = (own * theirs).sum(1) / (own.norm(dim=1) * theirs.norm(dim=1)).clamp(min=1e-12)
        pictures = (
            ((x.float() + 1) / 2).clamp(0, 1).reshape(-1, *case.shape) for x in (mine, true)
        )
        structure = 2 * similarities(*pictures).ssim - 1
        exact = np.asarray((found.images - true).abs().amax(1) <= same)
        called = np.array([status is Status.RECOVERED for status in found.status])
        return cls(
            pairs=pairs_right(found.edges, case.encodings.private, len(truth)),
            correlation=float(alike.median()),
            ssim=float(structure.median()),
            exact=int(exact.sum()),
            false=int((called & ~exact).sum()),
            seconds=round(seconds, 1),
        )

    @property
    def said(self) -> str:
        return f"pairs {self.pairs:.1%}, correlation {self.correlation:.2f}, SSIM {self.ssim:.2f}"


def matched(images: Float64[Tensor, "n d"], truth: Float64[Tensor, "n d"]) -> Int64[Tensor, " n"]:
    """The true image of each, all distances together the least."""
    ids: Int64[Tensor, " n"] = torch.from_numpy(
        linear_sum_assignment(torch.cdist(images.nan_to_num(0.0), truth).numpy())[1]
    )
    return ids


def pairs_right(edges: Int64[np.ndarray, "m 2"], private: Int64[Tensor, "m 2"], n: int) -> float:
    """The share of encodings with both images right, found images renamed for most to be."""
    known, true = (edges >= 0).all(1), private.numpy()
    if not known.any():
        return 0.0
    alike = incidence_of(edges[known], n).T @ incidence_of(true[known], n)
    named = linear_sum_assignment(-alike)[1]
    right: Bool[np.ndarray, " k"] = (
        np.sort(named[edges[known]], axis=1) == np.sort(true[known], axis=1)
    ).all(1)
    return float(right.sum() / len(edges))


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def similarity(run: Run) -> Iterator[Finding]:
    """Every statistic by its AUC, and by what Carlini et al.'s attack makes of it."""
    with _threads(N_THREADS):
        yield from _similarity(run)


def _similarity(run: Run) -> Iterator[Finding]:
    sizes = sizes_of(run)
    case = Case.drawn(run.data, sizes, sizes.seeds[0])
    learning = case.others.reshape(-1, *case.shape)
    start = time.perf_counter()
    network = replace(sizes.network, scheme=sizes.scheme).train(learning)
    trained_s = time.perf_counter() - start
    scores = {name: likeness(name, case.seen(network)) for name in STATISTICS}
    edges = case.encodings.private
    aucs = {name: auc(found, edges) for name, found in scores.items()}
    aucs[TRUE_PUBLICS] = auc(_with_true_publics(case), edges)
    setting = _setting(case, run)
    yield Finding(
        claim="Ours: which photographs share an image shows once windows' signs are minded",
        where="ours; Gram matrix of section 3.1",
        theirs="squares of pixels, for independent normal ones",
        ours=f"{setting}; AUC: "
        + ", ".join(f"{name} {value:.3f}" for name, value in aucs.items())
        + f"; public images in the right encodings by pursuit {_supports(case):.1%}",
        holds=aucs["squares"] < aucs["coherence"] < aucs["learned"] < aucs["pursuit"],
        rule="squares below coherence, below the learned similarity, below what public images that "
        "are found leave",
    )
    oracle = oracle_similarity(
        edges, noise=ORACLE_NOISE, generator=torch.Generator().manual_seed(0)
    )
    shown = {name: scores[name] for name in ("squares", "coherence", "learned", "pursuit")}
    outcomes: dict[str, Outcome] = {}
    for name, found in {**shown, f"oracle, noise {ORACLE_NOISE:g}": oracle}.items():
        for given in (False, True):
            named = f"{name}, {'labels' if given else 'no labels'}"
            outcomes[named], images = _as_carlini(case, found, given, network.typical.flatten())
            if name == "learned":
                _keep(run, case, f"learned-{'labels' if given else 'no-labels'}", images)
    _record(run, "similarity", outcomes, auc=aucs, training_seconds=round(trained_s, 1))
    best = outcomes["learned, labels"]
    yield Finding(
        claim="Carlini et al.: with a learned similarity private images can be made out, public "
        "images unknown",
        where="Carlini et al. 2020, section 4; InstaHide paper, appendix B",
        theirs="all 100 private images of the challenge, to the eye",
        ours=f"{setting}, network trained on {len(case.others)} other photographs in "
        f"{trained_s:.0f} s: "
        + "; ".join(f"{name}: {found.said}" for name, found in outcomes.items()),
        holds=best.correlation >= 0.5,
        rule="with the learned similarity and labels a median correlation of .5 or more with the "
        "true images",
    )
    yield _steps(case, scores["learned"])


def _as_carlini(
    case: Case, scores: Tensor, given: bool, typical: Tensor, how: Carlini | None = None
) -> tuple[Outcome, Float64[Tensor, "n d"]]:
    """Of scores alone the common sign is open: the side of `typical`, as with a network."""
    start = time.perf_counter()
    found = recover_as_carlini(
        case.encodings.y,
        case.shape,
        n_private=len(case.private),
        mixing=case.scheme,
        labels=case.labels(given),
        scores=scores,
        generator=torch.Generator().manual_seed(0),
        how=how,
    )
    if float((found.images.nanmean(0) * typical.double()).sum()) < 0:
        found = replace(found, images=-found.images)
    return Outcome.of(found, case, time.perf_counter() - start), found.images


def _steps(case: Case, learned: Tensor) -> Finding:
    """Groups and assignment of the paper beside ours, of the same scores."""
    shares = {}
    for groups in (Components(), Growth()):
        for assignment in ("flow", "greedy"):
            how = Carlini(groups=groups, assignment=assignment, descent=Descent(n_steps=1))
            found, _images = _as_carlini(case, learned, True, case.public.mean(0), how)
            shares[f"{groups.kind}, {assignment}"] = found.pairs
    return Finding(
        claim="Ours: independent components find more pairs than grown clusters",
        where="ours; beside Carlini et al. 2020, sections 4.2 and 4.3",
        theirs="clusters grown from every encoding, k-means, minimum cost flow",
        ours="learned similarity, labels; pairs right: "
        + "; ".join(f"{name} {value:.1%}" for name, value in shares.items()),
        holds=shares["independent, flow"] > shares["growth, flow"],
        rule="more pairs than grown clusters, both by flow",
    )


def photographs(run: Run) -> Iterator[Finding]:
    """The practical attack, with and without labels, and the exact one on the same photographs."""
    with _threads(N_THREADS):
        yield from _photographs(run)


def _photographs(run: Run) -> Iterator[Finding]:
    sizes = sizes_of(run)
    outcomes: dict[str, Outcome] = {}
    setting = ""
    for seed in sizes.seeds:
        case = Case.drawn(run.data, sizes, seed)
        setting = setting or _setting(case, run)
        name = f"labels, seed {seed}"
        outcomes[name], images = _practical(case, sizes, labels=True)
        if seed == sizes.seeds[0]:
            _keep(run, case, "practical-labels", images)
    yield Finding(
        claim="Ours: photographs come back to the grey level when public images are known",
        where="ours; the challenge of section 1",
        theirs="proved for independent normal pixels only",
        ours=f"{setting}: " + "; ".join(_exactly(name, o, sizes.n) for name, o in outcomes.items()),
        holds=all(o.exact == sizes.n and not o.false for o in outcomes.values()),
        rule=f"all {sizes.n} images within half a grey level at every pixel, with every seed, none "
        "called recovered that is not",
    )
    case = Case.drawn(run.data, sizes, sizes.seeds[0])
    name = f"no labels, seed {sizes.seeds[0]}"
    outcomes[name], images = _practical(case, sizes, labels=False)
    _keep(run, case, "practical-no-labels", images)
    yield Finding(
        claim="Ours: labels are not needed for that",
        where="ours",
        theirs="the paper has no labels; Carlini et al. use them",
        ours=f"{setting}: {_exactly(name, outcomes[name], sizes.n)}",
        holds=outcomes[name].exact == sizes.n and not outcomes[name].false,
        rule="the same without labels",
    )
    model = case.in_the_model(sizes.n_model)
    outcomes["exact attack, weights of the model"] = exact = _exact(model)
    _record(run, "photographs", outcomes)
    yield Finding(
        claim="Ours: what is proved for normal pixels does not hold for photographs",
        where="ours; section 4 leaves it open",
        theirs="the Gram matrix of photographs is left open",
        ours=f"the exact attack on the same images, standardised, in {sizes.n_model} encodings of "
        f"the model with {model.scheme.k_pub} public images each: pairs {exact.pairs:.1%}, "
        f"{exact.exact} of {sizes.n} images, {exact.false} falsely called recovered",
        holds=exact.pairs < 0.5,
        rule="fewer than half of the pairs right, where of normal pixels all are",
    )


def _practical(case: Case, sizes: Sizes, *, labels: bool) -> tuple[Outcome, Float64[Tensor, "n d"]]:
    start = time.perf_counter()
    found = recover_practically(
        case.encodings.y,
        case.shape,
        mixing=case.scheme,
        public=case.public,
        n_private=len(case.private),
        labels=case.labels(labels),
        generator=torch.Generator().manual_seed(0),
        how=sizes.practical,
    )
    return Outcome.of(found, case, time.perf_counter() - start), found.images


def _exact(case: Case) -> Outcome:
    assert isinstance(case.scheme, Mixing)
    start = time.perf_counter()
    found = recover(
        case.encodings.y,
        case.scheme,
        public=case.public,
        n_private=len(case.private),
        generator=torch.Generator().manual_seed(0),
    )
    return Outcome.of(found, case, time.perf_counter() - start, same=1e-3)


def _with_true_publics(case: Case) -> Tensor:
    """What pursuit would score if it found all public images and their weights."""
    seen, e = case.seen(), case.encodings
    cut = gradient_windows(seen.y, seen.shape, seen.windows)
    whiten = whitening(cut, seen.windows)
    theirs = gradient_windows(case.public, seen.shape, seen.windows) @ whiten
    true = torch.zeros(len(e.y), len(case.public)).scatter_(1, e.public, e.public_weights)
    return centred(left_by(true, cut @ whiten, theirs, seen.search.noise).scores)


def _supports(case: Case) -> float:
    """The share of encodings' public images that are among the k_pub of the largest weight."""
    found = pursued(case.seen(), case.public).coefficients
    best = found.topk(case.scheme.k_pub, dim=1).indices
    hit = (best[:, :, None] == case.encodings.public[:, None]).any(1)
    return float(hit.float().mean())


def _exactly(name: str, found: Outcome, n: int) -> str:
    return (
        f"{name}: {found.exact} of {n} exact, {found.false} false, {found.said}, "
        f"{found.seconds:.0f} s"
    )


def _setting(case: Case, run: Run) -> str:
    source = run.data.partition(":")[0]
    name = "" if source == run.data else " " + Path(run.data.partition(":")[2]).name
    return (
        f"{len(case.private)} images of {source}{name}, {case.shape[1]}x{case.shape[2]}, "
        f"{len(case.encodings.y)} encodings with {case.scheme.k_pub} of {len(case.public)} public "
        "images"
    )


def _record(run: Run, name: str, outcomes: Mapping[str, Outcome], **more: object) -> None:
    if run.folder is None:
        return
    path = run.folder / "instahide" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {key: {k: _rounded(v) for k, v in vars(o).items()} for key, o in outcomes.items()}
    path.write_text(json.dumps({**more, "outcomes": rows}, indent=1) + "\n")


def _rounded(value: float | int) -> float | int:
    return round(value, 4) if isinstance(value, float) else value


def _keep(run: Run, case: Case, name: str, images: Float64[Tensor, "n d"]) -> None:
    """The first private images, and under what name they came back how, as strips of pictures."""
    if run.folder is None:
        return
    truth = case.private.double()
    place = matched(images, truth).argsort()
    folder = run.folder / "instahide" / "strips"
    folder.mkdir(parents=True, exist_ok=True)
    for key, rows in (("original", truth), (name, images[place].nan_to_num(0.0))):
        levels = ((rows[:SHOWN] + 1) * 127.5).clamp(0, 255).round().to(torch.uint8)
        strip = levels.reshape(-1, *case.shape).permute(2, 0, 3, 1).flatten(1, 2)
        Image.fromarray(strip.numpy()).save(folder / f"{key}.png")
    draw_photographs(run.folder)
