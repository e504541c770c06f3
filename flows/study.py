"""A study: train and attack what a grid asks for, score it, and say what comes out."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.audit import AUDIT
from flows.families.autoencoder.study import AUTOENCODER
from flows.families.inversion.study import INVERSION
from flows.families.weights.span_study import SPAN
from flows.families.weights.study import GRIDS
from flows.naming import unknown_name
from flows.settings import portable
from flows.study_kind import StudyKind
from storage.errors import StorageError
from storage.files import write_json
from tasks.artifacts import publish_link, publish_table
from tasks.campaign.plan import sha256_of
from tasks.cluster.workers import Workers, device_of
from tasks.devices import usable_cores
from tasks.orchestration import flow

KINDS: tuple[StudyKind[Any, Any], ...] = (*GRIDS, SPAN, AUTOENCODER, INVERSION, AUDIT)
STUDIES = {kind.name: kind for kind in KINDS}


def kind_of(name: str) -> StudyKind[Any, Any]:
    """The study of that name; ValueError with the nearest name if there is none."""
    if name not in STUDIES:
        raise ValueError(unknown_name("study", name, [*STUDIES, "list"]))
    return STUDIES[name]


def study(
    name: str, preset: str, settings: Mapping[str, Any] | None = None, *, only: str = ""
) -> Any:
    """Settings of the named study, as `StudyKind.named`."""
    return kind_of(name).named(preset, settings, only=only)


class UnitsFailedError(StorageError):
    """Raised after the record and page were written without the units that failed."""


class LimitExceededError(StorageError):
    """Raised after the record and page were written, for a limit that their numbers exceed."""


@flow(name="study", flow_run_name="{store}")
def run_study(
    name: str,
    store: Path,
    preset: str | None = None,
    settings: dict[str, Any] | None = None,
    *,
    only: str = "",
    workers: Workers | None = None,
) -> Path:
    """Bring the study at `store` to its end; what is there is not repeated. Returns its page.

    1. Read the images and plan. 2. Open the store, or refuse one of other settings.
    3. Train, attack and score what is missing, on the workers. 4. Check the paper's claims. 5.
    Write the record, its pictures and the page. Raises UnitsFailedError after all that, if
    something failed, naming it, and LimitExceededError of an audit over one of its limits.

    Args:
        name: The study's name, such as `multiclass`, `span` or `audit`.
        store: The study's folder.
        preset: The size, such as `cpu` or `paper`; by default that of the store, else `cpu`.
        settings: Single settings by dotted name, as `--set` takes them.
        only: Only the parts whose name contains this.
        workers: Where parts are computed: cluster, number of workers, device.
    """
    kind = kind_of(name)
    study = kind.resolve(preset, settings, store, only=only)
    workers = workers or Workers()
    plan = kind.plan(study, store, device_of(workers))
    ended = kind.make(plan, store, workers)
    record = make_record(kind, plan, ended)
    kind.keep_pictures(store, plan, ended, record)
    write_json(store / kind.record, record)
    page = kind.page.write(store)
    publish_table(kind.parts, kind.rows(record), f"Study {name}: what came back")
    publish_table("claims", claim_rows(record), f"Study {name}: the paper's claims")
    publish_link(kind.flow, page, f"The page of study {name}")
    if ended.failed:
        raise UnitsFailedError(
            f"{len(ended.failed)} of the study's units failed, the page has the others: "
            + "; ".join(f"{unit}: {why}" for unit, why in sorted(ended.failed.items()))
            + "; run the same command again to retry them"
        )
    if over := kind.exceeded(record):
        raise LimitExceededError(f"{'; '.join(over)} (the page: {page})")
    return page


run_autoencoder_study = run_study.renamed(name="study-autoencoder")
run_inversion_study = run_study.renamed(name="study-inversion")
run_audit = run_study.renamed(name="audit")


def make_record(kind: StudyKind[Any, Any], plan: Any, ended: Any) -> dict[str, Any]:
    """The record of a study."""
    study, (identity, body) = plan.study, kind.describe(plan, ended)
    record: dict[str, Any] = {
        "schema": kind.page.schema,
        "version": kind.page.version,
        "name": study.name,
        "preset": study.preset,
        "title": kind.title,
        "question": kind.question,
        "paper": kind.paper,
        "command": portable(kind.command(study)),
        "created": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{platform.processor() or platform.machine()}, {usable_cores()} cores",
        "fingerprint": sha256_of(identity),
        "settings": portable(kind.to_json(study)),
        **body,
    }
    record["figures"] = kind.figures(plan, record)
    record["claims"] = kind.claims(record)
    return record


def claim_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per claim."""
    return [
        {"claim": c["claim"], "here": c["outcome"], "ours": c["ours"]} for c in record["claims"]
    ]
