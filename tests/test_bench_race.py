from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_runs
from click.testing import Result
from command_line import invoke

from adtrain import training
from adtrain.bench import machine
from adtrain.bench import race as races
from adtrain.bench.peers import comparison, systems, torch_system
from adtrain.bench.peers.jobs import Checked, Job
from adtrain.bench.peers.worker import Worker
from adtrain.config.records import plain

EPOCHS = [Checked(1.0, 0.5), Checked(2.0, 0.8), Checked(3.0, 0.7)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WINDOW_S", 0.0)
    monkeypatch.setattr(machine, "known_roofline", lambda device: None)


def race(*arguments: str) -> Result:
    return invoke("bench", "race", *arguments, "--device", "cpu", columns=120)


@pytest.mark.exhaustive
def test_the_accuracies_are_those_of_the_trained_models(tmp_path: Path) -> None:
    path, file = str(training_runs.write_config(tmp_path)), tmp_path / "race.json"
    options = ["--set", "training.seed=3", "--seeds", "2", "--json-file", str(file)]
    result = race(path, "--target", "0.4", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert (found["kind"], found["config"], found["target"]) == ("race", "tiny", 0.4)
    runs = found["systems"]["adtrain"]["runs"]
    for run, seed in zip(runs, (3, 4), strict=True):
        trained = training.run(training_runs.prepare(tmp_path, f"training.seed={seed}"))
        assert (run["seed"], run["epochs"][-1]["accuracy"]) == (seed, trained.test._asdict()["accuracy"])
        seconds = [epoch["seconds"] for epoch in run["epochs"]]
        assert len(seconds) == 3
        assert seconds == sorted(seconds)
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("adtrain  "))
    assert f"{found['systems']['adtrain']['reached']} of 2" in line


def test_a_run_reaches_the_target_in_its_first_epoch_of_that_accuracy() -> None:
    found = plain(races._summary([EPOCHS, EPOCHS[:1]], 0, 0.8), sparse=True)
    assert [run["seconds"] for run in found["runs"]] == [2.0, None]
    assert (found["reached"], found["seconds"]["median"]) == (1, 2.0)
    assert found["accuracy"]["mean"] == pytest.approx(0.6)
    assert "margin" not in found["seconds"]
    assert found["accuracy"]["margin"] == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert races._summary([EPOCHS], 0, 0.9).seconds is None


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.30265), (9, 2.262157), (49, 2.009575), (999, 1.962341)]
)
def test_quantiles_are_those_of_students_t_distribution(degrees: int, expected: float) -> None:
    """The expected numbers are from tables."""
    assert races.t_quantile(degrees, 0.975) == pytest.approx(expected, rel=1e-4)


@pytest.mark.needs_torch
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")  # PyTorch's own, while it traces
@pytest.mark.parametrize("name", ["torch-eager", pytest.param("torch-max", marks=pytest.mark.exhaustive)])
def test_a_peer_has_the_same_accuracies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In float64, with a schedule, batch norm and a smaller last batch."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    layers = "[{conv2d: {out_channels: 4, kernel_size: 3}}, batch_norm2d, relu, flatten, {linear: 3}]"
    options = ["training.precision=float64", "schedule=one_cycle", "model.input=[1, 6, 6]"]
    job = Job(training_runs.prepare(tmp_path, *options, layers=layers), "cpu")
    own, peer = systems.made("adtrain", "race", job)(job), systems.made(name, "race", job)(job)
    assert [each.accuracy for each in own] == [each.accuracy for each in peer]
    assert own[0].accuracy < own[-1].accuracy


@pytest.mark.parametrize(("optimizer", "steps"), [("sgd: {lr: 0.1}", 5), ("muon: {lr: 0.02}", 3)])
@pytest.mark.parametrize("groups", ["[]", "[{paths: 2.*, lr_factor: 2}]"])
def test_fewer_first_losses_are_compared_with_muon(tmp_path: Path, optimizer: str, steps: int, groups: str) -> None:
    path = str(training_runs.write_config(tmp_path))
    answer = Worker("adtrain", "cpu").step(path, [f"optimizer={{{optimizer}}}", f"parameter_groups={groups}"])
    assert len(answer["losses"]) == steps


def test_a_worker_reads_data_once_for_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, worker = str(training_runs.write_config(tmp_path)), list[int](), Worker("adtrain", "cpu")

    def observed(cfg: Any) -> Any:
        read.append(cfg.data.batch_size)
        return read_ahead(cfg)

    read_ahead = training.read_ahead
    monkeypatch.setattr(training, "read_ahead", observed)
    found = []
    for changes in (["training.seed=3"], ["training.seed=4"], ["training.seed=4", "data.batch_size=7"]):
        answer = worker.race(path, ["training.epochs=1", *changes])
        found.append(answer["epochs"][-1][1])
        trained = training.run(training_runs.prepare(tmp_path, "training.epochs=1", *changes))
        assert found[-1] == trained.test._asdict()["accuracy"]
    assert read[1:] == [7]


@pytest.mark.needs_torch
def test_a_peer_trains_from_another_seed_as_if_it_were_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With momentum, running statistics and augmentations."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    layers = "[{conv2d: {out_channels: 4, kernel_size: 3}}, batch_norm2d, relu, flatten, {linear: 3}]"
    options = ["data.augment=[{crop: 1}, {flip: {alternate: true}}]", "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"]
    seeds = [(*options, "model.input=[1, 6, 6]", f"training.seed={seed}") for seed in (3, 4)]
    jobs = [Job(training_runs.prepare(tmp_path, *each, layers=layers), "cpu") for each in seeds]
    first, other = (torch_system.Racer(job, "eager") for job in jobs)
    first(jobs[0])
    assert [each.accuracy for each in first(jobs[1])] == [each.accuracy for each in other(jobs[1])]
    for path, x in first.trained.arrays.items():
        torch.testing.assert_close(x, other.trained.arrays[path], rtol=0, atol=0)


@pytest.mark.needs_torch
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_a_peer_crops_at_every_position(tmp_path: Path, mode: str) -> None:
    import torch

    image = torch.arange(1.0, 37.0).reshape(1, 1, 6, 6)
    padded = torch.nn.functional.pad(image, [1] * 4, mode=mode)[0]
    expected = {tuple(padded[:, i : i + 6, j : j + 6].flatten().tolist()) for i in range(3) for j in range(3)}
    augment = f"data.augment=[{{crop: {{padding: 1, padding_mode: {mode}}}}}]"
    cropped = augmented(tmp_path, augment)(image.expand(300, 1, 6, 6), torch.arange(300))
    assert {tuple(each.flatten().tolist()) for each in cropped} == expected


def augmented(folder: Path, augment: str, epoch: int = 1) -> Any:
    """PyTorch's augmentations of 90 images in an epoch."""
    import torch

    torch.manual_seed(0)
    job, first_half = Job(training_runs.prepare(folder, augment), "cpu"), torch.rand(90) < 0.5
    return torch_system._augmented(job, torch.tensor(epoch), first_half)


@pytest.mark.needs_torch
def test_a_peer_flips_the_images_of_one_half_in_each_epoch(tmp_path: Path) -> None:
    import torch

    images, at = torch.rand(90, 1, 6, 6), torch.randperm(90)
    both = []
    for epoch in (1, 2):
        found = augmented(tmp_path, "data.augment=[{flip: {alternate: true}}]", epoch)(images, at)
        flipped = (found == images.flip(3)).flatten(1).all(1)
        assert torch.equal(found[~flipped], images[~flipped])
        both.append(flipped)
    assert torch.equal(both[0], ~both[1])
    assert 20 < both[0].sum() < 70
    often = augmented(tmp_path, "data.augment=[{flip: 0.9}]")(images, at)
    assert 70 < (often == images.flip(3)).flatten(1).all(1).sum() < 90


@pytest.mark.needs_torch
@pytest.mark.parametrize("size", [2, 3])
def test_a_peer_cuts_a_square_around_a_pixel(tmp_path: Path, size: int) -> None:
    import torch

    found = augmented(tmp_path, f"data.augment=[{{cutout: {size}}}]")(torch.ones(300, 1, 6, 6), torch.arange(300))
    starts = np.arange(6) - size // 2
    squares = {tuple(np.arange(6)[max(0, i) : max(0, i + size)]) for i in starts}
    for image in 1 - found[:, 0]:
        rows, columns = (tuple(np.flatnonzero(image.amax(axis).numpy())) for axis in (1, 0))
        assert {rows, columns} <= squares
        assert image.sum() == len(rows) * len(columns)


@pytest.mark.needs_torch
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")  # PyTorch's own, while it traces
@pytest.mark.parametrize("name", ["torch-eager", pytest.param("torch-max", marks=pytest.mark.exhaustive)])
def test_a_peer_has_the_same_accuracies_with_muon_and_parameter_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In float64, with rates of groups that follow a schedule, and filters that are not trained."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    layers = "[{conv2d: {out_channels: 8, kernel_size: 2, weight_init: whitening}}, gelu, flatten, {linear: 3}]"
    options = [
        "training.precision=float64", "schedule=polynomial", "model.input=[1, 6, 6]",
        "optimizer={muon: {lr: 0.02, normalize_weights: true, rest: {sgd: {lr: 0.05, momentum: 0.9}}}}",
        "parameter_groups=[{paths: 0.weight, trainable: false}, {paths: 0.bias, lr_factor: 3, weight_decay: 0.1}]",
    ]  # fmt: skip
    job = Job(training_runs.prepare(tmp_path, *options, layers=layers), "cpu")
    own, peer = systems.made("adtrain", "race", job)(job), systems.made(name, "race", job)(job)
    assert [each.accuracy for each in own] == [each.accuracy for each in peer]
    assert own[0].accuracy < own[-1].accuracy


class Answers:
    """A worker process that answers with these losses."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def send(self, **request: object) -> None:
        pass

    def receive(self) -> dict[str, object]:
        return {"losses": self.losses}


@pytest.mark.parametrize(
    ("ours", "theirs", "off"),
    [
        ([2.0, 1.0, 0.5], [2.0, 1.0, 0.6], 0.2),
        ([2.0, 9.0, 10.0], [2.0, 9.9, 20.0], 0.1),
        ([[2.0, 2.0], [1.0, 9.0], [1.0, 1.0]], [[2.0, 2.0], [1.0, 9.9], [2.0, 2.0]], 0.1),
    ],
    ids=["converges", "diverges", "one_of_two_members_diverges"],
)
def test_losses_after_one_above_twice_the_first_are_not_compared(ours: Any, theirs: Any, off: float) -> None:
    workers: Any = {"adtrain": Answers(ours), "torch-eager": Answers(theirs)}
    found = comparison.compare_losses(workers, systems.Choice([], {}), "x", [], "float32")
    assert found.off == {"adtrain": 0.0, "torch-eager": pytest.approx(off)}
