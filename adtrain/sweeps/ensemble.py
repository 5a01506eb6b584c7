"""The ensemble of the members of a finished sweep: the mean of their probabilities, or of the numbers they predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain import nn, ops
from adtrain.config.build import REGRESSION, takes_labels
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.core.vmap import vmap
from adtrain.passes import ALL
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.member_run import final_states, finished
from adtrain.sweeps.members import Group
from adtrain.sweeps.session import Session
from adtrain.training.evaluation import BATCH_SIZE, mean_loss
from adtrain.training.experiment import Experiment
from adtrain.training.scores import Score
from adtrain.training.tasks import Regression

LEAST = 1e-300
"""A probability of 0 counts as this in a logarithm."""


def members_of(folder: SweepFolder, top: int | None) -> list[int]:
    """The finished members, the best first, at most `top`. Raises AdtrainError where there are none."""
    numbers = [x.member for x in finished(folder).members if x.status == "finished"][:top]
    if not numbers:
        raise AdtrainError(f"{folder.path}: no member finished, expected at least one for an ensemble")
    return numbers


def evaluate(session: Session, folder: SweepFolder, members: Sequence[int]) -> Score:
    """The score of the ensemble of these members on the test part. Raises AdtrainError where a state is missing."""
    experiment = session.groups[0].experiment
    images, labels = experiment.test.images, experiment.test.labels
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
        kept = state.only(chosen).state
        params, statistics = tree.map(lambda x: array(x, device=session.device), (kept.params, kept.statistics))
        total = total + _summed(group, params, statistics, images, session.device)
        missing -= set(chosen)
    if missing:
        raise folder.no_state(min(missing))
    return _score(experiment, total / len(members), labels)


def _summed(group: Group, params: nn.Params, statistics: nn.State, images: Any, device: str) -> np.ndarray:
    """The sum of the members' predictions for images (N, C, H, W): float64 (N, ...)."""
    predictions = group.experiment.network.predictions

    def of_batch(params: nn.Params, statistics: nn.State, batch: Value) -> Value:
        found = vmap(predictions, (0, 0, None))(params, statistics, batch)
        return ops.sum(ops.astype(found, np.float64), axis=0)

    step = stage(of_batch, ALL)
    starts = range(0, len(images), BATCH_SIZE)
    batches = (array(images[start : start + BATCH_SIZE], device=device) for start in starts)
    return np.concatenate([step(params, statistics, batch).numpy() for batch in batches])


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
