"""Commands from functions; options that several commands have, alone or in groups, each once."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import shutil
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flows.naming import PRESET_HELP
from storage.errors import StorageError, shown
from storage.files import write_file
from storage.pairs.layout import STORE_FILE
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from flows.recipe import Recipe
    from tasks.cluster.workers import Workers


class Screen(Console):
    """The terminal, where every text is printed as `storage.errors.shown` makes it: the name of a
    file neither clears the screen nor ends the command because it is not UTF-8."""

    def render_str(self, text: str, **how: Any) -> Text:
        """A text that is printed, or in a table, as it will appear."""
        return super().render_str(shown(text, keep="\n\t"), **how)


class _Notices(logging.Handler):
    """Lines on the standard error of the moment, so that a bar there makes room for them."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(shown(self.format(record), keep="\n") + "\n")


def say(screen: Console, text: str) -> None:
    """A line as it is, however long."""
    screen.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """A JSON value for programs."""
    say(out, json.dumps(value, indent=1))


def show_notices() -> None:
    """Show from now on what a campaign waits for, repeats or gives up."""
    logger = logging.getLogger("palimpsest")
    if any(isinstance(handler, _Notices) for handler in logger.handlers):
        return
    handler = _Notices()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)


def show_facts(title: str, facts: Mapping[str, Any]) -> None:
    """`title`, then one line per fact."""
    out.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    width = max(len(name) for name in facts) + 2
    for name, value in facts.items():
        text = f"  {name.replace('_', ' '):{width}}{fact_text(value)}"
        out.print(text, markup=False, soft_wrap=True)


def show_images(split: str, facts: Mapping[str, str]) -> None:
    """Facts of what was read of a source (`ImageSet.facts`), before work starts on it."""
    show_facts(f"Images ({split})", facts)


def show_rows(
    rows: Sequence[Mapping[str, Any]],
    table: Table,
    *,
    left: Container[str] = ("method",),
    overflow: OverflowMethod = "ellipsis",
) -> None:
    """Rows under the columns of the last one first, numbers on the right; nothing of no rows."""
    names = list(dict.fromkeys(name for row in reversed(rows) for name in row))
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow=overflow)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    if rows:
        out.print(table)


def fact_text(value: Any) -> str:
    """A number as people read it."""
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def size_text(n_bytes: float) -> str:
    """`1.4 GB`, in powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"


Function = TypeVar("Function", bound=Callable[..., None])

out = Screen()
err = Screen(stderr=True)
FAILED = 1
DEFAULT_STORE = Path("palimpsest-runs/demo")


def command(app: typer.Typer, name: str | None) -> Callable[[Function], Function]:
    """Make a function a command of `app`; without a name, it runs when `app` is called without a
    command. The last paragraph of its docstring, the examples, ends its help.

    A parameter `size: Annotated[int, "Help."]` is the option `--size`; another name of it, as in
    `Annotated[int, "--side", "Help."]`, stands before its help. A parameter whose type is a group,
    which is a dataclass of options, takes all of them.
    """

    def made(function: Function) -> Function:
        groups: dict[str, Any] = {}
        options: list[inspect.Parameter] = []
        for given in inspect.signature(function, eval_str=True).parameters.values():
            if is_dataclass(group := given.annotation):
                groups[given.name] = group
                hints = get_type_hints(group, include_extras=True)
                options += [_option(f.name, hints[f.name], f.default) for f in fields(group)]
            else:
                options.append(_option(given.name, group, given.default))

        @functools.wraps(function)
        def run(*, context: typer.Context | None = None, **options: Any) -> None:
            if context is not None and context.invoked_subcommand is not None:
                return
            for parameter, group in groups.items():
                options[parameter] = group(**{f.name: options.pop(f.name) for f in fields(group)})
            function(**options)

        if name is None:
            place = inspect.Parameter.KEYWORD_ONLY
            options.append(inspect.Parameter("context", place, annotation=typer.Context))
        vars(run)["__signature__"] = inspect.Signature(options)
        about, example, examples = (inspect.getdoc(function) or "").partition("\n\nExample")
        epilog = " ".join((example + examples).split())
        if name is None:
            app.callback(invoke_without_command=True, help=about, epilog=epilog)(run)
        else:
            app.command(name, help=about, epilog=epilog)(run)
        return function

    return made


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter as typer reads it."""
    kind, *words = get_args(annotation) if hasattr(annotation, "__metadata__") else (annotation,)
    if all(isinstance(word, str) for word in words):
        flags = [word for word in words if word.startswith("--")]
        text = next((word for word in words if word not in flags), None)
        option = typer.Option(*(flags or [f"--{name.replace('_', '-')}"]), help=text)
        annotation = Annotated[kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


Data = Annotated[
    str | None,
    "photos | digits | folder:PATH | cifar10:PATH | cifar100:PATH | mnist:PATH | "
    "fashion-mnist:PATH | svhn:PATH | tiny-imagenet:PATH",
]
SkipFiles = Annotated[bool, "--skip-corrupt", "Leave out files of a folder that cannot be read."]
Preset = Annotated[str | None, PRESET_HELP]
Settings = Annotated[
    list[str] | None, "--set", "name=value, any setting of the recipe; repeatable."
]
Store = Annotated[Path, "Folder of the job's products."]
Split = Annotated[Literal["train", "heldout"], "Which store of a job's folder."]
Device = Literal["auto", "cpu", "cuda"]
SeparatorFile = Annotated[
    str | None, "--separator", "File of `palimpsest train separator`, or cifar | digits."
]
FreshStore = Annotated[bool, "Delete the store's products first."]
Json = Annotated[bool, "--json", "One JSON object, for programs."]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Settings of a job: those of a preset, changed."""

    preset: Preset = None
    data: Data = None
    skip_corrupt: SkipFiles = False
    settings: Settings = None

    def recipe(self, store: Path) -> Recipe:
        """The preset asked for, else the recipe found in the store, else the demo; then changes."""
        from flows.settings import parse_assignments, read_recipe, resolve

        changes = parse_assignments(self.settings or [])
        if self.data is not None:
            changes["data"] = self.data
        if self.skip_corrupt:
            changes["skip_corrupt"] = "true"
        found = read_recipe(Workspace(store)) if self.preset is None else None
        return resolve(found or self.preset or "demo", changes)


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Machines that parts are computed on."""

    device: Device = "auto"
    n_workers: Annotated[int, "--workers", "0: one per core, or per GPU."] = 0
    cluster: Annotated[str, "local | cuda | slurm:YAML | kubernetes:YAML | tcp://HOST:PORT"] = (
        "local"
    )

    @property
    def workers(self) -> Workers:
        """The same for a flow."""
        from tasks.cluster.workers import Workers

        return Workers(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A store of pairs."""

    store: Annotated[str, "A job's folder, a store's, or s3://bucket/prefix."] = str(DEFAULT_STORE)
    split: Split = "train"

    @property
    def location(self) -> str | Path:
        return store_location(self.store, self.split)


@contextmanager
def images_shown(recipe: Recipe, *splits: Literal["train", "heldout"]) -> Iterator[None]:
    """Show what is read of a recipe's images, and keep them cached meanwhile.

    What cannot be read is refused before any work starts. Held-out images need the training images,
    too, where near copies of these are left out.
    """
    if recipe.near_duplicates is not None and "heldout" in splits:
        splits = ("train", "heldout")
    cached = {split: recipe.images(split) for split in splits}
    for split, images in cached.items():
        show_images(split, images.facts)
    yield


def store_location(text: str, split: str) -> str | Path:
    """Place of the store that `text` names; a job has one for each split, maybe elsewhere."""
    if "://" in text or text.startswith("s3:/"):
        return text
    folder = Path(text)
    stores = [folder / name for name in ("pairs", "heldout")]
    is_job = (folder / "recipe.json").is_file() or any((s / STORE_FILE).is_file() for s in stores)
    if (folder / STORE_FILE).is_file() or not is_job:
        return folder
    return Workspace.found(folder).pairs(split)


def on_this_machine(path: str | Path, option: str, fix: str) -> Path:
    """The path, if it is of this machine; ValueError naming the option and the fix."""
    if "://" in str(path) or str(path).startswith("s3:"):
        raise ValueError(f"{option} {path}: {fix}")
    return Path(path)


def write_as_asked(file: Path, content: bytes, option: str) -> None:
    """A file that `option` names, with the folders above it; StorageError naming the option."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content)
    except OSError as error:
        raise StorageError(
            f"cannot write {file} ({error.strerror}); choose another {option}"
        ) from error


def start_over(folder: Path, entries: Collection[str], *, option: str) -> None:
    """Delete `folder` if all in it is among `entries`, the names that the command itself makes.

    The last step before the work begins: whatever can be refused was refused before. Raises
    ValueError naming `option`, under which the folder was given, if there is anything else.
    """
    if not folder.exists():
        return
    strangers = sorted({entry.name for entry in folder.iterdir()} - set(entries))
    if strangers:
        raise ValueError(
            f"--fresh would delete {folder}, which also holds {', '.join(strangers[:3])}; "
            f"remove the folder yourself or use another {option}"
        )
    try:
        shutil.rmtree(folder)
    except OSError as error:  # which has the last part of the path only
        raise OSError(error.errno, error.strerror, str(folder)) from error
