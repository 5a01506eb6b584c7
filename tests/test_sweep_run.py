from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from sweep_runs import SGD, after, bytes_of, run, session

from adtrain import training
from adtrain.backends.cpu.cpu_backend import CpuBackend
from adtrain.core.errors import AdtrainError
from adtrain.sweeps import finished, records, wave
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import Criterion, MemberEpoch, OnTest, SweepResults
from adtrain.sweeps.session import MAX_WAVE, SweepInterrupted, halving_epochs
from adtrain.training import model_file
from adtrain.training.evaluation import predictions
from adtrain.training.scores import ClassScore, MultilabelScore, RegressionScore

SWEEP = "{training.seed: {range: 3}, optimizer.sgd.lr: [0.1, 1.23456789e+30], model.layers.0.linear: [8, 6]}"
SETTINGS = SGD, "data.validation=0.2", "training.epochs=4", "data.batch_size=8"


def files(path: Path) -> dict[str, bytes]:
    """The states of a finished sweep."""
    return {str(x.relative_to(path)): x.read_bytes() for x in sorted(path.glob("states/*"))}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepResults]:
    folder = tmp_path_factory.mktemp("whole")
    return folder / "s", run(session(folder, SWEEP, *SETTINGS), folder / "s", halving=True).run()


def test_a_wave_has_at_most_as_many_members_as_a_grid_has_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = session(tmp_path, "{training.seed: {range: 3}}", *SETTINGS)
    assert MAX_WAVE == 65_535
    monkeypatch.setattr("adtrain.sweeps.session.MAX_WAVE", 2)
    assert [x.waves for x in three.plans()] == [(2, 1)]


def test_failed_members_are_reported_and_ranked_last(uninterrupted: tuple[Path, SweepResults]) -> None:
    _, results = uninterrupted
    assert [x.rank for x in results.members] == list(range(1, 13))
    failed = [x for x in results.members if x.status == "failed"]
    assert failed == list(results.members[-len(failed) :])
    assert all(x.values["optimizer.sgd.lr"] == 1.23456789e30 and x.failed_at is not None for x in failed)
    values = [x.value for x in results.members if x.status == "finished" and x.value is not None]
    assert values == sorted(values, reverse=True)


def test_halving_keeps_the_better_half_at_each_rung(uninterrupted: tuple[Path, SweepResults]) -> None:
    _, results = uninterrupted
    assert [sum(x.epochs >= epoch for x in results.members) for epoch in (1, 2, 3, 4)] == [12, 6, 3, 3]


def test_a_member_with_fewer_epochs_stays_while_others_are_worse(tmp_path: Path) -> None:
    sweep = "{training.epochs: [1, 8], optimizer.sgd.lr: [0.1, 1.0e-6, 1.0e-7, 1.0e-8], rank_by: train_loss}"
    results = run(session(tmp_path, sweep, SGD, "data.batch_size=8"), tmp_path / "s", halving=True).run()
    short = [x for x in results.members if x.values["training.epochs"] == 1]
    assert [x.status for x in results.members] == ["finished"] + 7 * ["dropped"]
    assert results.members[0].epochs == 8
    assert [x.epochs for x in short] == [1, 1, 1, 1]


def test_a_sweep_stopped_at_any_call_and_resumed_has_the_same_bytes(
    tmp_path: Path, uninterrupted: tuple[Path, SweepResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wave, "REPORT_SECONDS", 0.0)
    path, expected = uninterrupted
    found = session(tmp_path, SWEEP, *SETTINGS)
    for calls in (1, 4, 7):
        with pytest.raises(SweepInterrupted):
            run(found, tmp_path / "s", halving=True, stop=after(calls)).run()
    results = run(found, tmp_path / "s", halving=True).run()
    assert results.members == expected.members
    assert files(tmp_path / "s") == files(path)


def test_a_sweep_that_was_killed_before_it_wrote_its_results_is_scored(
    tmp_path: Path, uninterrupted: tuple[Path, SweepResults]
) -> None:
    path, expected = uninterrupted
    shutil.copytree(path, tmp_path / "s", ignore=shutil.ignore_patterns("results.json", "members"))
    results = run(session(tmp_path, SWEEP, *SETTINGS), tmp_path / "s").run()
    assert results.members == expected.members
    assert files(tmp_path / "s") == files(path)


def test_the_state_in_memory_after_a_sweep_is_that_in_its_folder(tmp_path: Path) -> None:
    found = session(tmp_path, "{training.seed: {range: 3}}", SGD, "training.epochs=1")
    trained = run(found, tmp_path / "s")
    trained.run()
    ((_, stored),) = finished.final_states(found, trained.folder)
    ((_, state),) = trained.final
    assert [bytes_of(state, i) for i in range(3)] == [bytes_of(stored, i) for i in range(3)]


@pytest.mark.exhaustive
def test_groups_side_by_side_stopped_at_any_call_and_resumed_have_the_same_bytes(
    tmp_path: Path, uninterrupted: tuple[Path, SweepResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wave, "REPORT_SECONDS", 0.0)
    path, expected = uninterrupted
    found = session(tmp_path, SWEEP, *SETTINGS)
    inside: list[int] = []
    messages: list[str] = []

    @contextmanager
    def stream(number: int) -> Iterator[None]:
        inside.append(number)
        yield

    monkeypatch.setattr(
        CpuBackend, "side_by_side", lambda self, count: nullcontext([partial(stream, i) for i in range(count)])
    )
    for calls in (5, 8, None):
        trained = run(found, tmp_path / "s", halving=True, stop=after(calls or 10**6), line=messages.append)
        trained.together = [list(found.groups)]
        if calls:
            with pytest.raises(SweepInterrupted):
                trained.run()
            assert len({x.name for x in (tmp_path / "s/states").iterdir()}) >= len(found.groups)
    results = trained.run()
    assert sum(a != b for a, b in pairwise(inside)) > 10
    assert any("optimizer.sgd.lr 1.235e+30" in text and "failed in epoch" in text for text in messages)
    lines = SweepFolder.open(tmp_path / "s").lines()
    assert sum(line.added_seconds for line in lines) == pytest.approx(results.train_seconds)
    assert all(line.added_seconds <= line.seconds for line in lines)
    assert any(line.added_seconds < line.seconds for line in lines)
    assert results.members == expected.members
    assert files(tmp_path / "s") == files(path)


def test_the_run_of_a_member_predicts_as_its_weights_do(uninterrupted: tuple[Path, SweepResults]) -> None:
    path, results = uninterrupted
    folder = SweepFolder.open(path)
    found = session(path.parent, SWEEP, *SETTINGS)
    trained = model_file.load(finished.write_run(found, folder, None))
    group, state = finished.member_state(found, folder, results.members[0].member)
    test = group.experiment.test
    expected = predictions(group.experiment.network, state.params, state.statistics, test.images, "cpu")
    given = predictions(trained.network, trained.params, trained.statistics, test.images, "cpu")
    np.testing.assert_array_equal(given, expected)
    summary = json.loads((path / "members" / str(results.members[0].member) / "summary.json").read_text())
    assert results.members[0].test is not None
    assert summary["test"] == results.members[0].test._asdict()


def test_the_run_of_a_member_predicts_numbers_as_its_scores_say(tmp_path: Path) -> None:
    settings = "loss=mse", "data.normalize_targets=true", *SETTINGS
    found = session(tmp_path, "{training.seed: {range: 2}}", *settings, layers="[linear: 1]")
    results = run(found, tmp_path / "s").run()
    test = found.groups[0].experiment.test
    for member in results.members:
        trained = model_file.load(finished.write_run(found, SweepFolder.open(tmp_path / "s"), member.member))
        given = predictions(trained.network, trained.params, trained.statistics, test.images, "cpu")
        assert isinstance(member.test, RegressionScore)
        assert member.test.rmse == pytest.approx(np.sqrt(np.mean((given - test.labels) ** 2)), rel=1e-5)


def test_a_member_normalizes_its_targets_by_the_training_part_of_its_own_seed(tmp_path: Path) -> None:
    settings = (
        "loss=mse",
        "data.normalize_targets=true",
        *SETTINGS,
        "optimizer.sgd.lr=0.002",
        "training.final_model=last",
    )
    found = session(tmp_path, "{training.seed: {range: 3}}", *settings, layers="[linear: 1]")
    results, folder = run(found, tmp_path / "s").run(), SweepFolder.open(tmp_path / "s")
    means, values = set(), []
    for member in sorted(results.members, key=lambda x: x.member):
        experiment = training.prepare(found.members[member.member].config)
        alone, trained = training.run(experiment), model_file.load(finished.write_run(found, folder, member.member))
        assert trained.network.task == experiment.network.task
        means.add(experiment.data.target_mean)
        assert isinstance(alone.validation, RegressionScore)
        for part in ("train", "validation", "test"):
            np.testing.assert_allclose(getattr(member, part), getattr(alone, part), rtol=1e-4)
        test = experiment.test
        values.append(predictions(trained.network, trained.params, trained.statistics, test.images, "cpu"))
    assert len(means) == 3
    score = finished.evaluate(found, folder, [0, 1, 2])
    assert isinstance(score, RegressionScore)
    assert score.rmse == pytest.approx(np.sqrt(np.mean((np.mean(values, axis=0) - test.labels) ** 2)), rel=1e-5)


def test_an_ensemble_is_the_mean_of_the_probabilities(uninterrupted: tuple[Path, SweepResults]) -> None:
    path, _ = uninterrupted
    folder = SweepFolder.open(path)
    found = session(path.parent, SWEEP, *SETTINGS)
    members = finished.members_of(folder, 2)
    rows = []
    for number in members:
        group, state = finished.member_state(found, folder, number)
        test = group.experiment.test
        rows.append(predictions(group.experiment.network, state.params, state.statistics, test.images, "cpu"))
    labels, mean = test.labels, np.stack(rows).astype(np.float64).mean(axis=0)
    score = finished.evaluate(found, folder, members)
    assert score._asdict()["accuracy"] == np.mean(mean.argmax(axis=1) == labels)
    expected = -np.log(mean[np.arange(len(labels)), labels]).mean()
    assert score.loss == pytest.approx(expected, rel=1e-5, abs=1e-7)  # near 1 a probability is rounded by 6e-8


def test_a_finished_sweep_that_has_lost_files_is_refused(
    tmp_path: Path, uninterrupted: tuple[Path, SweepResults]
) -> None:
    path = tmp_path / "s"
    shutil.copytree(uninterrupted[0], path, ignore=shutil.ignore_patterns("members"))
    found, folder = session(uninterrupted[0].parent, SWEEP, *SETTINGS), SweepFolder.open(path)
    (path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(AdtrainError, match=r"s/metrics\.jsonl: found 0 epochs of member \d+, expected 4"):
        finished.write_run(found, folder, None)
    assert not (path / "members").exists()
    shutil.rmtree(path / "states")
    with pytest.raises(AdtrainError, match=r"s: found no state of member \d+, expected one in its folder states"):
        finished.evaluate(found, folder, finished.members_of(folder, 2))


def test_halving_ends_with_one_member_or_the_last_epoch() -> None:
    assert halving_epochs(100, 8) == (1, 2, 4)
    assert halving_epochs(4, 1000) == (1, 2)
    assert halving_epochs(1, 8) == halving_epochs(10, 1) == ()


def epochs(*losses: float | None) -> dict[int, MemberEpoch]:
    """The history of a member with these training losses; None where it failed."""
    return {
        i: MemberEpoch(0, i, None, None, 7) if x is None else MemberEpoch(0, i, ClassScore(x, 0.5), None, None)
        for i, x in enumerate(losses, 1)
    }


def last(history: dict[int, dict[int, MemberEpoch]]) -> dict[int, MemberEpoch]:
    """The last epochs of members, with their numbers."""
    return {number: replace(of_member[max(of_member)], member=number) for number, of_member in history.items()}


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_members_with_equal_values_are_ranked_by_their_losses(part: str) -> None:
    by_f1 = Criterion.of(f"{part}_f1", higher_is_better=True)
    losses = {0: 0.3, 1: 0.1, 2: 0.2}
    of_loss = {number: MultilabelScore(loss, 0.5, 0.75) for number, loss in losses.items()}
    models = {number: MemberEpoch(number, 1, score, score, None) for number, score in of_loss.items()}
    tests = {number: OnTest(score) for number, score in of_loss.items()}
    found = records.ranked(models, tests, dict.fromkeys(models, 0), by_f1, by_f1)
    assert [number for number, *_ in found] == [1, 2, 0]


def test_finished_members_are_ranked_by_their_values_whatever_their_epochs() -> None:
    history = {0: epochs(3.0, 2.0, 1.0), 1: epochs(0.5), 2: epochs(4.0, 0.7)}
    by_loss = Criterion.of("train_loss", higher_is_better=False)
    tests = dict.fromkeys(history, OnTest(None))
    found = records.ranked(last(history), tests, dict.fromkeys(history, 0), by_loss, by_loss)
    assert found == [(1, "finished", 0.5), (2, "finished", 0.7), (0, "finished", 1.0)]


def test_dropped_members_are_ranked_by_the_rungs_they_survived_then_by_their_values_then_come_failed_ones() -> None:
    history = {
        0: epochs(3.0, 2.0, 1.0, 0.9),  # finished
        1: epochs(4.0, 5.0),  # dropped after the second rung
        2: epochs(1.0),  # its only epoch; dropped after the second rung as well
        3: epochs(0.1, None),
        4: epochs(0.2),  # dropped after the first rung
        5: epochs(None),
    }
    survived = {0: 2, 1: 1, 2: 1, 3: 1, 4: 0, 5: 0}
    by_loss = Criterion.of("train_loss", higher_is_better=False)
    for criterion in (by_loss, replace(by_loss, part="test")):
        found = records.ranked(last(history), {0: OnTest(ClassScore(0.8, 0.5))}, survived, criterion, by_loss)
        assert [number for number, *_ in found] == [0, 2, 1, 4, 3, 5]
        assert [status for _, status, _ in found] == ["finished", *["dropped"] * 3, *["failed"] * 2]
