"""`palimpsest attack weights`: which attack is chosen, its page, resuming, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from flows.families.weights.attack import attack_weights
from flows.families.weights.attack_plan import planned
from recon_core.victims.network import Conv, Network
from storage.sources.pictures import read_picture
from tasks.families.weights import attack as attack_module
from tasks.families.weights.attack import WeightsJob
from tests.flows.cli.test_attack_kkt import FILES
from tests.tasks.families.weights.attack_victims import SIDE, VictimFiles, make_spanned
from tests.tasks.pages import FIRST_SCREEN, Page

N_IMAGES = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> VictimFiles:
    return make_spanned(tmp_path_factory.mktemp("victim"))


def initial(files: VictimFiles) -> Path:
    return files.torch_file.parent / "initial.safetensors"


def words(files: VictimFiles, out: Path, *more: str) -> list[str]:
    return ["attack", "weights", "--weights", str(files.safetensors_file), "--out", str(out),
            "--device", "cpu", *more]  # fmt: skip


def never(*_given: Any, **_settings: Any) -> None:
    raise AssertionError("attacked again")


def test_from_weights_to_a_page(
    palimpsest, monkeypatch, tmp_path: Path, files: VictimFiles, prefect_server
) -> None:
    out = tmp_path / "out"
    known = ["--data", f"folder:{files.images}", "--decoys", f"folder:{files.decoys}"]
    shown = " ".join(palimpsest.done(*words(files, out, *known)).split())
    assert "Method: span. An attack can work." in shown
    assert "7 directions above the noise" in shown
    assert {entry.name for entry in out.iterdir()} == FILES
    record = json.loads((out / "attack.json").read_bytes())
    n_good, n_decoys = (record["scores"][which]["n_good"] for which in ("images", "decoys"))
    assert f"Good matches: {n_good} of 8 images, {n_decoys} of 8 decoys." in shown
    assert n_good >= N_IMAGES - 1
    assert n_decoys <= 1
    assert record["method"] == record["settings"]["attack"]["kind"] == "span"
    assert record["spectrum"]["n_above"] == 7
    assert len(record["spectrum"]["values"]) == 40
    n_found = record["ranking"]["found"]["n_found"]
    assert min(n_found) >= N_IMAGES - 2  # there is one direction less than images
    assert record["ranking"]["found"]["n_false"] <= 1
    [attack] = record["attacks"]
    assert (attack["ending"], attack["residual"]) == ("ok", None)
    trust = [r["agreement"] for r in record["ranking"]["pictures"]]
    assert trust == sorted(trust, reverse=True)
    assert {r["label"] for r in record["ranking"]["pictures"]} == {-1, 1}
    arrays = safetensors.torch.load_file(out / "reconstructions.safetensors")
    assert arrays["trust"].tolist() == pytest.approx(trust, abs=1e-5)
    shown_page = Page(out / "report.html")
    shown_page.check()
    assert shown_page.n_first_words < FIRST_SCREEN

    # The same command again separates nothing; other settings are refused; --fresh starts over.
    monkeypatch.setattr(attack_module, "separate", never)
    assert f"{len(trust)} pictures were taken out of the first layer" in palimpsest.done(
        *words(files, out)
    )
    assert json.loads((out / "attack.json").read_bytes())["ranking"]["found"] is None
    monkeypatch.undo()
    assert "attack.surplus is 0.2 there, 0.3 here" in palimpsest.refused(
        *words(files, out, "--set", "attack.surplus=0.3")
    )
    assert "use another --out, or --fresh" in palimpsest.refused(
        *words(files, out, "--initial", str(initial(files)))
    )
    more = ["--initial", str(initial(files)), "--n-images-guess", "9", "--fresh", *known]
    palimpsest.done(*words(files, out, *more))
    record = json.loads((out / "attack.json").read_bytes())
    assert record["preflight"]["numbers"]["start_share"] == pytest.approx(1, abs=0.02)
    assert record["preflight"]["numbers"]["directions_taken"] == 9
    assert record["scores"]["images"]["n_good"] >= N_IMAGES - 1


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
    net = checkpoint(files, tmp_path / "last.pt")
    known = ["--data", f"folder:{files.images}", "--decoys", f"folder:{files.decoys}",
             "--mean", "0.5", "--device", "cpu"]  # fmt: skip
    given = ["attack", "weights", "--weights", str(tmp_path / "last.pt"), *known]
    shown = " ".join(palimpsest.done(*given, "--out", str(tmp_path / "out")).split())
    assert "8 directions that end sharply (exp_avg in" in shown
    assert "Not used: the weights," in shown
    assert shown.count("publish weights alone, without the optimiser's state") == 2
    record = json.loads((tmp_path / "out" / "attack.json").read_bytes())
    assert record["source"]["used"] == record["settings"]["attack"]["source"] == "state"
    assert record["source"]["directions"]["state"] == {"n": N_IMAGES, "ends_sharply": True}
    assert record["scores"]["images"]["n_good"] >= N_IMAGES - 1
    page = Page(tmp_path / "out" / "report.html")
    page.check()
    assert "publish weights alone" in page.prose

    alone = ["--source", "weights", "--preflight", "--force"]
    shown = " ".join(palimpsest.done(*given, "--out", str(tmp_path / "b"), *alone).split())
    assert "taken apart: the weights, " in shown
    torch.save(net.state_dict(), tmp_path / "net.pt")
    given[3] = str(tmp_path / "net.pt")
    refused = " ".join(palimpsest.refused(*given, "--source", "state").split())
    assert "--source state: " in refused
    assert "comes without; give a checkpoint that holds one" in refused
    beside = ["--optimizer", str(tmp_path / "last.pt"), "--preflight"]
    shown = " ".join(palimpsest.done(*given, *beside).split())
    assert "8 directions that end sharply" in shown
    assert "publish" not in shown


def span_job(files: VictimFiles, out: Path) -> WeightsJob:
    job = WeightsJob(weights=files.torch_file, out=out)
    return planned(job, method="span", n_attacks=2)


def test_an_interrupted_command_does_what_is_left(
    monkeypatch, tmp_path: Path, files: VictimFiles, prefect_server
) -> None:
    """Two attacks; the second is stopped, and the next call does that one alone, to the bit."""
    torch.set_num_threads(1)
    job = span_job(files, tmp_path / "whole")
    whole = attack_weights(job, device="cpu")
    assert whole["ranking"]["n_attacks_compared"] == 2
    assert max(r["n_attacks"] for r in whole["ranking"]["pictures"]) == 2
    separate, n_calls = attack_module.separate, []

    def stopped(*given: Any, **settings: Any) -> Any:
        n_calls.append(1)
        if len(n_calls) == 2:
            raise KeyboardInterrupt
        return separate(*given, **settings)

    monkeypatch.setattr(attack_module, "separate", stopped)
    job = span_job(files, tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        attack_weights(job, device="cpu")
    assert not (tmp_path / "broken" / "attack.json").exists()
    again = attack_weights(job, device="cpu")
    assert len(n_calls) == 3
    assert again["ranking"] == whole["ranking"]


def test_a_convolution_is_left_to_the_other_attack(
    palimpsest, tmp_path: Path, files: VictimFiles
) -> None:
    architecture = Network(widths=(20,), conv=Conv(kernel=3, channels=4)).on((3, SIDE, SIDE))
    weights = architecture.initial([torch.Generator().manual_seed(0)], dtype=torch.float32)
    state = architecture.to_state_dict(weights)
    safetensors.torch.save_file(state, tmp_path / "conv.safetensors")
    given = ["attack", "weights", "--weights", str(tmp_path / "conv.safetensors"), "--device",
             "cpu", "--preflight", "--out", str(tmp_path / "out")]  # fmt: skip
    shown = " ".join(palimpsest(*given)[1].split())
    assert "Method: kkt, since span cannot work here: a convolution: the first layer is" in shown
    assert "balance of the layers" in shown
    code, shown, _err = palimpsest(*given, "--method", "span")
    assert code == 2
    shown = " ".join(shown.split())
    assert "An attack cannot work here: a convolution." in shown
    assert "use --method kkt" in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--initial", "absent.pt"], "absent.pt does not exist"),
        (["--method", "kkt", "--initial", "START"], "are of the span attack"),
        (
            ["--initial", "OTHER"],
            "0.weight (40, 300); expected the first layer's 0.weight (40, 432)",
        ),
        (["--set", "attack.alpha=3"], "attack.alpha"),
        (["--set", "attack.surplus=3"], "surplus=3.0 is outside"),
        (["--set", "attack.start=known"], "needs the weights before training: --initial"),
        (["--set", "n_attacks=many"], "n_attacks='many'"),
        (["--decoys", "folder:absent"], "give --data"),
    ],
)
def test_bad_usage_ends_with_2_and_says_the_fix(
    palimpsest, tmp_path: Path, files: VictimFiles, more: list[str], said: str
) -> None:
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"0.weight": torch.ones(40, 300)}, other)
    named = {"START": str(initial(files)), "OTHER": str(other)}
    given = words(files, tmp_path / "out", *[named.get(word, word) for word in more])
    assert said in " ".join(palimpsest.refused(*given).split())
    assert not (tmp_path / "out").exists()
