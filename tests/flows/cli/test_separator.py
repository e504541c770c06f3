"""`palimpsest train separator`: a file that attacks take, and every refusal in a line."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from PIL import Image

from tests.recon_core.tiles import photograph_tiles


def test_a_separator_is_learned_and_an_attack_takes_it(
    palimpsest, tmp_path: Path, prefect_server
) -> None:
    mixing = torch.randn(60, 40, generator=torch.Generator().manual_seed(0))
    images = photograph_tiles(16, shrink=1)[:40].float().flatten(1) / 255
    weights = {
        "0.weight": mixing @ images,
        "0.bias": mixing.sum(1),
        "2.weight": mixing[:1, :1].expand(1, 60).clone(),
        "2.bias": torch.zeros(1),
    }
    safetensors.torch.save_file(weights, tmp_path / "victim.safetensors")
    attack = [
        "attack", "weights", "--weights", tmp_path / "victim.safetensors", "--shape", "3x16x16",
        "--method", "span", "--device", "cpu",
    ]  # fmt: skip
    public, it = tmp_path / "public", tmp_path / "it.safetensors"
    for i, tile in enumerate(photograph_tiles(16, shrink=1)[40::2].numpy()):
        place = public / ("test" if i % 5 == 0 else "train") / "tile"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(tile.transpose(1, 2, 0)).save(place / f"{i:03}.png")
    learn = [
        "train",
        "separator",
        "--data",
        f"folder:{public}",
        "--out",
        str(it),
        "--device",
        "cpu",
    ]
    shown = " ".join(palimpsest.done(*learn, "--shape", "3x16x16", "--steps", "4").split())
    assert "of 50 held-out pictures" in shown
    assert "identified" in shown
    out = tmp_path / "out"
    forced = ["--set", "attack.sources=network", "--set", "attack.n_network=3"]
    palimpsest.done(*attack, "--out", out, "--separator", it, *forced)
    record = json.loads((out / "attack.json").read_bytes())
    assert record["settings"]["attack"]["separator"] == str(it)
    claim = json.loads((out / "cache" / "job.json").read_bytes())
    assert "sha256:" in json.dumps(claim)
    for file, why in (("victim.safetensors", "it is no separator"), ("no", "exist")):
        refused = palimpsest.refused(*attack, "--separator", tmp_path / file, "--out", out)
        assert why in " ".join(refused.split())
    small = palimpsest.refused(*learn, "--shape", "3x8x8")
    assert "from 16x16 to 64x64" in " ".join(small.split())
