"""Every claim of the image restoration paper is made to hold, to fail and to be out of reach."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.coverage.real import (
    THEIRS,
    Campaigns,
    last_of,
    least_seen_covers_more,
    some_come_back_more,
)
from benchmarks.evaluation import checks
from benchmarks.evaluation.evaluated import Evaluated, NotTestableError, read_evaluation
from benchmarks.papers import image_restoration as claims_001
from benchmarks.papers.image_restoration import STATEMENTS, Statement, check
from benchmarks.record import parse_lines
from benchmarks.results.page import RESULTS
from benchmarks.results.run_summary import parse_run
from recon_core.summary import bootstrap_interval, detect
from tasks.report.page import write_report
from tests.tasks.evaluation.evaluations import evaluated_sweep

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


def several(*changes: Any) -> Any:
    def change(made: Record) -> None:
        for each in changes:
            each(made)

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


def one_victim_gains(made: Record) -> None:
    """The mean of samples gains .5 in one victim, and loses .02 in all others."""
    gains = np.where(VICTIM == 3, 0.5, -0.02)
    one = np.array(made["methods"]["edm_x1"]["targets"]["ssim"])
    made["methods"]["edm_x20"]["targets"]["ssim"] = list(one + gains)


def reversed_haarpsi(made: Record) -> None:
    for body in made["methods"].values():
        body["targets"]["haarpsi"] = [1 - value for value in body["targets"]["haarpsi"]]


def nothing_good(made: Record) -> None:
    for body in made["methods"].values():
        for side in ("targets", "decoys"):
            body[side]["ssim"] = [0.5 * value for value in body[side]["ssim"]]


def every_half(value: Any) -> Any:
    return several(*(put("methods", m, "halves", value=value) for m in ("plain", "edm_x20")))


def spread(side: str, values: Any) -> Any:
    """The samples behind the mean disagree by `values`, of a row's SSIM with it."""

    def change(made: Record) -> None:
        of_side = made["methods"]["edm_x20"][side]
        of_side["disagreement"] = [float(values(ssim)) for ssim in of_side["ssim"]]

    return change


def noisy(method: str, mean: float) -> Any:
    """A method's SSIM is that of the mean of samples plus `mean`, give or take .1."""

    def change(made: Record) -> None:
        rng = np.random.default_rng(1)
        scores = np.array(made["methods"]["edm_x20"]["targets"]["ssim"]) + mean
        noise = rng.normal(0, 0.1, N)
        made["methods"][method]["targets"]["ssim"] = list(scores + noise - noise.mean())

    return change


APART = {"targets": {"ssim": [[0.5] * N, [0.45] * N]}}
FALSE = {
    checks.good_count_rises: [shift("edm_x20", -0.2)],
    checks.good_count_rises_beyond_decoys: [shift("edm_x20", 0.4, side="decoys")],
    checks.mean_beats_one_sample: [shift("edm_x1", 0.05)],
    checks.trained_beat_generic: [shift("bf", -0.07), shift("restormer", 0.06)],
    checks.generic_gain_little: [
        shift("restormer", 0.04),
        several(shift("edm_x20", -0.11), shift("tv", -0.2), shift("restormer", -0.2)),
    ],
    checks.almost_none_is_worse: [worse(20, where=lambda _score: True)],
    checks.almost_none_of_the_good_is_worse: [worse(15, where=lambda score: score > 0.4)],
    checks.halves_agree: [
        put("methods", name, "halves", value=APART) for name in ("plain", "edm_x20")
    ],
    checks.diffusion_beats_cnn: [shift("bf", 0.05)],
    checks.disagreement_grows_with_error: [
        put("hallucination", "edm_x20", "interval", value=[-0.3, 0.0])
    ],
    checks.poor_pictures_give_diverse_samples: [
        spread("targets", lambda ssim: 0.3 + 0.2 * ssim),
        spread("decoys", lambda _ssim: 0.05),
    ],
    checks.some_runs_are_given_up: [
        put("dataset", "outcomes", "stopped", value=n) for n in (0, 30)
    ],
    checks.vote_beats_best: [shift("vote", -0.012)],
    checks.scores_are_about_training_images: [
        shift("edm_x20", 0.3, side="decoys"),
        shift("edm_x20", 0.14, side="decoys"),
    ],
    checks.measures_agree: [reversed_haarpsi, shift("tv", 0.2, metric="haarpsi")],
}
OPEN = {
    checks.almost_none_is_worse: [worse(5, where=lambda _score: True)],
    checks.almost_none_of_the_good_is_worse: [worse(3, where=lambda score: score > 0.4)],
    checks.good_count_rises: [shift("edm_x20", -0.1)],
    checks.good_count_rises_beyond_decoys: [shift("edm_x20", -0.1)],
    checks.mean_beats_one_sample: [one_victim_gains],
    checks.trained_beat_generic: [noisy("tv", -0.02)],
    checks.diffusion_beats_cnn: [noisy("bf", 0.0)],
    checks.generic_gain_little: [noisy("restormer", -0.05)],
    checks.disagreement_grows_with_error: [
        put("hallucination", "edm_x20", "interval", value=[-0.01, 0.3])
    ],
    checks.poor_pictures_give_diverse_samples: [
        several(*(spread(side, lambda ssim: 100 * ssim % 0.4) for side in ("targets", "decoys")))
    ],
    checks.vote_beats_best: [noisy("vote", -0.1)],
    checks.scores_are_about_training_images: [noisy("edm_x20", -0.07)],
}
NULL = {
    checks.good_count_rises: [nothing_good, without("trained")],
    checks.good_count_rises_beyond_decoys: [nothing_good, without("trained")],
    checks.mean_beats_one_sample: [lambda made: made["methods"].pop("edm_x20")],
    checks.trained_beat_generic: [without("classical", "external"), without("trained")],
    checks.generic_gain_little: [without("classical", "external")],
    checks.almost_none_is_worse: [without("trained")],
    checks.almost_none_of_the_good_is_worse: [nothing_good],
    checks.halves_agree: [every_half(None)],
    checks.disagreement_grows_with_error: [
        put("hallucination", value={}),
        put("hallucination", "edm_x20", "spearman", value=None),
    ],
    checks.some_runs_are_given_up: [put("dataset", "attacks_per_victim", value=1)],
    checks.diffusion_beats_cnn: [
        lambda made: made["methods"].pop("bf"),
        lambda made: made["methods"].pop("edm_x1"),
    ],
    checks.poor_pictures_give_diverse_samples: [
        nothing_good,
        lambda made: made["methods"]["edm_x20"]["targets"].pop("disagreement"),
    ],
    checks.vote_beats_best: [without("vote")],
    checks.scores_are_about_training_images: [without("trained")],
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
    record, tables = claims_001.read(out), claims_001.read(out / "report-data")
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
        claims_001.read(out / "report-data")


@pytest.mark.slow
def test_the_kept_claims_are_those_of_the_kept_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = RESULTS / "claims" / "image-restoration.json"
    claims_001.main(["--json", str(kept), "--check"])
    made = json.loads(kept.read_text())
    sampled = next(claim for claim in made if claim["claim"].startswith("Sampling from"))
    sampled["outcome"] = "does not hold"
    (tmp_path / "runs").symlink_to(RESULTS / "runs")
    changed = tmp_path / "claims" / kept.name
    changed.parent.mkdir()
    changed.write_text(json.dumps(made))
    for message in ("is not what its tables give: ['Sampling from", "lacks some of before-after"):
        with pytest.raises(SystemExit):
            claims_001.main(["--json", str(changed), "--check"])
        assert message in capsys.readouterr().err
        (tmp_path / "runs").unlink(missing_ok=True)


def test_the_kept_scores_are_those_that_the_run_summed_up() -> None:
    e = claims_001.read(RESULTS / "runs" / "cifar-hundred" / "report-data")
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
    assert rule(campaigns(*uniform), campaigns(*theirs))[1] is holds


def test_campaigns_are_read_where_they_end() -> None:
    measured = parse_lines(claims_001.COVERAGE.read_text(), name="coverage_real.json")
    assert last_of(measured, "uniform") == campaigns((192, 189), (0.676, 0.691))
    assert last_of(measured, THEIRS).covered == (234, 235)
    with pytest.raises(ValueError, match="no campaign of the sampler 'least'"):
        last_of(measured, "least")


def test_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evaluation.json"
    with pytest.raises(ValueError, match="is not there; give an evaluation"):
        read_evaluation(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is no evaluation"):
        read_evaluation(path)
    path.write_text(json.dumps(record() | {"version": 2}))
    with pytest.raises(ValueError, match=r"\('palimpsest-evaluation', 2\), expected"):
        read_evaluation(tmp_path)
    path.write_text(json.dumps(record() | {"targets": {"victim": []}}))
    with pytest.raises(ValueError, match="has no target"):
        read_evaluation(path)
    with pytest.raises(SystemExit):
        claims_001.main([str(path)])
    assert "has no target" in capsys.readouterr().err
