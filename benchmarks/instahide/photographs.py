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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from benchmarks.instahide.oracles import (
    auc,
    grown_clusters,
    oracle_similarity,
    pairs_right,
    squares,
)
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.carlini import (
    alike_by_labels,
    edges_of_groups,
    independent_groups,
    recover_as_carlini,
)
from recon_core.attacks.instahide.coherence import (
    centred,
    coherence,
    pursued,
    whitened_windows,
    without_publics,
)
from recon_core.attacks.instahide.mixing import Encodings, InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.natural_fit import Practical
from recon_core.attacks.instahide.practical import recover_practically
from recon_core.attacks.instahide.recover import Recovered, Status, recover
from recon_core.attacks.instahide.similarity_network import SimilarityNetwork
from recon_core.similarity import similarities
from storage.sources.load import load_images

PHOTOGRAPHS = "instahide-photographs.png"
STRIPS = {
    "original": "private images",
    "learned-no-labels": "public images unknown,\nno labels (Carlini et al.)",
    "learned-labels": "public images unknown,\nlabels (Carlini et al.)",
    "practical-no-labels": "public images known,\nno labels (ours)",
    "practical-labels": "public images known,\nlabels (ours)",
}
"""Files in `instahide/strips`, and what they are called, from top to bottom."""
HALF_A_LEVEL = 1 / 255
"""Of pixels from -1 to 1."""
SHOWN = 16
"""Private images that pictures show."""
N_THREADS = 2


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
    few = replace(network.training, n_steps=4, batch_size=16)
    return Sizes(
        n=8, p=20, n_others=60, n_model=80, side=16, seeds=(0,),
        scheme=InstaHide(k_pub=2, n_epochs=20), network=replace(network, training=few),
        practical=Practical(n_rounds=2),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Photographs in [-1, 1], different ones for every purpose, and encodings of the private ones;
    `setting` in words."""

    shape: tuple[int, int, int]
    private: Float[Tensor, "n d"]
    public: Float[Tensor, "p d"]
    others: Float[Tensor, "q d"]
    scheme: Scheme
    encodings: Encodings
    setting: str

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
        source, _colon, path = data.partition(":")
        name = f"{source} {Path(path).name}" if path else source
        setting = (
            f"{sizes.n} images of {name}, {sizes.side}x{sizes.side}, {len(made.y)} encodings with "
            f"{sizes.scheme.k_pub} of {sizes.p} public images"
        )
        shape = (3, sizes.side, sizes.side)
        return cls(shape, private, public, others, sizes.scheme, made, setting)

    def in_the_model(self, m: int) -> tuple[Case, Mixing]:
        """The same images in m encodings of the InstaHide paper's model, with one weight for all
        images, in units of their standard deviation."""
        both = torch.cat([self.private, self.public]).double()
        mean, sd = both.mean(), both.std()
        mixing = Mixing.as_a_whole(self.scheme.k_pub)
        private, public = ((x.double() - mean) / sd for x in (self.private, self.public))
        made = mixing.encode(private, public, m, generator=torch.Generator().manual_seed(0))
        case = replace(self, private=private, public=public, scheme=mixing, encodings=made)
        return case, mixing


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
    distances = torch.cdist(images.nan_to_num(0.0), truth).numpy()
    return torch.from_numpy(linear_sum_assignment(distances)[1])


def similarity(run: Run) -> Iterator[Finding]:
    """Every statistic by its AUC, and by what Carlini et al.'s attack makes of it."""
    torch.set_num_threads(N_THREADS)
    sizes = sizes_of(run)
    case = Case.drawn(run.data, sizes, sizes.seeds[0])
    e, typical = case.encodings, case.others.mean(0).double()
    start = time.perf_counter()
    network = replace(sizes.network, scheme=sizes.scheme).train(
        case.others.reshape(-1, *case.shape)
    )
    trained_s = time.perf_counter() - start
    white, theirs = whitened_windows(case.shape, e.y, case.public)
    pursuit = pursued(e.y, case.shape, case.public, largest=case.scheme.largest)
    scores = {
        "squares": squares(e.y),
        "coherence": coherence(white),
        "learned": centred(network.scores(e.y)),
        "pursuit": centred(pursuit.scores),
    }
    aucs = {name: auc(found, e.private) for name, found in scores.items()}
    aucs["pursuit, true public images"] = auc(with_true_publics(case, white, theirs), e.private)
    yield Finding(
        claim="Ours: which photographs share an image shows once windows' signs are minded",
        where="ours; Gram matrix of section 3.1",
        theirs="squares of pixels, for independent normal ones",
        ours=f"{case.setting}; AUC: "
        + ", ".join(f"{name} {value:.3f}" for name, value in aucs.items())
        + "; public images in the right encodings by pursuit "
        f"{supports(case, pursuit.coefficients):.1%}",
        holds=aucs["squares"] < aucs["coherence"] < aucs["learned"] < aucs["pursuit"],
        rule="squares below coherence, below the learned similarity, below what public images that "
        "are found leave",
    )
    oracle = oracle_similarity(e.private, noise=1.0, generator=torch.Generator().manual_seed(0))
    outcomes: dict[str, Outcome] = {}
    for name, found in {**scores, "oracle, noise 1": oracle}.items():
        for labels, named in ((None, "no labels"), (e.labels, "labels")):
            attack = partial(recover_as_carlini, mixing=case.scheme, scores=found, typical=typical)
            outcomes[f"{name}, {named}"], images = _attacked(case, attack, labels=labels)
            if name == "learned":
                _keep(run, case, f"learned-{named.replace(' ', '-')}", images)
    _record(run, "similarity", outcomes, auc=aucs, training_seconds=round(trained_s, 1))
    yield Finding(
        claim="Carlini et al.: with a learned similarity private images can be made out, public "
        "images unknown",
        where="Carlini et al. 2020, section 4; InstaHide paper, appendix B",
        theirs="all 100 private images of the challenge, to the eye",
        ours=f"{case.setting}, network trained on {len(case.others)} other photographs in "
        f"{trained_s:.0f} s: "
        + "; ".join(f"{name}: {found.said}" for name, found in outcomes.items()),
        holds=outcomes["learned, labels"].correlation >= 0.5,
        rule="with the learned similarity and labels a median correlation of .5 or more with the "
        "true images",
    )
    alike, n, drawn = alike_by_labels(scores["learned"], e.labels), sizes.n, torch.Generator()
    cores = {
        "independent": independent_groups(alike, n, generator=drawn.manual_seed(0)) > 0,
        "growth": grown_clusters(alike, n, generator=drawn.manual_seed(0)),
    }
    pairs = {}
    for name, core in cores.items():
        edges = edges_of_groups(alike, core.float(), e.labels)[0]
        pairs[name] = pairs_right(edges.numpy(), e.private, n)
    yield Finding(
        claim="Ours: independent components find more pairs than grown clusters",
        where="ours; beside Carlini et al. 2020, sections 4.2 and 4.3",
        theirs="clusters grown from every encoding, k-means, minimum cost flow",
        ours="learned similarity, labels; pairs right: "
        + "; ".join(f"{name}, flow {value:.1%}" for name, value in pairs.items()),
        holds=pairs["independent"] > pairs["growth"],
        rule="more pairs than grown clusters, both by flow",
    )


def photographs(run: Run) -> Iterator[Finding]:
    """The practical attack, with and without labels, and the exact one on the same photographs."""
    torch.set_num_threads(N_THREADS)
    sizes = sizes_of(run)
    cases = [Case.drawn(run.data, sizes, seed) for seed in sizes.seeds]
    first = cases[0]
    outcomes: dict[str, Outcome] = {}

    def attacked(case: Case, name: str, labels: Tensor | None) -> str:
        attack = partial(
            recover_practically, mixing=case.scheme, public=case.public, how=sizes.practical
        )
        outcomes[name], images = _attacked(case, attack, labels=labels)
        if case is first:
            _keep(run, case, f"practical-{'no-' if labels is None else ''}labels", images)
        o = outcomes[name]
        return f"{name}: {o.exact} of {sizes.n} exact, {o.false} false, {o.said}, {o.seconds:.0f} s"

    texts = [
        attacked(case, f"labels, seed {seed}", case.encodings.labels)
        for seed, case in zip(sizes.seeds, cases, strict=True)
    ]
    yield Finding(
        claim="Ours: photographs come back to the grey level when public images are known",
        where="ours; the challenge of section 1",
        theirs="proved for independent normal pixels only",
        ours=f"{first.setting}: " + "; ".join(texts),
        holds=all(o.exact == sizes.n and not o.false for o in outcomes.values()),
        rule=f"all {sizes.n} images within half a grey level at every pixel, with every seed, none "
        "called recovered that is not",
    )
    name = f"no labels, seed {sizes.seeds[0]}"
    text = attacked(first, name, None)
    yield Finding(
        claim="Ours: labels are not needed for that",
        where="ours",
        theirs="the paper has no labels; Carlini et al. use them",
        ours=f"{first.setting}: {text}",
        holds=outcomes[name].exact == sizes.n and not outcomes[name].false,
        rule="the same without labels",
    )
    model, mixing = first.in_the_model(sizes.n_model)
    start = time.perf_counter()
    found = recover(
        model.encodings.y,
        mixing,
        public=model.public,
        n_private=sizes.n,
        generator=torch.Generator().manual_seed(0),
    )
    exact = Outcome.of(found, model, time.perf_counter() - start, same=1e-3)
    outcomes["exact attack, weights of the model"] = exact
    _record(run, "photographs", outcomes)
    yield Finding(
        claim="Ours: what is proved for normal pixels does not hold for photographs",
        where="ours; section 4 leaves it open",
        theirs="the Gram matrix of photographs is left open",
        ours=f"the exact attack on the same images, standardised, in {sizes.n_model} encodings of "
        f"the model with {mixing.k_pub} public images each: pairs {exact.pairs:.1%}, "
        f"{exact.exact} of {sizes.n} images, {exact.false} falsely called recovered",
        holds=exact.pairs < 0.5,
        rule="fewer than half of the pairs right, where of normal pixels all are",
    )


def _attacked(case: Case, attack: Any, **given: Any) -> tuple[Outcome, Float64[Tensor, "n d"]]:
    """The outcome of an attack on the case, and the images."""
    start = time.perf_counter()
    found = attack(
        case.encodings.y,
        case.shape,
        n_private=len(case.private),
        generator=torch.Generator().manual_seed(0),
        **given,
    )
    return Outcome.of(found, case, time.perf_counter() - start), found.images


def with_true_publics(
    case: Case, white: Float[Tensor, "w m k"], theirs: Float[Tensor, "w p k"]
) -> Float[Tensor, "m m"]:
    """What pursuit would score if it found all public images and their weights."""
    e = case.encodings
    true = torch.zeros(len(e.y), len(case.public)).scatter_(1, e.public, e.public_weights)
    return centred(without_publics(true, white, theirs).scores)


def supports(case: Case, coefficients: Float[Tensor, "m p"]) -> float:
    """The share of encodings' public images that are among the k_pub of the largest weight."""
    best = coefficients.topk(case.scheme.k_pub, dim=1).indices
    return float((best[:, :, None] == case.encodings.public[:, None]).any(1).float().mean())


def _record(run: Run, name: str, outcomes: Mapping[str, Outcome], **more: object) -> None:
    if run.folder is not None:
        path = run.folder / "instahide" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {key: {k: round(v, 4) for k, v in vars(o).items()} for key, o in outcomes.items()}
        path.write_text(json.dumps({**more, "outcomes": rows}, indent=1) + "\n")


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


def draw_photographs(folder: Path) -> None:
    """The picture in `folder`, of the strips in its `instahide/strips`, once all are there."""
    paths = {folder / "instahide" / "strips" / f"{key}.png": text for key, text in STRIPS.items()}
    if not all(path.is_file() for path in paths):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 2.9), dpi=150, layout="constrained")
    for axes, (path, text) in zip(figure.subplots(len(paths)), paths.items(), strict=True):
        axes.imshow(np.asarray(Image.open(path)), interpolation="nearest")
        axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    figure.savefig(folder / PHOTOGRAPHS, metadata={"Software": None})
