"""Victims of an audit: those of a cell are trained at once.

Of a cell's victims `weights/K` are tensors (victims, ...) as they are released, `start/K` those of
the first layer that training began with; `rows/K` (victims, m, e) what a span attack takes apart in
place of weights, an optimiser's state or gradients, and the weights in it, if any; `confidence`
(victims, pool) is how sure the released network is of each image's label, `correct` (victims,
tests) whether it is right.

The price of an autoencoder is the share of the variance that it explains of images it never saw,
and its confidence in an image minus the logarithm of its mean squared error.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.span.rows import SpanRows, state_rows
from recon_core.leakage import confidence
from recon_core.precision import float32_arithmetic
from recon_core.threads import share_of
from recon_core.types import Progress, seeded_generator
from recon_core.victims.autoencoder import Weights, initial_weights
from recon_core.victims.autoencoder_training import train_autoencoders
from recon_core.victims.network import Architecture, Parameters, Released
from recon_core.victims.noisy_training import train_with_noise
from recon_core.victims.training import train
from tasks.audit.recipe import AutoencoderRecipe, VictimRecipe
from tasks.study.products import Arrays, Ids, Job, Pixels, hash_of, key_of

ROWS = 2000
"""Pictures that are scored at once."""
LEAST_ERROR = 1e-30
Members = npt.NDArray[np.bool_]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images uint8 (n, c, h, w), labels as a victim has them, and rows of their source."""

    images: Pixels
    labels: Ids
    rows: Ids

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, keep: npt.NDArray[np.bool_] | Ids) -> Pictures:
        return Pictures(self.images[keep], self.labels[keep], self.rows[keep])


@dataclass(frozen=True, kw_only=True)
class Given:
    """A network that is there already: `arrays` as in a product, of one victim, and `std` (c, 1,
    1), by which its images less their mean are divided. `mean_known`: false where nobody said what
    was subtracted. `gives_gradients`: its rows are gradients, which are published in place of its
    weights."""

    arrays: Arrays
    std: npt.NDArray[np.float32]
    mean_known: bool = True
    gives_gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class VictimsJob(Job):
    """The victims of a cell, centred by the mean of their images; private ones by the tests'.

    `members` (victims, pool): what each learns of the pool, of which victims 2k and 2k + 1 have
    half each; `public`: what students learn; `given`: the one victim, which is not trained.
    `networks_of`: the key of a cell that has trained the same networks, whose product is taken if
    it is there: it changes no bit.
    """

    recipe: VictimRecipe
    pool: Pictures
    members: Members
    tests: Pictures
    public: Pictures | None
    noise_multiplier: float
    seed: int
    given: Given | None = None
    networks_of: str = ""

    @property
    def key(self) -> str:
        images = [hash_of(p.images, p.labels) for p in (self.pool, self.tests)]
        public = None if self.public is None else hash_of(self.public.images, self.public.labels)
        recipe, noise = asdict(self.recipe), round(self.noise_multiplier, 9)
        body = ["audit victims", recipe, images, public, hash_of(self.members), noise, self.seed]
        if (given := self.given) is not None:
            body += [hash_of(*given.arrays.values(), given.std), [*given.arrays], given.mean_known]
        return key_of(body)

    @property
    def training_key(self) -> str:
        """A key shared by jobs whose networks are the same at the end of training."""
        recipe = self.recipe if self.given is not None else self.recipe.as_trained
        return replace(self, recipe=recipe, public=None).key

    @property
    def shape(self) -> tuple[int, int, int]:
        return shape_of(self.pool)

    @property
    def architecture(self) -> Architecture:
        return self.recipe.architecture(self.shape)

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        started, device = time.perf_counter(), torch.device(self.device)
        with float32_arithmetic("float32", device):
            if self.recipe.autoencoder is not None:
                arrays = self._autoencoders(self.recipe.autoencoder, device, progress)
            else:
                arrays = self._classifiers(device, progress)
        seconds = (time.perf_counter() - started) / len(self.members)
        made = {name: np.asarray(tensor.cpu()) for name, tensor in arrays.items()}
        return made, {"seconds": round(seconds, 3)}

    def _classifiers(self, device: torch.device, progress: Progress) -> dict[str, Tensor]:
        made = self._networks(device, progress)
        given, rows = self._parameters(made), numbered(made, "rows")
        drawn = self._drawn("released weights")
        if self.given is not None and self.given.gives_gradients:
            rows = list(self.recipe.released.of(Parameters((rows[0],), (None,)), drawn).weights)
        elif self.recipe.cut is None:
            given = self.recipe.released.of(given, drawn)
            rows = rows if self.recipe.gives_state else []
        arrays = {n: t for n, t in made.items() if n.startswith(("start/", "mean", "diverged"))}
        arrays |= named("weights", given.tensors()) | named("rows", rows)
        return arrays | self._asked(given, made["mean"])

    def _parameters(self, arrays: Mapping[str, Tensor]) -> Parameters:
        like = self.architecture.initial([torch.Generator()], dtype=torch.float32)
        return like.like(numbered(arrays, "weights"))

    def _autoencoders(
        self, recipe: AutoencoderRecipe, device: torch.device, progress: Progress
    ) -> dict[str, Tensor]:
        cached = self._cached(device)
        if cached is None:
            images, orders = self._learned()[0].to(device), self._drawn("minibatches")
            model = recipe.network.on(self.shape)
            begun = initial_weights(model, self._drawn("victim"), dtype=torch.float32)
            trained = train_autoencoders(
                model, {name: tensor.to(device) for name, tensor in begun.items()}, images,
                training=recipe.training, progress=progress,
                shuffle=lambda run, _: torch.randperm(images.shape[1], generator=orders[run]),
            )  # fmt: skip
            ends = [one.last.weights for one in trained]
            weights = {name: torch.cat([end[name] for end in ends]) for name in ends[0]}
            diverged = torch.tensor([one.diverged for one in trained])
        else:
            weights, diverged = under(cached, "weights/"), cached["diverged"]
        weights = released_weights(weights, self.recipe.released, self._drawn("released weights"))
        pool, tests = (unit_pictures(some).to(device) for some in (self.pool, self.tests))
        arrays = {f"weights/{name}": tensor for name, tensor in weights.items()}
        arrays |= answers(recipe, weights, pool, tests, torch.from_numpy(self.members))
        return arrays | {"diverged": diverged}

    def _cached(self, device: torch.device) -> dict[str, Tensor] | None:
        """The product of the cell that has trained the same networks, if there is one."""
        made = self.folder.product(self.networks_of) if self.networks_of else None
        return None if made is None else {name: on(device, a) for name, a in made[0].items()}

    def _networks(self, device: torch.device, progress: Progress) -> dict[str, Tensor]:
        """Read or train the networks, and their students where these are published: arrays as in a
        product, before anything is withheld or rounded."""
        if self.given is not None:
            made = {name: on(device, array) for name, array in self.given.arrays.items()}
            return made | {"diverged": torch.tensor([False])}
        cached = self._cached(device)
        if cached is None:
            first = share_of(progress, 0.0, 0.5 if self.recipe.distilled else 1.0)
            made = self._trained(*self._learned(), "", device, first)
        else:
            made = cached
        if not self.recipe.distilled:
            return made
        if self.public is None:
            raise ValueError("a student needs public images, and there are none")
        images = unit_pictures(self.public).expand(len(self.members), -1, -1, -1, -1)
        phi = self._outputs(self._parameters(made), images, made["mean"], "public")
        labels = ((phi[..., 0] > 0).long() if phi.shape[2] == 1 else phi.argmax(2)).cpu()
        return self._trained(images, labels, "student ", device, share_of(progress, 0.5, 1.0))

    @property
    def std(self) -> Float[Tensor, "c 1 1"] | float:
        """The divisor of images less their mean."""
        return 1.0 if self.given is None else on("cpu", self.given.std)

    def _learned(self) -> tuple[Float[Tensor, "r n c h w"], Tensor]:
        """Images that the victims learn, in all their views, and labels."""
        every, labels = unit_pictures(self.pool), torch.from_numpy(self.pool.labels)
        members = torch.from_numpy(self.members)
        images = torch.stack([every[own] for own in members])
        views = [images]
        for view in range(1, self.recipe.views):
            drawn = self._drawn(f"view {view}")
            moved = [_moved(*some, self.recipe.moved) for some in zip(images, drawn, strict=True)]
            views.append(torch.stack(moved))
        own = torch.stack([labels[own] for own in members])
        return torch.cat(views, 1), own.repeat(1, self.recipe.views)

    def _trained(
        self,
        images: Float[Tensor, "r n c h w"],
        labels: Tensor,
        role: str,
        device: torch.device,
        progress: Progress,
    ) -> dict[str, Tensor]:
        recipe, mean = self.recipe, images.mean(1)
        if recipe.private is not None:  # which no mean of private images may enter
            mean = unit_pictures(self.tests).mean(0).expand_as(mean)
        x = (images - mean[:, None]).flatten(2).to(device)
        y = labels.to(device)
        y = y if recipe.n_outputs > 1 else y.to(x) * 2 - 1
        start = self.architecture.initial(self._drawn(f"{role}victim"), dtype=torch.float32)
        start = start.map(lambda t: t.to(device))
        begun = [t.clone() for t in first_layer(start).tensors()]
        drawn = self._drawn(f"{role}minibatches")
        if recipe.is_noisy:
            noise = recipe.noise(self.noise_multiplier)
            trained = train_with_noise(
                self.architecture, start, x, y, training=recipe.training, noise=noise,
                generators=drawn, progress=progress,
            )  # fmt: skip
        else:
            trained = train(
                self.architecture, start, x, y, training=recipe.training, generators=drawn,
                progress=progress, defence=recipe.mixcon, defence_layer=recipe.cut,
            )  # fmt: skip
        rows: list[SpanRows] = []  # what the optimiser remembers of the first layer
        if trained.averages and recipe.victim.conv is None:
            for v in range(len(self.members)):
                own, weights = slice(v, v + 1), trained.parameters.rows(slice(v, v + 1))
                averages = [t[own] for t in trained.averages]
                decay = recipe.training.weight_decay
                rows.append(state_rows(averages, weights, weight_decay=decay))
        starts = [one.start for one in rows if one.start is not None]
        stacked = [torch.stack(some) for some in ([one.rows for one in rows], starts) if some]
        made = {"mean": mean, "diverged": trained.diverged} | named("start", begun)
        return made | named("weights", trained.parameters.tensors()) | named("rows", stacked)

    def _asked(self, given: Parameters, mean: Float[Tensor, "r c h w"]) -> dict[str, Tensor]:
        """Answers of the released networks about the pool and the tests."""
        recipe, n = self.recipe, len(self.members)
        found = {}
        for name, some in (("pool", self.pool), ("tests", self.tests)):
            phi = self._outputs(given, unit_pictures(some).expand(n, -1, -1, -1, -1), mean, name)
            labels = torch.from_numpy(some.labels).to(phi.device).expand(n, -1)
            y = labels if recipe.n_outputs > 1 else labels.to(phi) * 2 - 1
            if name == "pool":
                found["confidence"] = confidence(phi, y, recipe.training.loss.kind)
                found["margin"] = recipe.training.loss.margins(phi, y)
                learned = torch.from_numpy(self.members)
                right = (found["margin"].cpu() > 0) & learned
                found["train_accuracy"] = right.sum(1) / learned.sum(1)
            else:
                found["correct"] = recipe.training.loss.margins(phi, y) > 0
        return found

    def _outputs(
        self,
        parameters: Parameters,
        images: Float[Tensor, "r n c h w"],
        mean: Float[Tensor, "r c h w"],
        name: str,
    ) -> Float[Tensor, "r n o"]:
        """Outputs on images of that name; of a network with a cut from the features as sent."""
        like, cut, drawn = parameters.weights[0], self.recipe.cut, self._drawn(f"sent {name}")
        x = ((images - mean.cpu()[:, None]) / self.std).flatten(2).to(like)
        found = []
        for some in x.split(ROWS, 1):
            if cut is None:
                found.append(self.architecture.forward(parameters, some).output)
                continue
            features = self.architecture.features(parameters, some, cut)
            sent = sent_features(features, self.recipe, drawn)
            found.append(self.architecture.classify(parameters, sent, cut))
        return torch.cat(found, 1)

    def _drawn(self, purpose: str) -> list[torch.Generator]:
        """A generator of each victim, the same for all cells."""
        return [
            seeded_generator(self.seed, v, f"audit {purpose}") for v in range(len(self.members))
        ]


def sent_features(
    features: Float[Tensor, "r n m"], recipe: VictimRecipe, drawn: Sequence[torch.Generator]
) -> Float[Tensor, "r n m"]:
    """Features as clients send them: with noise in units of their root mean square, or rounded."""
    return recipe.released.of(Parameters((features,), (None,)), drawn).weights[0]


def first_layer(parameters: Parameters) -> Parameters:
    """The first layer alone."""
    return Parameters(parameters.weights[:1], parameters.biases[:1])


def unit_pictures(some: Pictures) -> Float[Tensor, "n c h w"]:
    return torch.from_numpy(some.images).float() / 255


def shape_of(some: Pictures | Tensor) -> tuple[int, int, int]:
    c, h, w = (some if isinstance(some, Tensor) else some.images).shape[1:]
    return c, h, w


def _moved(
    images: Float[Tensor, "n c h w"], generator: torch.Generator, most: int
) -> Float[Tensor, "n c h w"]:
    """Every image mirrored or not, and moved by up to `most` pixels each way, borders repeated."""
    flipped = torch.rand(len(images), generator=generator) < 0.5
    moves = torch.randint(-most, most + 1, (len(images), 2), generator=generator)
    h, w = images.shape[2:]
    rows = (torch.arange(h)[None] + moves[:, :1]).clamp(0, h - 1)
    columns = (torch.arange(w)[None] + moves[:, 1:]).clamp(0, w - 1)
    seen = torch.where(flipped[:, None, None, None], images.flip(3), images)
    at = torch.arange(len(images))[:, None, None]
    return seen.permute(0, 2, 3, 1)[at, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def released_weights(
    weights: Weights, released: Released, drawn: Sequence[torch.Generator]
) -> Weights:
    """The weights of autoencoders as they are given away, changed in the order of their names; a
    PReLU's one slope is a row of one."""
    names = sorted(weights)
    rows = tuple(w.unsqueeze(1) if w.dim() == 1 else w for w in map(weights.__getitem__, names))
    given = released.of(Parameters(rows, (None,) * len(rows)), drawn).weights
    return {
        name: changed.view_as(weights[name]) for name, changed in zip(names, given, strict=True)
    }


@torch.no_grad()
def answers(
    recipe: AutoencoderRecipe,
    weights: Weights,
    pool: Float[Tensor, "n c h w"],
    tests: Float[Tensor, "t c h w"],
    members: Bool[Tensor, "r n"],
) -> dict[str, Tensor]:
    """Confidences of R autoencoders in the pool, and the variance that they explain of their
    members and of the tests, of which every image has its share. A network that knows the mean
    image alone explains 0."""
    model = recipe.network.on(shape_of(pool))

    def errors(images: Tensor) -> Tensor:
        parts = [part.expand(len(members), -1, -1, -1, -1) for part in images.split(ROWS)]
        found = [(model.forward(weights, x) - x).square().flatten(2).mean(2) for x in parts]
        return torch.cat(found, 1) if found else images.new_zeros(len(members), 0)

    def variance(images: Tensor) -> Tensor:
        return (images - images.mean(0)).square().mean().clamp_min(LEAST_ERROR)

    of_pool, of_tests = errors(pool), errors(tests)
    own = zip(of_pool, members.to(pool.device), strict=True)
    confidence = -of_pool.clamp_min(LEAST_ERROR).log()
    return {
        "confidence": confidence,
        "margin": confidence,
        "train_accuracy": torch.stack(
            [1 - of_own[m].mean() / variance(pool[m]) for of_own, m in own]
        ),
        "correct": 1 - of_tests / variance(tests),
    }


def on(device: torch.device | str, array: npt.NDArray[Any]) -> Tensor:
    """A copy of an array on a device."""
    return torch.from_numpy(array.copy()).to(device)


def numbered(arrays: Mapping[str, T], name: str) -> list[T]:
    """Values of NAME/0, NAME/1, ..."""
    n = sum(key.startswith(f"{name}/") for key in arrays)
    return [arrays[f"{name}/{k}"] for k in range(n)]


def named(name: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"{name}/{k}": tensor for k, tensor in enumerate(tensors)}


def under(arrays: Mapping[str, T], prefix: str) -> dict[str, T]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
