"""`palimpsest attack weights` and `attack kkt`: which attack is chosen, its page, resuming, and
every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from flows.families.weights.attack import attack_kkt, attack_weights
from flows.families.weights.attack_plan import attack_plan, planned
from flows.papers import EXPERIMENTS
from recon_core.victims.network import Conv, Network
from storage.sources.pictures import read_picture
from tasks.families.weights import attack as attack_module
from tasks.families.weights.attack import WeightsJob
from tests.recon_core.tiles import photograph_tiles
from tests.tasks.families.weights.attack_victims import (
    N_IMAGES,
    SIDE,
    VictimFiles,
    make_spanned,
    make_victim,
)
from tests.tasks.pages import FIRST_SCREEN, Page

N_SPANNED = 8
QUICK = ["--n-images-guess", N_IMAGES, "--iterations", 200, "--attacks", 3]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> VictimFiles:
    return make_victim(tmp_path_factory.mktemp("victim"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> VictimFiles:
    return make_spanned(tmp_path_factory.mktemp("victim"))


def initial(files: VictimFiles) -> Path:
    return files.torch_file.parent / "initial.safetensors"


def words(command: str, files: VictimFiles, out: Path, *more: object) -> list[object]:
    quick = QUICK if command == "kkt" else []
    return ["attack", command, "--weights", files.safetensors_file, "--out", out, "--device", "cpu",
            *quick, *more]  # fmt: skip


def known(files: VictimFiles) -> list[str]:
    return ["--data", f"folder:{files.images}", "--decoys", f"folder:{files.decoys}"]


def text_of(shown: str) -> str:
    """Words of a screen, wherever its lines end."""
    return " ".join(shown.split())


def record_of(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "attack.json").read_bytes())
    return record


def never(*_given: Any, **_settings: Any) -> None:
    raise AssertionError("attacked again")


@pytest.mark.parametrize(("command", "part"), [("kkt", "reconstruct"), ("weights", "separate")])
def test_from_weights_to_a_page(
    palimpsest, monkeypatch, tmp_path: Path, command, part, searched, files, prefect_server
) -> None:
    out, victim = tmp_path / "out", searched if command == "kkt" else files
    n_images = N_IMAGES if command == "kkt" else N_SPANNED
    start = words(command, victim, out)
    shown = text_of(palimpsest.done(*start, *known(victim)))
    assert "An attack can work." in shown
    assert {entry.name for entry in out.iterdir()} == {
        *("attack.json", "preflight.json", "cache", "report.html"),
        *("reconstructions.png", "reconstructions.safetensors"),
    }
    record = record_of(out)
    n_good, n_decoys = (record["scores"][which]["n_good"] for which in ("images", "decoys"))
    assert f"Good matches: {n_good} of {n_images} images, {n_decoys} of " in shown
    assert n_good >= n_images - 1
    assert n_decoys <= 1
    assert json.loads((out / "preflight.json").read_bytes())["outlook"] == "good"
    if command == "kkt":
        assert "mlp:432-32-32-1" in shown
        attack = record["settings"]["attack"]
        assert (attack["n_candidates"], attack["save_at"]) == (2 * N_IMAGES, [25, 50, 100, 200])
        assert len(record["attacks"]) == 3
    else:
        assert "Method: span. An attack can work." in shown
        assert record["method"] == record["settings"]["attack"]["kind"] == "span"
        assert record["spectrum"]["n_above"] == 7  # there is one direction less than images
        assert min(record["ranking"]["found"]["n_found"]) >= n_images - 2
        trust = [r["agreement"] for r in record["ranking"]["pictures"]]
        assert trust == sorted(trust, reverse=True)
        arrays = safetensors.torch.load_file(out / "reconstructions.safetensors")
        assert arrays["trust"].tolist() == pytest.approx(trust, abs=1e-5)
    page = Page(out / "report.html")
    page.check()
    assert page.n_first_words < FIRST_SCREEN

    # The same command again attacks nothing; other settings are refused; --fresh starts over.
    monkeypatch.setattr(attack_module, part, never)
    palimpsest.done(*start)
    assert record_of(out)["scores"] == {"images": None, "decoys": None, "compared": None}
    monkeypatch.undo()
    assert "seed is 0 there, 1 here" in palimpsest.refused(*start, "--seed", 1)
    palimpsest.done(*start, "--seed", 1, "--fresh", "--attacks", 1)


def test_the_start_gives_one_direction_more(
    palimpsest, tmp_path: Path, files: VictimFiles, prefect_server
) -> None:
    out = tmp_path / "out"
    more = ["--initial", initial(files), "--n-images-guess", 9, *known(files)]
    palimpsest.done(*words("weights", files, out, *more))
    record = record_of(out)
    assert record["preflight"]["numbers"]["start_share"] == pytest.approx(1, abs=0.02)
    assert record["preflight"]["numbers"]["directions_taken"] == 9
    assert record["scores"]["images"]["n_good"] >= N_SPANNED - 1


def checkpoint(files: VictimFiles, path: Path) -> nn.Module:
    """A network of the same images from torch's start, by Adam, in a training script's file."""
    torch.manual_seed(0)
    paths = sorted(files.images.rglob("*.png"))
    pixels = [torch.from_numpy(read_picture(path, SIDE)[0].copy()) for path in paths]
    x = torch.stack(pixels).permute(0, 3, 1, 2).flatten(1) / 255
    net = nn.Sequential(nn.Linear(3 * SIDE**2, 40), nn.ReLU(), nn.Linear(40, 2))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x - 0.5), torch.arange(len(x)) % 2).backward()
        optimiser.step()
    torch.save({"model": net.state_dict(), "optimizer": optimiser.state_dict()}, path)
    return net


def test_a_checkpoint_gives_back_by_its_optimisers_state_what_its_weights_hide(
    palimpsest, tmp_path: Path, files: VictimFiles, prefect_server
) -> None:
    last, alone = tmp_path / "last.pt", tmp_path / "net.pt"
    torch.save(checkpoint(files, last).state_dict(), alone)
    given = ["attack", "weights", *known(files), "--mean", 0.5, "--device", "cpu", "--weights"]
    shown = text_of(palimpsest.done(*given, last, "--out", tmp_path / "out"))
    assert "8 directions that end sharply (exp_avg in" in shown
    record = record_of(tmp_path / "out")
    assert record["source"]["used"] == record["settings"]["attack"]["source"] == "state"
    assert record["source"]["directions"]["state"] == {"n": N_SPANNED, "ends_sharply": True}
    assert record["scores"]["images"]["n_good"] >= N_SPANNED - 1
    page = Page(tmp_path / "out" / "report.html")
    page.check()
    assert "publish weights alone" in shown
    assert "publish weights alone" in page.prose

    asked = ["--source", "weights", "--preflight", "--force", "--out", tmp_path / "b"]
    assert "taken apart: the weights, " in text_of(palimpsest.done(*given, last, *asked))
    refused = text_of(palimpsest.refused(*given, alone, "--source", "state"))
    assert "comes without; give a checkpoint that holds one" in refused
    beside = text_of(palimpsest.done(*given, alone, "--optimizer", last, "--preflight"))
    assert "8 directions that end sharply" in beside
    assert "publish" not in beside


def test_an_interrupted_command_does_what_is_left(
    monkeypatch, tmp_path: Path, files: VictimFiles, prefect_server
) -> None:
    """Two attacks; the second is stopped, and the next call does that one alone, to the bit."""
    torch.set_num_threads(1)

    def job(name: str) -> WeightsJob:
        weights = WeightsJob(weights=files.torch_file, out=tmp_path / name)
        return planned(weights, method="span", n_attacks=2)

    whole = attack_weights(job("whole"), device="cpu")
    assert whole["ranking"]["n_attacks_compared"] == 2
    assert max(r["n_attacks"] for r in whole["ranking"]["pictures"]) == 2
    separate, n_calls = attack_module.separate, []

    def stopped(*given: Any, **settings: Any) -> Any:
        n_calls.append(1)
        if len(n_calls) == 2:
            raise KeyboardInterrupt
        return separate(*given, **settings)

    monkeypatch.setattr(attack_module, "separate", stopped)
    with pytest.raises(KeyboardInterrupt):
        attack_weights(job("broken"), device="cpu")
    assert not (tmp_path / "broken" / "attack.json").exists()
    again = attack_weights(job("broken"), device="cpu")
    assert len(n_calls) == 3
    assert again["ranking"] == whole["ranking"]


def test_a_convolution_is_left_to_the_other_attack(palimpsest, tmp_path: Path) -> None:
    architecture = Network(widths=(20,), conv=Conv(kernel=3, channels=4)).on((3, SIDE, SIDE))
    weights = architecture.initial([torch.Generator().manual_seed(0)], dtype=torch.float32)
    state = architecture.to_state_dict(weights)
    safetensors.torch.save_file(state, tmp_path / "conv.safetensors")
    given = ["attack", "weights", "--weights", tmp_path / "conv.safetensors", "--device", "cpu",
             "--preflight", "--out", tmp_path / "out"]  # fmt: skip
    shown = text_of(palimpsest(*given)[1])
    assert "Method: kkt, since span cannot work here: a convolution: the first layer is" in shown
    code, shown, _err = palimpsest(*given, "--method", "span")
    assert code == 2
    assert "An attack cannot work here: a convolution." in text_of(shown)
    assert "use --method kkt" in text_of(shown)


def test_what_cannot_work_ends_with_2_and_the_reason_unless_forced(
    palimpsest, tmp_path: Path, prefect_server
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(432, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    weights, out = tmp_path / "norm.pt", tmp_path / "out"
    torch.save(net.state_dict(), weights)
    start = ["attack", "kkt", "--weights", weights, "--device", "cpu", "--out", out, *QUICK,
             "--set", "attack.save_at=3"]  # fmt: skip
    code, shown, _err = palimpsest(*start)
    assert code == 2
    assert "An attack cannot work here: normalisation layers" in text_of(shown)
    assert not out.exists()
    job = planned(WeightsJob(weights=weights, out=out), n_iterations=3)
    with pytest.raises(ValueError, match=r"normalisation layers.*--force"):
        attack_kkt(job, device="cpu")  # a deployment refuses, too, and leaves the reasons
    assert json.loads((out / "preflight.json").read_bytes())["outlook"] == "none"
    palimpsest.done(*start, "--force")
    assert (out / "report.html").is_file()


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("kkt", "--weights absent.pt", "absent.pt does not exist"),
        ("kkt", "--arch mlp:432-64-1", "--arch says mlp:432-64-1"),
        ("kkt", "--arch resnet", "mlp:3072-1000-1000-1"),
        ("kkt", "--shape 3x12", "--shape 3x12 is not of the form CxHxW"),
        ("kkt", "--condition multiclass", "multiclass"),
        ("kkt", "--preset haim2023", "did you mean 'haim2022'"),
        ("kkt", "--set attack.alhpa=3", "attack.alpha"),
        ("kkt", "--set attack.alpha=-3", "alpha=-3"),
        ("kkt", "--set victim.widths=3", "only the attack has settings"),
        ("kkt", "--iterations 0", "--iterations 0"),
        ("kkt", "--data folder:absent", "absent is not a folder"),
        ("kkt", "--decoys folder:absent", "give --data"),
        ("kkt", "--mean 0.1,0.2", "2 numbers for 3 channels"),
        ("weights", "--initial absent.pt", "absent.pt does not exist"),
        ("weights", "--method kkt --initial {start}", "are of the span attack"),
        ("weights", "--initial {other}", "expected the first layer's 0.weight (40, 432)"),
        ("weights", "--set attack.alpha=3", "attack.alpha"),
        ("weights", "--set attack.surplus=3", "surplus=3.0 is outside"),
        ("weights", "--set attack.start=known", "needs the weights before training: --initial"),
        ("weights", "--set n_attacks=many", "n_attacks='many'"),
        ("weights", "--decoys folder:absent", "give --data"),
    ],
)
def test_bad_usage_ends_with_2_and_says_the_fix(
    palimpsest, tmp_path: Path, searched, files, command: str, more: str, said: str
) -> None:
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"0.weight": torch.ones(40, 300)}, other)
    given = more.format(start=initial(files), other=other).split()
    victim = searched if command == "kkt" else files
    assert said in text_of(palimpsest.refused(*words(command, victim, tmp_path / "out", *given)))
    assert not (tmp_path / "out").exists()


def test_plans_fit_the_network() -> None:
    plain = attack_plan(n_outputs=1)
    assert (plain.n_attacks, plain.attack.condition) == (6, "binary")
    assert plain.attack.search is not None
    several = attack_plan(n_outputs=10, n_images=50)
    assert (several.attack.condition, several.attack.n_candidates) == ("multiclass", 100)
    assert attack_plan(n_outputs=10, n_images=3).attack.n_candidates == 20
    assert attack_plan(n_outputs=1, condition="regression").attack.condition == "regression"
    for name, published in EXPERIMENTS.items():
        found = attack_plan(name, n_outputs=1 if "multiclass" not in name else 10)
        assert found.attack == replace(published.experiment().attack, ncc_stop_above=None)
        assert found.n_attacks == published.n_attacks
    assert attack_plan("buzaglo2023-multiclass", n_outputs=1).attack.condition == "binary"
    assert attack_plan("haim2022", n_outputs=10).attack.condition == "multiclass"
    changed = attack_plan(
        "haim2022", n_outputs=1, n_attacks=4,
        settings={"attack.search.alpha": "5,50", "n_attacks": "7"},
    )  # fmt: skip
    assert (changed.attack.search.alpha, changed.n_attacks) == ((5, 50), 7)
    assert attack_plan(n_outputs=1, settings={"experiment.attack.alpha": "3"}).attack.alpha == 3
    assert attack_plan(n_outputs=1, n_iterations=1).attack.save_at == (1,)


def test_preflight_loads_neither_prefect_nor_a_cluster() -> None:
    """They and what scipy has of statistics took half of the time of a preflight."""
    modules = "flows.families.weights.attack_plan, flows.attack_methods"
    for used in ("weights.preflight", "autoencoder.inputs", "inversion.inputs", "instahide.attack"):
        modules += f", tasks.families.{used}"
    heavy = {"prefect", "distributed", "scipy.optimize", "scipy.stats", "matplotlib", "torchvision"}
    code = f"import sys, {modules}; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


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
