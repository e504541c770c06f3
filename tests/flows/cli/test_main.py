"""The command line: exit codes, one-line errors with the fix, and a clean stop."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command

import tasks
from flows.cli import main as cli
from flows.cli.attack_file import ENTRIES
from flows.cli.options import start_over
from flows.naming import PRESET_NAMES
from flows.presets import PRESETS
from storage.pairs.dataset import Dataset
from tasks.cluster import workers
from tests.tasks.report.report_records import evaluation, write

TINY = [
    *("--preset", "smoke", "--workers", "1", "--device", "cpu"),
    *("--set", "sampling.phases.0.n_runs=2"),
]


def test_the_release_is_said(palimpsest) -> None:
    assert palimpsest.done("--version") == f"palimpsest {tasks.__version__}\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupt_ends_in_one_line_whatever_the_clean_up_raises(number: int, code: int) -> None:
    """As Dask's does while its workers start."""
    program = f"""
import sys, types
from flows.cli import command
def run():
    try:
        os.kill(os.getpid(), {number})
        time.sleep(60)
    finally:
        assert False, "Status.starting"
import os, time
from flows.cli import main
main.app = lambda **_: run()
sys.argv = ["palimpsest", "demo", "--fresh", "--store", "s"]
command.main()
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert finished.stderr == (
        "interrupted; nothing finished is lost. Resume with: palimpsest demo --store s\n"
    )
    assert (finished.returncode, finished.stdout) == (code, "")


def test_the_help_names_every_preset() -> None:
    assert tuple(PRESETS) == PRESET_NAMES


def commands(group: Any, above: str) -> Iterator[str]:
    """The words of every command below `group`."""
    for name, one in group.commands.items():
        words = f"{above} {name}"
        yield from commands(one, words) if hasattr(one, "commands") else [words]


@pytest.mark.parametrize("command", list(commands(get_command(cli.app), "palimpsest")))
def test_every_command_has_help_with_an_example(palimpsest, command: str) -> None:
    said = palimpsest.done(*command.split()[1:], "--help")
    assert re.search(rf"Examples?:\s+{command}\b", said)


@pytest.fixture
def flat_noise(tmp_path: Path) -> Path:
    """A folder of two classes with 12 tiny pictures each."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


REFUSED = {
    "": {
        "nonsense": ": demo, generate, curate",
        "dataset nonsense": "dataset: info, verify",
    },
    "compare": {
        "a": "at least two folders",
        "a a": "is given twice",
        "a b --out page.pdf": "does not end in .html",
    },
    "report": {
        "a --store a": "leave out --store",
        "a --set seed=1": "leave out --store, --preset and --set",
        "--out page.html": "goes with a folder",
        "empty": "has no finished evaluation",
        "old": "version 2, expected",
    },
    "generate": {
        "--preset demmo": "did you mean 'demo'",
        "--set sampling.image_per_run=4": "sampling.images_per_run",
        "--set sampling.images_per_run=5": "images_per_run=5 is not a multiple",
        "--set seed": "name=value",
        "--data floder:x": "folder",
        "--cluster slurn": "tcp://",
        "--device tpu": "tpu",
        "--bogus": "--bogus",
    },
    "audit": {
        "--quick --preset cpu": "--quick is --preset quick, but --preset is cpu; give one of",
        "--weights net.pt --data folder:a": "weights need data, its training images, and decoys",
        "--weights net.pt --decoys folder:a": "a count without decoys says nothing",
        "--decoys folder:a": "give its weights, too, or leave them out",
        "--initial net.pt": "give its weights, too, or leave them out",
        "--weights net.pt --data folder:a --decoys folder:b --quick": "leave out --recipe, --pr",
        "--weights net.pt --data folder:a --decoys folder:b --recipe recipe.yaml": "leave out --r",
        "--weights net.pt --data folder:a --decoys folder:b": "net.pt",
        "--recipe none.yaml": "none.yaml",
        "--recipe empty": "give a recipe, as docs/audit.md shows one",
        "--recipe recipe.yaml": "recipe.trainings={'epochs': 3}: Unexpected keyword argument",
        "--fail-above leaks": "--fail-above 'leaks' is not a limit as good>0.05@fpr=0.01",
        "--fail-above good>0.05@fpr=0.02": "at a false positive rate of 0, 0.001, 0.01, 0.05",
        "--set recipe.training.epoch=3": "did you mean 'recipe.training.epochs'?",
        "--set n_victims=5": "n_victims=5 must be even",
        "--set recipe.n_images=5000": "lower recipe.n_images",
        "--set attacks=magic": "attacks",
        "--set epochs": "--set 'epochs' is not of the form name=value",
        "--set recipe=3": "recipe='3'",
        "--only magic": "unknown defence 'magic'",
        "--data svhn:nowhere": "nowhere",
    },
    "study": {
        "multiclas": "unknown study 'multiclas'; did you mean 'multiclass'?",
        "losses --set experiment.trainng.epochs=3": "did you mean 'experiment.train",
        "losses --set n_attacks=7": "runs_per_part=4 does not divide n_attacks=7",
        "losses --set experiment.training.epochs=0": "epochs=0 must be at least 1",
        "losses --data svhn:nowhere": "nowhere",
        "large --data photos --set cells.0.images_per_run=5000": "cell '200 images",
    },
    "study span --preset tiny": {
        "--set rows.0.optimiser=Adm": "optimiser='Adm' is none of ['SGD', ",
        "--set rows.0.n=1": "n=1 must be at least 2",
        "--set rows.0.n=5000": "5000 images and as many decoys are more than the ",
        "--set rows.0.images=faces": "images='faces' is none of the kinds",
        "--set kinds.photographs.dat=photos": "did you mean 'kinds.photographs.data'?",
        "--set rows.1.has=checkpoint": "two rows are 'photographs, 20, SGD, momentum, check",
        "--only mine": "rows of one's own pictures need --data",
        "--data svhn:nowhere": "nowhere",
    },
    "study inversion --preset tiny": {
        "--set source.training.epoch=3": "did you mean 'training.epochs'?",
        "--set digits.lam=3": "did you mean 'lams'?",
        "--set strong.n_step=3": "did you mean 'strong.n_steps'?",
        "--set source.training.epochs=0": "epochs=0 must be at least 1",
        "--set digits.n_train=5000": "takes 504 images of each class",
        "--only mnist": "unknown source 'mnist'",
        "--data svhn:nowhere": "nowhere",
    },
    "study autoencoder --preset tiny": {
        "--set victim.training.epoch=3": "did you mean 'training.epochs'?",
        "--set methods.unknown.gama=3": "did you mean 'methods.unknown.gamma'?",
        "--set victim.training.epochs=0": "epochs=0 must be at least 1",
        "--set victims.0.n_images=50000": "n_images=50000, but 'photos'",
        "--only resnet": "unknown victim 'resnet'",
        "--set masks=rndom": "noise.mask='random' is none of masks",
        "--data svhn:nowhere": "nowhere",
    },
}
"""By the beginning of a command: its other words, and what its one line says."""
ENDS = {"generate": "--store store", "study": "--store store", "audit": "--device cpu --out store"}


@pytest.mark.parametrize(
    ("words", "said"),
    [(f"{start} {more}", said) for start, rows in REFUSED.items() for more, said in rows.items()],
)
def test_bad_usage_is_said_in_one_line_with_the_fix(
    palimpsest, monkeypatch, tmp_path: Path, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    record, pictures = evaluation()
    for name, made in (("a", record), ("b", record), ("old", record | {"version": 2})):
        write(tmp_path / name, made, pictures)
    (tmp_path / "empty").mkdir()
    (tmp_path / "recipe.yaml").write_text("trainings: {epochs: 3}\n")
    before = sorted(tmp_path.rglob("*"))
    code, _shown, complaint = palimpsest(
        *words.split(), *ENDS.get(words.split(maxsplit=1)[0], "").split()
    )
    assert code in (1, 2), complaint
    assert said in complaint
    assert "Traceback" not in complaint
    assert complaint.count("\n") == 1 or not complaint.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


STARTED = {
    "demo": ("flows.chain.chain", "--store"),
    "generate": ("flows.generate.generate", "--store"),
    "evaluate": ("flows.chain.evaluate", "--store"),
    "top-up --coverage 0.5": ("flows.top_up.top_up", "--store"),
    "study width": ("flows.study.run_study", "--store"),
    "study autoencoder --preset tiny": ("flows.study.run_study", "--store"),
    "study inversion --preset tiny": ("flows.study.run_study", "--store"),
}


@pytest.mark.parametrize("command", STARTED)
def test_a_picture_that_cannot_be_read_is_refused_before_anything_starts(
    palimpsest, monkeypatch, tmp_path: Path, flat_noise: Path, command: str
) -> None:
    flow, store = STARTED[command]
    monkeypatch.setattr(flow, lambda *_args, **_kwargs: pytest.fail("started"))
    (flat_noise / "b" / "bad\x1b.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    words = [*command.split(), "--data", f"folder:{flat_noise}", store, str(tmp_path / "s")]
    shown = palimpsest.refused(*words)
    assert r"bad\x1b.jpg cannot be read as a picture (" in shown
    assert "or leave such files out with --skip-corrupt" in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "s" / "pairs").exists()


def test_what_was_read_and_left_out_is_said(
    palimpsest, tmp_path: Path, flat_noise: Path, prefect_server
) -> None:
    (flat_noise / "b" / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    words = ["generate", *TINY, "--data", f"folder:{flat_noise}", "--store", str(tmp_path / "s")]
    said = " ".join(palimpsest.done(*words, "--skip-corrupt").split())
    assert re.search(r"Images \(train\) source folder \S+ pictures \d+ of \d+ that were read", said)
    assert "classes 2: a, b divided by the hash of pixels; one in 5 is held out sizes all " in said
    assert "left out 1 that cannot be read: b/bad.jpg (" in said
    assert json.loads((tmp_path / "s" / "recipe.json").read_bytes())["skip_corrupt"] is True


@pytest.mark.parametrize("entries", [cli.WORKSPACE_ENTRIES, ENTRIES])
@pytest.mark.parametrize("own", ["thesis.tex", "images"])
def test_fresh_deletes_only_what_it_knows(tmp_path: Path, entries: set[str], own: str) -> None:
    folder = tmp_path / "s"
    (folder / min(entries)).mkdir(parents=True)
    (folder / own).write_text("x")
    with pytest.raises(ValueError, match=own):
        start_over(folder, entries, option="--store")
    assert (folder / min(entries)).is_dir()
    (folder / own).unlink()
    start_over(folder, entries, option="--store")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["timeout", "Ctrl-C"])
def test_an_interrupted_command_stops_cleanly_and_says_how_to_resume(
    how: str, tmp_path: Path
) -> None:
    store = tmp_path / "s"
    words = [
        "generate",
        *TINY,
        "--store",
        str(store),
        "--set",
        "experiment.training.epochs=1000000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", "from flows.cli.main import main; main()", *words],
        env={**os.environ, "PREFECT_HOME": str(tmp_path / "prefect")},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (store / "recipe.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (store / "recipe.json").exists()
    time.sleep(8)  # the workers are starting or at work
    if how == "timeout":  # as `timeout`, systemd and Slurm do: to the command, and to its group
        process.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
    else:  # as a terminal does: to the command and all that it has started
        os.killpg(process.pid, signal.SIGINT)
    _out, shown = process.communicate(timeout=120)
    assert process.returncode == (143 if how == "timeout" else 130)
    assert "Resume with: palimpsest generate --preset smoke" in shown
    assert "Traceback" not in shown
    assert Dataset(store / "pairs").verify().ok


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("demo --preset smokee", "did you mean 'smoke'"),
        ("demo --preset smoke --data folder:nowhere", "nowhere"),
        ("demo --preset smoke --set restorers.edm.training.precision=tf32", "tf32"),
        ("demo --preset smoke --set evaluation.external.mine=m.onnx", "m.onnx"),
        ("demo --preset smoke --cluster tcp://127.0.0.1:1", "no Dask scheduler answers"),
        ("demo --preset smoke --cluster slurm:none.yaml --workers 1", "none.yaml"),
        ("study width --set n_victimss=1", "n_victims"),
        ("study width --data folder:nowhere", "nowhere"),
        ("study width --data digits --cluster tcp://127.0.0.1:1", "no Dask scheduler answers"),
        ("study autoencoder --preset tiny --data folder:nowhere", "nowhere"),
        ("study inversion --preset tiny --only nothing", "nothing"),
    ],
)
def test_fresh_deletes_nothing_before_everything_is_validated(
    palimpsest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setattr(workers, "CONNECT_SECONDS", 0.5)
    (tmp_path / "s" / "evaluation").mkdir(parents=True)
    code, _out, complained = palimpsest(
        *words.split(), "--device", "cpu", "--fresh", "--store", tmp_path / "s"
    )
    assert code in (1, 2)
    assert said in complained
    assert complained.count("\n") == 1
    assert (tmp_path / "s" / "evaluation").is_dir()


def test_a_report_is_rebuilt_from_a_folder(palimpsest, tmp_path: Path) -> None:
    folder = write(tmp_path / "run" / "evaluation", *evaluation())
    assert str(folder / "report.html") in palimpsest.done("report", str(tmp_path / "run")).replace(
        "\n", ""
    )
    page = tmp_path / "page.html"
    palimpsest.done("report", str(folder), "--out", str(page))
    assert page.read_text() == (folder / "report.html").read_text()
    assert (tmp_path / "report-data" / "methods.csv").is_file()


def test_runs_are_compared(palimpsest, tmp_path: Path) -> None:
    write(tmp_path / "a", *evaluation())
    write(tmp_path / "b", *evaluation(planted=4))
    out = tmp_path / "pages" / "ab.html"
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]
    shown = palimpsest.done(*words)
    assert "paired" in shown
    assert str(out) in shown
    assert out.is_file()
    assert out.with_suffix(".json").is_file()
