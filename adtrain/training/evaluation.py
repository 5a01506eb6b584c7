"""The score of a model on a split, and its predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain import config, nn
from adtrain.config import Config
from adtrain.core import communicator
from adtrain.core.array import array, from_numpy
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import Staged, stage
from adtrain.curvature import EXAMPLES, LossAt, is_of_loss
from adtrain.data import Images, Split
from adtrain.metrics import METRICS, SCALES, ClassPredictions, Metric, MetricValue
from adtrain.passes import ALL
from adtrain.training.examples import Examples
from adtrain.training.network import Network
from adtrain.training.scores import HIGHER_IS_BETTER, Score
from adtrain.training.sharding import Sharding
from adtrain.training.step import EvaluationStep, Totals, repeated, zero_totals
from adtrain.training.tasks import Field, NextToken, Solution, Task

BATCH_SIZE, ROWS = 250, 40
POINTS, ELEMENTS = 2500, 1 << 14
"""The points of equations, and the elements of a field, in a batch: each has few numbers."""
MOST_OUTPUTS = 1 << 27
"""The most outputs of a batch of tokens, one for each token of the vocabulary at each position."""
BATCHES_AT_ONCE = 20


def batch_size_of(task: Task) -> int:
    """The number of examples in a batch of an evaluation: BATCH_SIZE, POINTS or ELEMENTS, fewer for many tokens."""
    if isinstance(task, (Solution, Field)):
        return POINTS if isinstance(task, Solution) else ELEMENTS
    if not isinstance(task, NextToken):
        return BATCH_SIZE
    return max(1, min(BATCH_SIZE, MOST_OUTPUTS // (task.length * len(task.lengths))))


Trained: TypeAlias = tuple[Network, nn.Params, nn.State]
"""A network with its parameters and its running statistics."""


class Sums(NamedTuple):
    """The sums over a split: of the losses, of their weights (see `Network.loss_sums`), and the task's."""

    loss: float
    weight: float
    of_task: Sequence[float]


class Evaluation:
    """Evaluates models of one network on a split. It keeps its memory, so recorded launches serve every evaluation.

    Args:
        step: the `evaluation_step` of an experiment or a trained model.
        task: that of its network.
        name: of the split, for errors.
        sharding: shard s of S has the batches s, s + S, ...; all ranks get the same sums.
    """

    def __init__(
        self, step: EvaluationStep, task: Task, examples: Examples, name: str = "test", sharding: Sharding | None = None
    ) -> None:
        self.step, self.task, self.examples, self.name, self.sharding = step, task, examples, name, sharding
        self._totals: Totals | None = None  # of the last evaluation

    def score(
        self, params: nn.Params, statistics: nn.State, before_batches: Callable[[], None] = lambda: None
    ) -> Score:
        """The score of a model on the split. Arguments and errors are those of `sums`.

        Raises AdtrainError also where the loss is not finite.
        """
        sums = self.sums(params, statistics, before_batches)
        loss = mean_loss(sums.loss, sums.weight)
        if not math.isfinite(loss):
            raise AdtrainError(f"the loss on the {self.name} examples is {loss}: the model's numbers have overflowed")
        return self.task.score(loss, sums.of_task, len(self.examples), lambda: np.asarray(self.examples.split.labels))

    def sums(self, params: nn.Params, statistics: nn.State, before_batches: Callable[[], None] = lambda: None) -> Sums:
        """The sums over the split.

        `before_batches` is called before every BATCHES_AT_ONCE batches. Its exceptions end the evaluation.
        Raises AdtrainError where the split is empty.
        """
        count, sharding = len(self.examples), self.sharding
        if not count:
            raise AdtrainError(f"the {self.name} split is empty")
        size = batch_size_of(self.task)
        batches = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
        if sharding is None:
            found = self._sums_of(batches, params, statistics, before_batches)
        else:
            own = []
            for shard in sharding.local:
                before_batches()  # as often on all ranks
                own.append(self._sums_of(batches[shard :: sharding.shards], params, statistics, lambda: None))
            found = np.add.accumulate(communicator.all_gathered(np.array(own)).reshape(sharding.shards, -1))[-1]
        loss, weight, *of_task = found.tolist()
        return Sums(loss, weight, of_task)

    def _sums_of(
        self,
        batches: Sequence[np.ndarray],
        params: nn.Params,
        statistics: nn.State,
        before_batches: Callable[[], None],
    ) -> np.ndarray:
        device = self.examples.device
        totals, self._totals = zero_totals(self.task, device, donated=self._totals), None
        for group in self.examples.groups(batches, ROWS):
            position = from_numpy(np.asarray(group.position, np.int64), device, donated=totals.position)
            totals = totals._replace(position=position)
            for done in range(0, group.steps, BATCHES_AT_ONCE):
                before_batches()
                times = min(BATCHES_AT_ONCE, group.steps - done)
                totals = repeated(self.step, times, (totals,), params, statistics, *group.inputs)
        self._totals = totals
        return np.array([float(totals.loss), float(totals.weight), *totals.sums.numpy().reshape(-1).tolist()])

    def begin_compiling(self, params: nn.Params, statistics: nn.State) -> None:
        """Begin to compile what evaluates full batches of the split."""
        if isinstance(self.step, Staged) and len(self.examples):
            batch = np.arange(min(batch_size_of(self.task), len(self.examples)))
            for group in self.examples.groups([batch], ROWS):
                self.step.compile(zero_totals(self.task, self.examples.device), params, statistics, *group.inputs)


def mean_loss(total: float, weight: float) -> float:
    """The mean loss of a split, from the sums of its losses and of their weights; 0 where all weights are 0."""
    return total / weight if weight else 0.0


def metrics_of(cfg: Config, task: Task, *names: str) -> dict[str, Metric]:
    """The metrics of `training.metrics`, by name, that of `training.best_by`, and those with these `names`.

    Raises ConfigError.
    """
    found = config.build.metrics(cfg)
    for name in ((cfg.training.best_by or "").partition("_")[2], *names):
        if name in METRICS and name not in task.score_kind._fields:
            found.setdefault(name, METRICS[name])
    return found


def higher_is_better(name: str, metrics: Mapping[str, Metric]) -> bool:
    """Whether higher values of a metric are better: of a score, or one of `metrics`."""
    return name in HIGHER_IS_BETTER if name in SCALES else getattr(metrics.get(name), "higher_is_better", True)


def named_metrics(
    trained: Trained, metrics: Mapping[str, Metric], classes: Sequence[str], examples: Split, device: str
) -> dict[str, MetricValue]:
    """The values of the metrics on all of `examples`, by name."""
    of_loss = {name: metric for name, metric in metrics.items() if is_of_loss(metric)}
    others = {name: metric for name, metric in metrics.items() if name not in of_loss}
    found: dict[str, MetricValue] = {}
    if others:
        probabilities = predictions(*trained, examples.images, device)
        found |= metrics_on(probabilities, np.asarray(examples.labels), others, classes)
    if of_loss and len(examples):
        at = _loss_at(trained, examples, device)
        found |= {name: metric(at) for name, metric in of_loss.items()}
    return {name: found[name] for name in metrics if name in found}


def _loss_at(trained: Trained, examples: Split, device: str) -> LossAt:
    """The loss of at most EXAMPLES examples, evenly spaced because files can be sorted by class."""
    network, params, statistics = trained
    count = min(len(examples), EXAMPLES)
    chosen = np.arange(count) * len(examples) // count
    images, labels = (array(np.asarray(x[chosen]), device=device) for x in (examples.images, examples.labels))
    return LossAt(network.curvature, params, statistics, images, labels)


def metrics_on(
    probabilities: np.ndarray, labels: np.ndarray, metrics: Mapping[str, Metric], classes: Sequence[str]
) -> dict[str, MetricValue]:
    """The values of the metrics, by name, of probabilities (N, classes) or (N, length, classes)."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    found = ClassPredictions(rows, labels.reshape(-1), class_names(classes, rows))
    return {name: metric(found) for name, metric in metrics.items()}


def class_names(classes: Sequence[str], rows: np.ndarray) -> tuple[str, ...]:
    """A name for each class, and for each further column of probabilities (N, outputs) that is predicted."""
    used = max(len(classes), int(rows.argmax(axis=1).max()) + 1)
    return (*classes, *map(str, range(len(classes), used)))


def predictions(network: Network, params: nn.Params, statistics: nn.State, images: Images, device: str) -> np.ndarray:
    """The task's predictions for images (N, C, H, W) before normalisation: the probability of each class or label,
    (N, classes), at each position of a sequence (N, length, classes), or the predicted numbers, (N, targets).

    Raises AdtrainError where one is NaN or infinite.
    """

    # For a few images, compiling a Program takes longer than running the operations one by one.
    size = batch_size_of(network.task)
    step = stage(network.predictions, ALL) if len(images) > size else network.predictions
    rows = [np.zeros((0, 0))]
    for start in range(0, len(images), size):
        batch = array(images[start : start + size], device=device)
        rows.append(step(params, statistics, batch).numpy())
    found = np.concatenate(rows[1:] or rows)
    if not np.isfinite(found).all():
        raise AdtrainError("the model's predictions are NaN or infinite: its weights overflowed in training")
    return found
