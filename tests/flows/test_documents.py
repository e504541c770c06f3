"""Every JSON document that is read, changed in every way: one line with its name, or nothing wrong.

Each document is made as the project makes it. Then values in it are replaced by others, left out or
added, and its bytes are cut, encoded otherwise, or nested. Whoever reads it must take what is there
or raise the errors that the command shows in one line, with the file's name.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.recipe import Recipe
from flows.regenerate import MANIFEST_SCHEMA, foreseen, read_manifest
from flows.settings import read_recipe, to_json
from flows.study import kind_of
from flows.study import study as named_study
from storage.challenge import read_challenge
from storage.checkpoints import load_checkpoint, read_meta
from storage.documents import MAX_DEPTH, seal_of
from storage.errors import StorageError
from storage.export.rows import Selection, selected_pairs
from storage.files import write_json
from storage.object_store import LocalPlace
from storage.pairs.dataset import Dataset
from storage.pairs.receipts import receipt_path
from storage.pairs.statistics import summarise
from storage.pairs.verify import verify_store
from tasks.campaign.state import read_control, read_quarantine, write_control, write_quarantine
from tasks.campaign.status import find_recipe, stored_sampling
from tasks.dataset.export import rendered
from tasks.evaluation.evaluate import read_excluded
from tasks.report import page as report
from tasks.report.compare import compare_runs
from tasks.restoring.job import SCHEMA as RESTORATION
from tasks.restoring.job import VERSION as RESTORATION_VERSION
from tasks.restoring.job import read_record
from tasks.training.train import load_restorer
from tasks.workspace import Workspace
from tests.storage.stores import store
from tests.tasks.families.instahide.challenges import normal_challenge
from tests.tasks.page.kept import PAGES, kept
from tests.tasks.page.study_pages import StudyPages
from tests.tasks.report import report_records
from tests.tasks.restoring.restorers import TINY_BF_DNCNN, trained

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 7, 10**30, 1e308, 0.5, "x", "", "\0", "../../x", [], [[]], [None], {}),
    {"x": {}},
)
"""What stands in the place of a value: most of it of another type."""
N_TREES = 80
N_PAGES = 20
"""Changed copies of a document, and of one that a whole page is made of."""


@dataclass(frozen=True)
class Document:
    """How a document comes about in a folder, and all that reads it there."""

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    seal: str | None = None
    names: tuple[str, ...] = ()
    """What a message may name instead of the file."""
    n_trees: int = N_TREES


def _in_store(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        store(folder / "s", 1)
        return folder / "s" / name

    return make


def _open_store(folder: Path) -> None:
    """Verify says it in its report; whoever else opens the store raises the same."""
    problems = verify_store(folder / "s").problems
    assert all("\n" not in problem for problem in problems)
    dataset = Dataset(folder / "s")
    summarise(dataset)
    stored_sampling(dataset.manifest, None)
    every = Selection(confident_only=False)
    for _pairs in selected_pairs(dataset, every, render=rendered):
        pass


def _written(name: str, tree: Callable[[], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_json(folder / name, tree())
        return folder / name

    return make


def _recipe(folder: Path) -> None:
    read_recipe(Workspace(folder))
    Workspace.found(folder)
    find_recipe(str(folder))


def _page(pages: StudyPages, made: Callable[[], Any]) -> Document:
    def make(folder: Path) -> Path:
        return pages.write(folder, *made()) / f"{pages.page.name}.json"

    return Document(make, pages.page.write, n_trees=N_PAGES)


def _evaluation(folder: Path) -> Path:
    record, pictures = report_records.evaluation()
    report_records.write(folder / "b", record, pictures)
    report_records.write(folder / "a", record, pictures)
    return folder / "a" / "evaluation.json"


def _context(folder: Path) -> Path:
    (_evaluation(folder).parent / "report-data").mkdir()
    return _written("a/report-data/context.json", lambda: report.EMPTY_CONTEXT)(folder)


def _restored(folder: Path) -> None:
    read_meta(folder / "m", "model")
    load_checkpoint(folder / "m", "model")
    load_restorer(folder / "m", device="cpu")


def _control(folder: Path) -> Path:
    write_control(LocalPlace(folder), "paused")
    return folder / "control.json"


def _quarantine(folder: Path) -> Path:
    write_quarantine(LocalPlace(folder), 3, reason="it ends", attempts=3, workers=["a"])
    return folder / "quarantine" / "part-000003.json"


def _manifest() -> dict[str, Any]:
    return {
        "schema": MANIFEST_SCHEMA,
        "manifest": {"source": {"split": "train", "hash": "0", "n": 3}, "campaign": {}},
        "recipe": to_json(Recipe()),
        "content_hash": "0",
        "first_group": "part-000000-00000000.zarr",
        "columns": ["plan", "runs/run"],
        "parts": {"0": "a b", "1": "c d"},
        "code_versions": ["1"],
        "torch_versions": ["2"],
        "devices": ["cpu"],
        "threads": [1],
    }


DOCUMENTS: dict[str, Document] = {
    "store.json": Document(_in_store("store.json"), _open_store),
    "store.json sealed again": Document(_in_store("store.json"), _open_store, "store_sha256"),
    "receipt": Document(_in_store(receipt_path(0)), _open_store),
    "receipt sealed again": Document(
        _in_store(receipt_path(0)), _open_store, "receipt_sha256", ("part 0",)
    ),
    "recipe": Document(_written("recipe.json", lambda: to_json(Recipe())), _recipe),
    "timings": Document(
        _written("timings.json", lambda: {"generate": 3.5, "train": 1}),
        lambda folder: Workspace(folder).timings,
    ),
    "excluded": Document(
        _written("heldout-excluded.json", lambda: {"threshold": 0.9, "rows": [{"image_id": 1}]}),
        lambda folder: read_excluded(folder / "evaluation"),
    ),
    "control": Document(_control, lambda folder: read_control(LocalPlace(folder))),
    "quarantine": Document(_quarantine, lambda folder: read_quarantine(LocalPlace(folder))),
    "card": Document(lambda f: trained(f / "m", TINY_BF_DNCNN) / "model.json", _restored),
    "challenge": Document(
        lambda folder: normal_challenge(folder / "c", [[0, 1]], side=2) / "challenge.json",
        lambda folder: read_challenge(folder / "c"),
    ),
    "manifest": Document(
        _written("manifest.json", _manifest),
        lambda folder: foreseen(read_manifest(folder / "manifest.json")),
    ),
    "restoration": Document(
        _written("restoration.json", lambda: {
            "schema": RESTORATION, "version": RESTORATION_VERSION, "settings": {"seed": 0},
            "pictures": [],
        }),
        lambda folder: read_record(folder / "restoration.json", {"seed": 0}),
        names=(" was restored with other settings",),
    ),
    **{
        f"settings of {name}": Document(
            _written("settings.json", lambda name=name: asdict(named_study(name, "cpu"))),
            lambda folder, name=name: kind_of(name).resolve(None, None, folder),
            names=(" holds study ",),
        )
        for name in ("losses", "autoencoder", "inversion")
    },
    "evaluation": Document(
        _evaluation, lambda folder: report.write_report(folder / "a", {}), n_trees=N_PAGES
    ),
    "evaluation compared": Document(
        _evaluation, lambda f: compare_runs([f / "a", f / "b"], f / "compare.html"), n_trees=N_PAGES
    ),
    "context": Document(_context, lambda folder: report.saved_context(folder / "a")),
    "study": _page(PAGES["study"], lambda: kept("study", "large")),
    "recovery": _page(PAGES["recovery"], lambda: kept("recovery")),
    "inversion": _page(PAGES["inversion"], lambda: kept("inversion")),
}  # fmt: skip


def changed_bytes(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The same document, or another one, as bytes that are no document."""
    text = content.decode()
    yield "nothing", b""
    yield "half of it", content[: len(content) // 2]
    yield "zeros", bytes(len(content))
    yield "UTF-16", text.encode("utf-16")
    yield "Latin-1", b'{"caf\xe9": 1}'
    for other in ("[]", "null", "7", '"x"', "true", "{}"):
        yield other, other.encode()
    yield "deep lists", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield "deep objects", b'{"x": ' * 100_000 + b"1" + b"}" * 100_000
    yield "deeper than any", b'{"x": ' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1)
    yield "a long number", b'{"x": ' + b"9" * 10_000 + b"}"
    yield "NaN", content.replace(b"{", b'{"x": NaN, ', 1)
    yield "infinity", content.replace(b"{", b'{"x": 1e999, ', 1)
    yield "twice", content.replace(b"{", b'{"x": 1, "x": 2, ', 1)
    yield "half a character", content.replace(b"{", b'{"x": "\\ud800", ', 1)


def changed_trees(tree: Any, n: int, seed: str) -> Iterator[tuple[str, Any]]:
    """`n` copies of the tree, each with one value replaced or left out."""
    rng = random.Random(seed)
    paths = list(_paths(tree))
    for _ in range(n):
        path = rng.choice(paths)
        other = copy.deepcopy(tree)
        node = other
        for key in path[:-1]:
            node = node[key]
        if rng.random() < 0.2:
            del node[path[-1]]
            yield f"{path} left out", other
            continue
        node[path[-1]] = rng.choice(WRONG)
        yield f"{path} = {node[path[-1]]!r}", other


def _paths(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values are; of a long list the first three."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:3])
    for key, value in items:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _paths(value, (*above, key))


def _sealed(tree: Any, seal: str | None) -> bytes:
    if seal is not None:
        tree = {key: value for key, value in tree.items() if key != seal}
        tree = tree | {seal: seal_of(tree)}
    return json.dumps(tree).encode()


def _read(document: Document, folder: Path, path: Path, what: str) -> None:
    """Nothing, or one line that names the file."""
    said = ""
    try:
        document.read(folder)
    except (StorageError, ValueError) as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    assert not said or any(n in said for n in (path.name, *document.names)), f"{what}: {said}"
    assert "\n" not in said, f"{what}: {said}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_whatever_stands_in_a_document(name: str, tmp_path: Path):
    document = DOCUMENTS[name]
    path = document.make(tmp_path)
    content = path.read_bytes()
    document.read(tmp_path)  # as it was written it is fine
    for what, other in changed_bytes(content):
        path.write_bytes(other)
        _read(document, tmp_path, path, what)
    for what, tree in changed_trees(json.loads(content), document.n_trees, name):
        path.write_bytes(_sealed(tree, document.seal))
        _read(document, tmp_path, path, what)
    path.unlink()
    os.mkfifo(path)
    _read(document, tmp_path, path, "a pipe")
    path.unlink()
    path.symlink_to("/dev/zero")
    _read(document, tmp_path, path, "a device")
    path.unlink()
    path.touch()
    os.truncate(path, 2**36)
    _read(document, tmp_path, path, "sixty-four gigabytes")
