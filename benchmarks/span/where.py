"""Where the span attack works: kinds of images, what the attacker has, how the network was trained.

    python -m benchmarks.span.where --cifar FOLDER --mnist FOLDER [--only TEXT] [--out DIR]

Every row trains a network of dense layers with torch's own layers and optimisers, saves it as
people do, and gives the files to `palimpsest.attack`. Each row is one setting away from a base: 200
colour images of 32x32, ten classes, layers of 1000 and 200 with biases and torch's start, inputs
divided by a standard deviation per channel, Adam in batches of 32, attacked by what a checkpoint
holds. Beside the images that came back stand as many other images of the same source, decoys, and
the mean image. Results go into `DIR/span-where.json` row by row, and a row that is there is not
computed again; the table of all is `DIR/span-where.md`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.record import hardware
from palimpsest import attack
from storage.files import write_json
from storage.sources.load import load_images

BATCH, EPOCHS = 32, 40
OPTIMISERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), 0.1),
    "SGD, momentum": lambda net: torch.optim.SGD(net.parameters(), 0.02, momentum=0.9),
    "SGD, momentum, decay 5e-4": lambda net: torch.optim.SGD(
        net.parameters(), 0.02, momentum=0.9, weight_decay=5e-4
    ),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), 1e-3),
    "Adam, decay 5e-4": lambda net: torch.optim.Adam(net.parameters(), 1e-3, weight_decay=5e-4),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), 1e-3),
}
SEEN = {"digits": 8000}
"""Pictures of a held-out split that the shipped separator learned from."""
HAS = ("checkpoint", "start known", "two checkpoints", "weights alone", "gradients")
"""What the attacker has beside the weights: a checkpoint with the optimiser's state, the weights
before training, those half-way, nothing, or the gradients of one batch of all images."""


@dataclass(frozen=True)
class Row:
    """A network, and what its attacker has. `start`: standard deviation of the first layer's start;
    None for torch's."""

    images: str = "CIFAR-10 (JPEG copy)"
    n: int = 200
    optimiser: str = "Adam"
    has: str = "checkpoint"
    start: float | None = None
    divided: bool = True

    @property
    def name(self) -> str:
        start = "" if self.start is None else f", start {self.start:g}"
        divided = "" if self.divided else ", not divided"
        return f"{self.images}, {self.n}, {self.optimiser}{start}{divided}, {self.has}"


def rows() -> Iterator[Row]:
    """The base, and what is one setting away from it or from the same with a known start."""
    base, known = Row(), Row(optimiser="SGD, momentum", has="start known")
    for row in (base, known):
        yield row
        yield from (replace(row, n=n) for n in (50, 100, 400))
        yield from (
            replace(row, images=images, n=n)
            for images in (
                "digits",
                "CIFAR-10 (JPEG copy) in grey",
                "photographs",
                "photographs, 64",
            )
            for n in (100, 200)
        )
        yield replace(row, images="digits", n=300)
        yield replace(row, divided=False)
    yield from (replace(base, optimiser=o) for o in OPTIMISERS if o != base.optimiser)
    yield from (replace(known, optimiser=o) for o in OPTIMISERS if o != known.optimiser)
    for optimiser in ("SGD, momentum", "Adam"):
        yield from (
            replace(base, optimiser=optimiser, has=has)
            for has in HAS
            if has not in ("checkpoint", "start known")
        )
    yield from (
        replace(known, optimiser="SGD", start=start, n=100, has=has)
        for start in (1e-4, 1e-3)
        for has in ("start known", "weights alone")
    )


def drawn(row: Row, sources: dict[str, str]) -> tuple[Tensor, Tensor, Tensor]:
    """(images, decoys as uint8 (n, c, h, w), classes of the images), by a fixed seed."""
    kind, side = row.images, 64 if row.images.endswith("64") else 32
    is_grey = kind == "digits" or kind.endswith("grey")
    source = sources["photos" if kind.startswith("photographs") else kind.split()[0]]
    size = 28 if kind == "digits" else side
    found = load_images(source, split="heldout", size=size, channels=1 if is_grey else 3)
    images, labels = found.images[SEEN.get(kind, 0) :], found.labels[SEEN.get(kind, 0) :]
    if 2 * row.n > len(images):
        raise ValueError(f"{row.name} needs {2 * row.n} pictures, and {source} has {len(images)}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: 2 * row.n]
    pictures = torch.from_numpy(images)[order]
    return pictures[: row.n], pictures[row.n :], torch.from_numpy(labels)[order[: row.n]]


def train(row: Row, images: Tensor, classes: Tensor, folder: Path) -> dict[str, Any]:
    """Trains a network, and saves in the folder what its attacker has; arguments of the attack."""
    torch.manual_seed(0)
    c, height, width = images.shape[1:]
    first = nn.Linear(c * height * width, 1000)
    rest = (nn.Linear(1000, 200), nn.ReLU(), nn.Linear(200, 10))
    net = nn.Sequential(nn.Flatten(), first, nn.ReLU(), *rest)
    if row.start is not None:
        nn.init.normal_(first.weight, std=row.start)
    x = images.float() / 255
    facts: dict[str, Any] = {"shape": (c, height, width)}
    if row.divided:
        mean, std = x.mean((0, 2, 3)).round(decimals=2), x.std((0, 2, 3)).round(decimals=3)
        x = (x - mean[:, None, None]) / std[:, None, None]
        facts |= {"mean": _listed(mean), "std": tuple(std.tolist())}
    else:
        facts["mean"] = "none"
    optimiser = OPTIMISERS[row.optimiser](net)
    torch.save(net.state_dict(), folder / "start.pt")
    for epoch in range(EPOCHS):
        if epoch == EPOCHS // 2:
            torch.save(net.state_dict(), folder / "earlier.pt")
        for batch in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), classes[batch] % 10).backward()
            optimiser.step()
    saved: dict[str, Any] = {"model": net.state_dict()}
    if row.has == "checkpoint":
        saved["optimizer"] = optimiser.state_dict()
    elif row.has == "gradients":
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), classes % 10).backward()
        torch.save({k: p.grad for k, p in net.named_parameters()}, folder / "gradients.pt")
        facts["gradients"] = (folder / "gradients.pt",)
    elif row.has != "weights alone":
        begun = "start.pt" if row.has == "start known" else "earlier.pt"
        facts["initial"] = folder / begun
    torch.save(saved, folder / "network.pt")
    return facts


def measure(row: Row, sources: dict[str, str], folder: Path) -> dict[str, Any]:
    """Counts of images and decoys that came back, beside the mean image, and seconds."""
    images, decoys, classes = drawn(row, sources)
    for name, pictures in (("trained", images), ("decoys", decoys)):
        (folder / name).mkdir(parents=True)
        for number, picture in enumerate(pictures):
            pixels = picture.permute(1, 2, 0).squeeze(-1).numpy()
            Image.fromarray(pixels).save(folder / name / f"{number:04d}.png")
    facts = train(row, images, classes, folder)
    began = time.perf_counter()
    both = {name: f"folder:{folder / name}" for name in ("trained", "decoys")}
    try:
        found = attack(
            folder / "network.pt", data=both["trained"], decoys=both["decoys"],
            out=folder / "out", method="span", **facts,
        )  # fmt: skip
    except ValueError as error:
        return {**asdict(row), "name": row.name, "refused": str(error).splitlines()[0]}
    scores = found.record["scores"]
    compared = scores["compared"]
    return {
        **asdict(row), "name": row.name, "seconds": round(time.perf_counter() - began, 1),
        "directions": found.record["spectrum"]["n_taken"],
        "good": scores["images"]["n_good"], "good_decoys": scores["decoys"]["n_good"],
        "identified": compared["identified"]["images"],
        "identified_decoys": compared["identified"]["decoys"],
        "ssim": round(scores["images"]["mean_ssim"], 3),
        "good_by_mean_image": compared["mean_image"]["images"]["n_good"],
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown, in the order of `rows`."""
    names = ("good", "good_decoys", "identified", "identified_decoys", "ssim", "good_by_mean_image",
             "directions", "seconds")  # fmt: skip
    lines = [
        "# Where the span attack works",
        "",
        "Networks of layers of 1000 and 200, ten classes, with biases and torch's start if none is "
        f"said, inputs less a mean; {EPOCHS} epochs of batches of {BATCH}. As many decoys as "
        f"images. One thread of {record['hardware']['cpu']}, beside other work. `python -m "
        "benchmarks.span.where` makes the table.",
        "",
        "| images, number, optimiser, attacker has | " + " | ".join(names).replace("_", " ") + " |",
        "|---|" + "--:|" * len(names),
    ]
    found = {row["name"]: row for row in record["rows"]}
    for row in (found[name] for name in (r.name for r in rows()) if name in found):
        cells = [str(row.get(name, "-")) for name in names]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
        if "refused" in row:
            lines[-1] = f"| {row['name']} | refused: {row['refused']} |" + " |" * (len(names) - 1)
    return "\n".join([*lines, ""])


def _listed(numbers: Tensor) -> str:
    return ",".join(f"{number:.3f}" for number in numbers.tolist())


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar", required=True, help="folder with CIFAR-10's pictures")
    parser.add_argument("--mnist", required=True, help="folder with MNIST's files")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--work", type=Path, default=Path("palimpsest-runs/span-where"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(argv)
    sources = {"CIFAR-10": f"folder:{options.cifar}", "digits": f"mnist:{options.mnist}"}
    sources["photos"] = "photos"
    path = options.out / "span-where.json"
    record: dict[str, Any] = {"hardware": hardware(), "rows": []}
    if path.exists():
        record = json.loads(path.read_text())
    for row in rows():
        if options.only not in row.name or row.name in {one["name"] for one in record["rows"]}:
            continue
        folder = options.work / "row"
        shutil.rmtree(folder, ignore_errors=True)
        record["rows"].append(measure(row, sources, folder))
        print(json.dumps(record["rows"][-1]), flush=True)
        write_json(path, record)
    path.with_suffix(".md").write_text(table(record))


if __name__ == "__main__":
    main()
