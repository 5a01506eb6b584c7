"""What is made of a finished sweep: a member as a run, so that all commands for runs take it, and the ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from adtrain import nn, ops
from adtrain.config.build import REGRESSION, takes_labels
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.core.vmap import vmap
from adtrain.files import write_atomic
from adtrain.passes import ALL
from adtrain.sweeps.folder import RESULTS, RUNS, SweepFolder
from adtrain.sweeps.members import Group, WaveInputs
from adtrain.sweeps.records import MemberResult, SweepResults
from adtrain.sweeps.session import Session, rungs_of
from adtrain.sweeps.step import with_targets
from adtrain.sweeps.wave import WaveState, best_of
from adtrain.training.checkpoint import fetch
from adtrain.training.evaluation import batch_size_of, mean_loss
from adtrain.training.experiment import Experiment
from adtrain.training.progress import METRICS, Epoch, Tested
from adtrain.training.run_folder import CONFIG, RunFolder, write_plugins
from adtrain.training.scores import Score, single_numbers
from adtrain.training.step import TrainState, averaged
from adtrain.training.summary import summarize
from adtrain.training.tasks import Regression
from adtrain.training.trainer import Result


def run_path(folder: SweepFolder, member: int) -> Path:
    """The folder of a member's run."""
    return folder.path / RUNS / str(member)


def finished_results(folder: SweepFolder) -> SweepResults:
    """The results. Raises AdtrainError where the sweep is not finished."""
    results = folder.results()
    if results is None:
        raise AdtrainError(f"{folder.path}: the sweep is not finished; {folder.advice()}")
    return results


def member_result(folder: SweepFolder, number: int | None) -> MemberResult:
    """The result of the member `number`, by default of the best one.

    Raises AdtrainError where there is no such member, or it did not finish.
    """
    results = finished_results(folder)
    found = next((x for x in results.members if number is None or x.member == number), None)
    if found is None:
        last = len(results.members) - 1
        raise AdtrainError(f"{folder.path}: found no member {number}, expected one from 0 to {last}")
    if found.status != "finished":
        how = f"was dropped after {found.epochs}"
        if found.status == "failed":
            how = f"failed at step {found.failed_at}"
        raise AdtrainError(f"{folder.path}: member {found.member} {how}, so its network is not trained to the end")
    return found


def final_states(session: Session, folder: SweepFolder) -> Iterator[tuple[Group, WaveState]]:
    """The last states of the waves of all groups, one in memory at a time."""
    rung = len(rungs_of(folder.options, session.groups)) - 1
    for group in session.groups:
        yield from ((group, state) for state in folder.states.of_waves(rung, group))


def member_state(
    session: Session, folder: SweepFolder, number: int, known: Sequence[tuple[Group, WaveState]] = ()
) -> tuple[Group, TrainState]:
    """The final state of a member, on the CPU: of a wave in `known`, or from the folder."""
    for group, state in chain(known, final_states(session, folder)):
        if number in state.members:
            row = state.members.index(number)
            return group, tree.map(lambda x, row=row: array(np.array(x[row])), state.state)
    raise folder.no_state(number)


def write_run(
    session: Session, folder: SweepFolder, number: int | None, known: Sequence[tuple[Group, WaveState]] = ()
) -> Path:
    """Write the run of a member, by default the best, into the sweep's folder; returns its path.

    `known` are final states that need not be read. An existing run is kept.
    Raises AdtrainError as `member_result` does.
    """
    found = member_result(folder, number)
    path = run_path(folder, found.member)
    if (path / "summary.json").is_file():
        return path
    group, state = member_state(session, folder, found.member, known)
    lines = folder.lines_of(session.groups)
    of_epoch = {x.epoch: (x, line) for line in lines for x in line.members if x.member == found.member and x.train}
    if len(of_epoch) < found.epochs:
        what = f"found {len(of_epoch)} epochs of member {found.member}, expected {found.epochs}"
        raise AdtrainError(f"{folder.path / METRICS}: {what}: the file is damaged")
    experiment = group.of_member(session.members[found.member])
    last, test, kind = of_epoch[max(of_epoch)][0], found.test, experiment.network.task.score_kind
    if not (isinstance(last.train, kind) and isinstance(test, kind)):
        raise AdtrainError(f"{folder.path / RESULTS}: found no finite scores of member {found.member}, expected some")
    path.mkdir(parents=True, exist_ok=True)
    run = RunFolder(path)
    write_atomic(path / CONFIG, experiment.config_text.encode())
    write_atomic(path / METRICS, b"")
    write_plugins(experiment.config, path)
    run.write_model(experiment, averaged(fetch(state)()))
    seconds = 0.0
    for epoch, (scored, line) in sorted(of_epoch.items()):
        share = line.added_seconds / len(line.members)
        seconds += share
        step = min(epoch * experiment.steps_per_epoch, experiment.total_steps)
        speed = experiment.examples_per_epoch / share if share else 0.0
        assert scored.train is not None
        run.append_metrics(Epoch(epoch, step, scored.train, scored.validation, share, speed, scored.metrics))
    result = Result(
        state=state,
        restored=found.model_epoch not in (None, found.epochs),
        ended="finished" if found.epochs == experiment.epochs else "early_stopping",
        best=best_of(experiment, {epoch: scored for epoch, (scored, _) in of_epoch.items()}, found.epochs),
        train=last.train,
        validation=last.validation,
        test=test,
        metrics=cast(Any, found.metrics),
        epochs=found.epochs,
        steps=step,
        images=experiment.examples_per_epoch * found.epochs,
        train_seconds=seconds,
        step_seconds=(),
    )
    run.append_metrics(Tested(found.epochs, step, test, single_numbers(found.metrics)))
    run.write_summary(summarize(experiment, result, session.device, [("training", 0.0, seconds)]))
    return path


LEAST = 1e-300
"""A probability of 0 counts as this in a logarithm."""


def members_of(folder: SweepFolder, top: int | None) -> list[int]:
    """The finished members, the best first, at most `top`. Raises AdtrainError where there are none."""
    numbers = [x.member for x in finished_results(folder).members if x.status == "finished"][:top]
    if not numbers:
        raise AdtrainError(f"{folder.path}: no member finished, expected at least one for an ensemble")
    return numbers


def evaluate(session: Session, folder: SweepFolder, members: Sequence[int]) -> Score:
    """The score of the ensemble of these members on the test part. Raises AdtrainError where a state is missing."""
    experiment = session.groups[0].experiment
    images, labels = experiment.test.images, np.asarray(experiment.test.labels)
    total: Any = 0.0
    missing = set(members)
    for group, state in final_states(session, folder):
        chosen = [number for number in state.members if number in set(members)]
        if not chosen:
            continue
        if group.experiment.test.labels.shape != labels.shape or not np.array_equal(
            group.experiment.test.labels, labels
        ):
            raise AdtrainError(f"{folder.path}: its members have different test parts, expected one for an ensemble")
        kept = averaged(state.only(chosen).state)
        params, statistics = tree.map(lambda x: array(x, device=session.device), (kept.params, kept.statistics))
        inputs = WaveInputs(group, [session.members[number] for number in chosen], session.device)
        total = total + _summed(inputs, params, statistics, images)
        missing -= set(chosen)
    if missing:
        raise folder.no_state(min(missing))
    return _score(experiment, total / len(members), labels)


def _summed(inputs: WaveInputs, params: nn.Params, statistics: nn.State, images: Any) -> np.ndarray:
    """The sum of the members' predictions for images (N, C, H, W): float64 (N, ...)."""
    network = inputs.group.experiment.network

    def of_member(params: nn.Params, statistics: nn.State, targets: Sequence[Value], batch: Value) -> Value:
        return with_targets(network, targets).predictions(params, statistics, batch)

    def of_batch(params: nn.Params, statistics: nn.State, targets: Sequence[Value], batch: Value) -> Value:
        found = vmap(of_member, (0, 0, 0, None))(params, statistics, targets, batch)
        return ops.sum(ops.astype(found, np.float64), axis=0)

    step = stage(of_batch, ALL)
    size = batch_size_of(network.task)
    starts = range(0, len(images), size)
    batches = (array(images[start : start + size], device=inputs.device) for start in starts)
    return np.concatenate([step(params, statistics, inputs.targets, batch).numpy() for batch in batches])


def _score(experiment: Experiment, predictions: np.ndarray, labels: np.ndarray) -> Score:
    """The score of predictions: loss and metrics of outputs from which a network would predict them, see `_outputs`."""
    network, task = experiment.network, experiment.network.task
    outputs = array(_outputs(experiment, predictions))
    targets = array(labels)
    loss = mean_loss(*(float(x) for x in network.loss_sums(outputs, targets)))
    sums = np.reshape(task.sums(outputs, targets).numpy(), -1).astype(np.float64).tolist()
    return task.score(loss, sums, len(labels), lambda: labels)


def _outputs(experiment: Experiment, predictions: np.ndarray) -> np.ndarray:
    """The outputs (N, ...), float64, from which a network would predict `predictions`."""
    task, loss = experiment.network.task, experiment.config.loss
    if isinstance(task, Regression):
        return (predictions - np.array(task.mean)) / np.array(task.std) if task.normalized else predictions
    if loss.kind in REGRESSION:
        return predictions
    clipped = np.clip(predictions, LEAST, 1 - 1e-16)
    return np.log(clipped) if takes_labels(loss) else np.log(clipped) - np.log1p(-clipped)
