"""Claims of the papers: every rule made to hold, to fail and to be out of reach; kept records."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.coverage.real import Campaigns, least_seen_covers_more, some_come_back_more
from benchmarks.evaluation import checks
from benchmarks.evaluation.evaluated import Evaluated, NotTestableError
from benchmarks.inversion import synthetic
from benchmarks.kkt.multipliers import Size, judged
from benchmarks.papers import image_restoration, studies
from benchmarks.papers.findings import Finding
from benchmarks.papers.image_restoration import STATEMENTS, Statement, check
from benchmarks.record import parse_claims
from benchmarks.results.page import RESULTS
from benchmarks.results.run_summary import parse_run
from flows.study import study
from recon_core.summary import bootstrap_interval, detect
from tasks.families.weights.study.claims import check_claims
from tasks.families.weights.study.results import difference
from tasks.page.formats import is_ours
from tasks.report.page import write_report
from tests.tasks.evaluation.evaluations import evaluated_sweep
from tests.tasks.families.weights.study.test_claims import record_of

N_VICTIMS, N_IMAGES = 12, 30
VICTIM = np.repeat(np.arange(N_VICTIMS), N_IMAGES)
N = len(VICTIM)
Record = dict[str, Any]


def record() -> Record:
    """An evaluation in which every claim holds."""
    rng = np.random.default_rng(0)
    plain, decoys = rng.uniform(0.2, 0.55, N), rng.uniform(0.1, 0.36, N)

    def side(values: Any) -> Record:
        noise = rng.normal(0, 0.003, N)
        return {"ssim": list(values), "haarpsi": list(0.8 * np.asarray(values) + noise)}

    def method(kind: str, gain: float, of_decoys: float = 0.0) -> Record:
        after = plain + gain + rng.normal(0, min(0.002, 0.1 * gain), N)
        return {
            "kind": kind,
            "targets": side(after),
            "decoys": side(decoys + of_decoys + 0.001 * rng.normal(size=N)),
            "halves": {
                "targets": {"ssim": [list(after - 0.005), list(rng.permutation(after) - 0.01)]}
            },
        }

    methods = {
        "plain": method("attack", 0.0),
        "plain_all": method("attack", 0.002),
        "vote": method("vote", 0.01),
        "tv": method("classical", 0.02),
        "restormer": method("external", 0.03),
        "edm_x1": method("trained", 0.07, 0.01),
        "edm_x20": method("trained", 0.1, 0.01),
        "bf": method("trained", 0.08, 0.01),
    }
    for side_name, body in (("targets", 0.2), ("decoys", 0.25)):
        of_side = methods["edm_x20"][side_name]
        good = np.array(of_side["ssim"]) > 0.4
        of_side["disagreement"] = list(np.where(good, 0.1, body) + rng.normal(0, 0.005, N))
    return {
        "schema": "palimpsest-evaluation",
        "version": 5,
        "settings": {"good_threshold": 0.4, "baselines": []},
        "targets": {"victim": VICTIM.tolist()},
        "decoys": {"victim": VICTIM[::-1].tolist()},
        "seconds": {"plain": 1.5, "edm": 2.5},
        "dataset": {
            "attacks_per_victim": 5,
            "n_runs": 60,
            "outcomes": {"ok": 48, "stopped": 12},
        },
        "methods": methods,
        "hallucination": {
            "edm_x20": {
                "spearman": 0.6,
                "interval": [0.5, 0.7],
                "bins": [{"mean_rmse": 0.05}, {"mean_rmse": None}, {"mean_rmse": 0.2}],
            }
        },
    }


def shift(method: str, by: float, *, side: str = "targets", metric: str = "ssim") -> Any:
    def change(made: Record) -> None:
        scores = made["methods"][method][side]
        scores[metric] = [value + by for value in scores[metric]]

    return change


def without(*kinds: str) -> Any:
    def change(made: Record) -> None:
        made["methods"] = {
            name: body for name, body in made["methods"].items() if body["kind"] not in kinds
        }

    return change


def put(*path: Any, value: Any) -> Any:
    def change(made: Record) -> None:
        place = made
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def worse(n: int, *, where: Callable[[float], bool]) -> Any:
    """The first n images that `where` picks by their plain score lose .05 by restoration."""

    def change(made: Record) -> None:
        plain = made["methods"]["plain"]["targets"]["ssim"]
        for row in [row for row, score in enumerate(plain) if where(score)][:n]:
            made["methods"]["edm_x20"]["targets"]["ssim"][row] = plain[row] - 0.05

    return change


def nothing_good(made: Record) -> None:
    for body in made["methods"].values():
        for side in ("targets", "decoys"):
            body[side]["ssim"] = [0.5 * value for value in body[side]["ssim"]]


def noisy(method: str, mean: float) -> Any:
    """A method's SSIM is that of the mean of samples plus `mean`, give or take .1."""

    def change(made: Record) -> None:
        rng = np.random.default_rng(1)
        scores = np.array(made["methods"]["edm_x20"]["targets"]["ssim"]) + mean
        noise = rng.normal(0, 0.1, N)
        made["methods"][method]["targets"]["ssim"] = list(scores + noise - noise.mean())

    return change


def diverse(made: Record) -> None:
    """The samples behind the mean disagree most on good targets."""
    targets = made["methods"]["edm_x20"]["targets"]
    targets["disagreement"] = [0.3 + 0.2 * ssim for ssim in targets["ssim"]]


HALVES = {"targets": {"ssim": [[0.5] * N, [0.45] * N]}}
NO_TRAINED = without("trained")
FALSE = {
    checks.good_count_rises: [shift("edm_x20", -0.2)],
    checks.good_count_rises_beyond_decoys: [shift("edm_x20", 0.4, side="decoys")],
    checks.mean_beats_one_sample: [shift("edm_x1", 0.05)],
    checks.trained_beat_generic: [shift("bf", -0.07), shift("restormer", 0.06)],
    checks.generic_gain_little: [shift("restormer", 0.04)],
    checks.almost_none_is_worse: [worse(20, where=lambda _score: True)],
    checks.almost_none_of_the_good_is_worse: [worse(15, where=lambda score: score > 0.4)],
    checks.halves_agree: [put("methods", "edm_x20", "halves", value=HALVES)],
    checks.diffusion_beats_cnn: [shift("bf", 0.05)],
    checks.disagreement_grows_with_error: [
        put("hallucination", "edm_x20", "interval", value=[-0.3, 0.0])
    ],
    checks.poor_pictures_give_diverse_samples: [diverse],
    checks.some_runs_are_given_up: [
        put("dataset", "outcomes", "stopped", value=n) for n in (0, 30)
    ],
    checks.vote_beats_best: [shift("vote", -0.012)],
    checks.scores_are_about_training_images: [
        shift("edm_x20", 0.3, side="decoys"),
        shift("edm_x20", 0.14, side="decoys"),
    ],
    checks.measures_agree: [shift("tv", 0.2, metric="haarpsi")],
}
OPEN = {
    checks.almost_none_is_worse: [worse(5, where=lambda _score: True)],
    checks.good_count_rises_beyond_decoys: [shift("edm_x20", -0.1)],
    checks.trained_beat_generic: [noisy("tv", -0.02)],
    checks.generic_gain_little: [noisy("restormer", -0.05)],
    checks.disagreement_grows_with_error: [
        put("hallucination", "edm_x20", "interval", value=[-0.01, 0.3])
    ],
    checks.scores_are_about_training_images: [noisy("edm_x20", -0.07)],
}
NULL = {
    checks.good_count_rises: [nothing_good, NO_TRAINED],
    checks.good_count_rises_beyond_decoys: [nothing_good],
    checks.mean_beats_one_sample: [lambda made: made["methods"].pop("edm_x20")],
    checks.trained_beat_generic: [without("classical", "external"), NO_TRAINED],
    checks.almost_none_of_the_good_is_worse: [nothing_good],
    checks.halves_agree: [put("methods", "plain", "halves", value=None)],
    checks.disagreement_grows_with_error: [put("hallucination", value={})],
    checks.some_runs_are_given_up: [put("dataset", "attacks_per_victim", value=1)],
    checks.diffusion_beats_cnn: [lambda made: made["methods"].pop("bf")],
    checks.poor_pictures_give_diverse_samples: [
        nothing_good,
        lambda made: made["methods"]["edm_x20"]["targets"].pop("disagreement"),
    ],
    checks.vote_beats_best: [without("vote")],
    checks.measures_agree: [without("trained", "classical", "external", "vote", "attack")],
}
CASES = [
    *((s, lambda made: None, True) for s in STATEMENTS),
    *((s, change, outcome) for s in STATEMENTS
      for outcome, table in ((False, FALSE), (None, OPEN), (NotTestableError, NULL))
      for change in table.get(s.check, [])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "change", "outcome"),
    CASES,
    ids=[f"{s.check.__name__}-{outcome}-{k}" for k, (s, _c, outcome) in enumerate(CASES)],
)
def test_each_claim_holds_fails_is_left_open_or_out_of_reach(
    statement: Statement, change: Any, outcome: Any
) -> None:
    made = record()
    change(made)
    if outcome is NotTestableError:
        with pytest.raises(NotTestableError):
            statement.check(Evaluated(made))
        return
    ours, holds = statement.check(Evaluated(made))
    assert (None if holds is None else bool(holds)) is outcome, ours


def test_the_numbers_are_those_of_the_scores() -> None:
    e = Evaluated(record())
    before, after = (np.array(e.methods[m]["targets"]["ssim"]) for m in ("plain", "edm_x20"))
    ours, _holds = checks.good_count_rises(e)
    assert f"-> {(after > 0.4).sum()} good of {N} with edm_x20" in ours
    assert ours.startswith(f"{(before > 0.4).sum()} (")
    gain = e.mean(e.gain("edm_x20"))
    assert gain.value == pytest.approx((after - before).mean())
    over_rows = bootstrap_interval(after - before)
    over_victims = bootstrap_interval(after - before, groups=VICTIM)
    assert (gain.low, gain.high) in (over_rows, over_victims)
    assert gain.high - gain.low == max(np.ptp(over_rows), np.ptp(over_victims))
    decoys = np.array(e.methods["edm_x20"]["decoys"]["ssim"])
    assert e.detection("edm_x20").mean() == pytest.approx(detect(after, decoys)["auc"])


def test_decoys_are_those_of_the_same_victim() -> None:
    e = Evaluated(record())  # its decoys stand in the opposite order
    total = e.with_decoys(100.0 * VICTIM, 1.0 * VICTIM[::-1])
    assert total.tolist() == (101.0 * VICTIM).tolist()
    made = record()
    made["decoys"]["victim"][0] = 0
    with pytest.raises(ValueError, match="as many decoys as targets"):
        Evaluated(made).with_decoys(np.zeros(N), np.zeros(N))


def job_with_report(folder: Path) -> Path:
    """The evaluation of a job in `folder`, with the tables of its report."""
    evaluated_sweep(folder, outcomes=(0, 0, 3))
    out = (folder / "out").rename(folder / "evaluation")
    evaluation = {"good_threshold": 0.4, "baselines": ["tv"]}
    recipe = {"evaluation": evaluation, "heldout": {"attacks_per_victim": 3}}
    stages = [{"name": "evaluate", "seconds": 12.0}, {"name": "curate", "seconds": 3.0}]
    write_report(folder, {"recipe": recipe, "stages": stages})
    return out


@pytest.mark.slow
def test_the_tables_of_a_report_give_the_claims_of_its_record(tmp_path: Path) -> None:
    out = job_with_report(tmp_path / "job")
    record, tables = image_restoration.read(out), image_restoration.read(out / "report-data")
    assert tables.record["seconds"] == {"evaluate": 12.0}
    claims = {claim.claim: claim for claim in check(record, name="job", command="x")}
    assert len(claims) == len(STATEMENTS)
    given_up = claims["Some attacks go wrong early and are given up"]
    assert (given_up.ours, given_up.outcome) == ("job: 2 of 6 runs (4 to 78 %)", "holds")
    assert "not testable" not in {claim.outcome for claim in claims.values()}
    for one, other in zip(
        check(record, name="job", command="x"), check(tables, name="job", command="x"), strict=True
    ):
        same = dataclasses.replace(other, seconds=one.seconds, hardware=one.hardware)
        assert one == same, one.claim
    (out / "report-data" / "methods.csv").write_text("method,kind\r\nvote,vote\r\n")
    with pytest.raises(ValueError, match="is no report-data of an evaluation"):
        image_restoration.read(out / "report-data")


@pytest.mark.slow
def test_the_kept_claims_are_those_of_the_kept_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = RESULTS / "claims" / "image-restoration.json"
    image_restoration.main(["--json", str(kept), "--check"])
    made = json.loads(kept.read_text())
    sampled = next(claim for claim in made if claim["claim"].startswith("Sampling from"))
    sampled["outcome"] = "does not hold"
    (tmp_path / "runs").symlink_to(RESULTS / "runs")
    changed = tmp_path / "claims" / kept.name
    changed.parent.mkdir()
    changed.write_text(json.dumps(made))
    for message in ("is not what its tables give: ['Sampling from", "lacks some of before-after"):
        with pytest.raises(SystemExit):
            image_restoration.main(["--json", str(changed), "--check"])
        assert message in capsys.readouterr().err
        (tmp_path / "runs").unlink(missing_ok=True)


def test_the_kept_scores_are_those_that_the_run_summed_up() -> None:
    e = image_restoration.read(RESULTS / "runs" / "cifar-hundred" / "report-data")
    file = RESULTS / "runs" / "cifar-hundred.json"
    run = parse_run(file.read_text(), name=file.name)
    assert set(run.methods) - set(e.methods) == {"bf_dncnn", "edm_x1", "edm_x20"}
    for name in e.methods:
        summed = run.methods[name].targets
        assert e.good(name).sum() == summed.n_good
        assert e.scores(name).mean() == pytest.approx(summed.mean_ssim, abs=1e-6)
        assert e.detection(name).mean() == pytest.approx(run.methods[name].auc, abs=1e-6)


def campaigns(covered: tuple[float, ...], gini: tuple[float, ...]) -> Campaigns:
    return Campaigns(n_runs=400, n_images=300, covered=covered, gini=gini)


@pytest.mark.parametrize(
    ("rule", "uniform", "theirs", "holds"),
    [
        (some_come_back_more, ((9, 9), (0.6, 0.7)), ((9, 9), (0.1, 0.1)), True),
        (some_come_back_more, ((9, 9), (0.4, 0.5)), ((9, 9), (0.6, 0.6)), False),
        (some_come_back_more, ((9, 9), (0.6, 0.4)), ((9, 9), (0.6, 0.6)), None),
        (least_seen_covers_more, ((9, 8), (0.6, 0.6)), ((10, 11), (0.6, 0.6)), True),
        (least_seen_covers_more, ((9, 8), (0.6, 0.6)), ((10, 11), (0.4, 0.4)), False),
        (least_seen_covers_more, ((12, 13), (0.6, 0.6)), ((10, 11), (0.6, 0.6)), False),
        (least_seen_covers_more, ((9, 10), (0.6, 0.6)), ((10, 11), (0.6, 0.6)), None),
        (least_seen_covers_more, ((9, 8), (0.6, 0.6)), ((10, 11), (0.6, 0.4)), None),
    ],
)
def test_rules_of_campaigns(rule: Any, uniform: Any, theirs: Any, holds: bool | None) -> None:
    assert rule((campaigns(*uniform), campaigns(*theirs)))[1] is holds


ORDER = ("multiclass", "multiclass-vote", "losses", "weight-decay", "cnn", "width", "large")
PAPERS = {
    "autoencoder": ("autoencoder", "noise-20-layers"),
    "kkt": ORDER,
    "mixcon": ("inversion",),
    "span": ("span-networks",),
}


def arguments(paper: str, file: Path) -> list[str]:
    folders = (str(RESULTS / "studies" / name) for name in PAPERS[paper])
    return ["--check", "--json", str(file), *folders]


@pytest.mark.parametrize("paper", PAPERS)
def test_kept_claims_are_those_of_the_kept_studies(
    paper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = RESULTS / "claims" / f"{paper}.json"
    studies.main(arguments(paper, kept))
    claims = json.loads(kept.read_text())
    claims[-1]["ours"] += "!"  # the first may be of a benchmark, which no study can check
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(claims))
    with pytest.raises(SystemExit):
        studies.main(arguments(paper, changed))
    assert "has other claims than these studies" in capsys.readouterr().err


def test_every_kept_study_is_collected() -> None:
    folders = [folder.name for folder in (RESULTS / "studies").iterdir()]
    kept = {name for name in folders if not name.startswith("audit")}  # which no paper claims
    assert kept == {name for names in PAPERS.values() for name in names}


def test_kept_pages_have_the_outcomes_of_their_records() -> None:
    pages = sorted((RESULTS / "studies").glob("*/*.html"))
    assert pages
    for file in pages:
        claims = json.loads(file.with_suffix(".json").read_bytes())["claims"]
        tables = re.findall(r'<table class="claims".*?</table>', file.read_text(), re.DOTALL)
        marks = re.findall(r'<span class="outcome \w+">.*?</svg>([^<]*)</span>', "".join(tables))
        ordered = sorted(claims, key=lambda claim: is_ours(claim["where"]))
        assert marks == [claim["outcome"] for claim in ordered], file


def test_no_claim_stands_in_two_files_and_no_question_of_ours_is_called_a_papers() -> None:
    kept = {p.stem: json.loads(p.read_text()) for p in (RESULTS / "claims").glob("*.json")}
    where = Counter(
        (claim["claim"], stem)
        for stem, claims in kept.items()
        for claim in {c["claim"]: c for c in claims if not c["claim"].startswith("...")}.values()
    )
    names = Counter(name for name, _stem in where)
    assert [name for name, n in names.items() if n > 1] == []
    for claims in kept.values():
        for claim in claims:
            unclaimed = claim["theirs"].startswith(("not claimed", "not in the paper", "not meas"))
            ours = claim["claim"].startswith("Ours") or unclaimed
            assert is_ours(claim["where"]) or not ours, claim["claim"]
            assert claim["seconds"] != 0, claim["claim"]


def test_claims_of_studies_are_collected_and_checked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name in ("losses", "width"):
        record = record_of(study(name, "cpu"), lambda cell, seed: 5.0 / cell["n_images"])
        record |= {
            "schema": "palimpsest-study",
            "version": 2,
            "preset": "cpu",
            "command": f"palimpsest study {name}",
            "seconds": {"attack": 5.0, "score": 1.5},
        }
        record["claims"] = check_claims(record)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "study.json").write_text(json.dumps(record))
        folders.append(str(folder))
    out = tmp_path / "kkt.json"
    studies.main([*folders, "--json", str(out)])
    claims = parse_claims(out.read_text(), name="x")
    assert len(claims) == 4 + 3
    assert claims[0].ours.startswith("losses (cpu): ")
    assert claims[0].seconds == 6.5
    assert claims[-1].command == "palimpsest study width"
    assert "HOLDS: Victims of regression losses" in capsys.readouterr().out
    record["claims"][0]["outcome"] = "not testable"
    (tmp_path / "width" / "study.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="are not what its numbers give"):
        studies.read_study(tmp_path / "width")
    with pytest.raises(ValueError, match="is no study"):
        studies.read_study(tmp_path / "nothing")


def test_the_synthetic_data_are_the_papers() -> None:
    """MixCon paper, section 4.2: N(0, I) and N(-1, I), 5 % of the training labels exchanged."""
    x, labels, noisy = synthetic.gaussians(torch.Generator().manual_seed(0), 4000, 4000)
    x = x.flatten(1)
    for label, mean in ((0, 0.0), (1, -1.0)):
        assert (x[labels == label].mean(0) - mean).abs().max() < 0.1
        assert (x[labels == label].var(0) - 1).abs().max() < 0.1
    assert int((labels != noisy)[:4000].sum()) == 200
    assert torch.equal(labels[4000:], noisy[4000:])


HARDER = {"distance": [1.0, 1.1], "se": [2.0, 2.1], "cs": [0.1, 0.12]}


@pytest.mark.parametrize(
    ("collapsed", "mixed", "worst"),
    [
        (0.5, HARDER | {"se worst": 0.4, "cs worst": 0.9}, "holds"),
        (0.8, {"distance": [3.0, 3.1], "se": [1.0, 1.1], "cs": [0.5, 0.52]}
         | {"se worst": 0.1, "cs worst": 0.99}, "does not hold"),
        (0.5, HARDER | {"se worst": 0.1, "cs worst": 0.9}, "undecided"),
    ],
)  # fmt: skip
def test_claims_of_synthetic_vectors_come_out_either_way(
    collapsed: float, mixed: dict[str, Any], worst: str
) -> None:
    plain = {"distance": [2.0, 2.1], "se": [1.5, 1.6], "cs": [0.2, 0.22]}
    plain |= {"se worst": 0.3, "cs worst": 0.95}
    numbers = {synthetic.PLAIN: plain, synthetic.MIXED: mixed, synthetic.COLLAPSED: {}}
    accuracy = {synthetic.PLAIN: 0.91, synthetic.MIXED: 0.88, synthetic.COLLAPSED: collapsed}
    cells = [
        {"name": name, "server": server, **own}
        | {"test_accuracy": [accuracy[name] + 0.01 * (server != "default")] * 2}
        for name, own in numbers.items()
        for server in synthetic.SERVERS
    ]
    about = {"command": synthetic.COMMAND, "seconds": 1.0, "hardware": {}}
    claims = synthetic.claims_of(about | {"cells": cells})
    others = "holds" if collapsed == 0.5 else "does not hold"
    assert [claim.outcome for claim in claims] == [
        *("holds", others, "holds", others, others, others, worst)
    ]
    assert all("rate 0.02 (theirs .1), torch's own start" in claim.ours for claim in claims)


def test_kept_claims_of_synthetic_vectors_are_those_of_their_record(tmp_path: Path) -> None:
    kept = RESULTS / "claims" / "mixcon.json"
    synthetic.main(["--check", "--json", str(kept)])
    changed = tmp_path / "changed.json"
    changed.write_text(kept.read_text().replace("93.4% to 90.0%", "93.4% to 99.0%"))
    with pytest.raises(SystemExit):
        synthetic.main(["--check", "--json", str(changed)])


@pytest.mark.parametrize(
    ("twelve", "eight", "holds"),
    [(0.8, 0.0, True), (0.0, 0.0, None), (0.8, 0.6, False), (0.1, 0.05, None)],
)
def test_each_outcome_of_the_rule_on_multipliers(
    twelve: float, eight: float, holds: bool | None
) -> None:
    def judgement(victims: int) -> Finding:
        def shares(share: float) -> list[np.ndarray]:
            return [(np.arange(50) < 50 * share).astype(np.float64)] * victims

        good = {"12": shares(twelve), "8": shares(eight), "decoys": shares(0.0)}
        d = difference(good["12"], good["8"])
        return judged(good, d, Size(victims=victims), 0, data="photos")

    assert judgement(5).holds is holds
    two = judgement(2)
    assert two.holds is (None if holds is False else holds), "two victims refute nothing"
    assert ("; undecided at our size: 2 victims" in two.ours) == (holds is False)
