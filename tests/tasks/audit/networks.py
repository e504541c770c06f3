"""A network of photographs that is trained here, as a user would leave it: files and folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from storage.sources.load import load_images

N = 12
WIDTH = 48


@dataclass(frozen=True)
class Files:
    """Files of weights before and after training, of gradients of the same images before training,
    of a checkpoint of Adam, and sources of the images and of decoys."""

    weights: Path
    initial: Path
    gradients: Path
    checkpoint: Path
    data: str
    decoys: str


def trained(folder: Path) -> Files:
    """A network of torch's own layers on N photographs in two classes."""
    photos = load_images("photos", split="train")
    images = torch.from_numpy(photos.images[:: len(photos) // (2 * N)][: 2 * N].copy())
    own, others = images[:N], images[N:]
    for name, some in (("images", own), ("decoys", others)):
        for k, image in enumerate(some):
            path = folder / name / ("one" if k < N // 2 else "two") / f"{k:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    x = own.float() / 255
    x = x - x.mean(0)
    y = (torch.arange(N) >= N // 2).float()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(3072, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, 1, bias=False)
    )
    before = {name: t.clone() for name, t in net.state_dict().items()}
    gradients = _gradients(net, x, y)
    for _ in range(300):
        found = _gradients(net, x, y)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.sub_(0.1 * found[name])
    files = {"weights": dict(net.state_dict()), "initial": before, "gradients": gradients}
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    paths = {name: folder / f"{name}.safetensors" for name in files}
    net.load_state_dict(before)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(60):
        _gradients(net, x, y)
        adam.step()
    checkpoint = folder / "last.pt"
    torch.save({"model": net.state_dict(), "optimizer": adam.state_dict()}, checkpoint)
    return Files(
        **paths,
        checkpoint=checkpoint,
        data=f"folder:{folder / 'images'}",
        decoys=f"folder:{folder / 'decoys'}",
    )


def _gradients(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], y).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
