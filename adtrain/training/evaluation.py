"""The score of a model on a split, its predictions, and the influence of training examples on its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain import config, nn
from adtrain.config import Config
from adtrain.core import communicator, tree
from adtrain.core.array import Value, array, from_numpy
from adtrain.core.errors import AdtrainError
from adtrain.core.forward import jvp
from adtrain.core.staging import Staged, stage
from adtrain.core.vmap import vmap
from adtrain.curvature import EXAMPLES, LossAt, is_of_loss, per_example_grad
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
    of_loss = [name for name, metric in metrics.items() if is_of_loss(metric)]
    found: dict[str, MetricValue] = {}
    if len(of_loss) < len(metrics):
        probabilities = predictions(*trained, examples.images, device)
        found |= metrics_on(probabilities, np.asarray(examples.labels), metrics, classes)
    if of_loss and len(examples):
        found |= metrics_of_loss(trained, examples, metrics, device)
    return {name: found[name] for name in metrics if name in found}


def metrics_of_loss(
    trained: Trained, examples: Split, metrics: Mapping[str, Metric], device: str
) -> dict[str, MetricValue]:
    """The values of those metrics that need the loss, by name.

    The loss is that of at most EXAMPLES examples, evenly spaced because files can be sorted by class.
    """
    network, params, statistics = trained
    count = min(len(examples), EXAMPLES)
    chosen = np.arange(count) * len(examples) // count
    images, labels = (array(np.asarray(x[chosen]), device=device) for x in (examples.images, examples.labels))
    at = LossAt(network.curvature, params, statistics, images, labels)
    return {name: metric(at) for name, metric in metrics.items() if is_of_loss(metric)}


def metrics_on(
    probabilities: np.ndarray, labels: np.ndarray, metrics: Mapping[str, Metric], classes: Sequence[str]
) -> dict[str, MetricValue]:
    """The values of those metrics that need predictions, by name, from probabilities (N, classes) or (N, length,
    classes)."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    found = ClassPredictions(rows, labels.reshape(-1), class_names(classes, rows))
    return {name: metric(found) for name, metric in metrics.items() if not is_of_loss(metric)}


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


CHUNK_ELEMENTS = 1 << 25
"""The elements of the gradients of test examples that are in memory at a time."""


@dataclass(frozen=True)
class Influenced:
    """A test example with a high loss, and the training examples that change it most.

    Attributes:
        example: its index in the test part.
        helpful, harmful: indices in the training part with their influence: positive ones from the largest on, and
            negative ones from the smallest on.
    """

    example: int
    loss: float
    helpful: Sequence[tuple[int, float]]
    harmful: Sequence[tuple[int, float]]


def influence(trained: Trained, train: Split, test: Split, count: int, shown: int, device: str) -> list[Influenced]:
    """The `count` test examples with the highest losses, and for each at most `shown` examples of both kinds.

    The influence of a training example z on a test example z' is the dot product of the gradients of their losses by
    the parameters (TracIn with the last checkpoint: G. Pruthi et al.: "Estimating training data influence by tracing
    gradient descent", 2020). A step of gradient descent on z alone with the small learning rate r lowers the loss of z'
    by r times the influence. The gradient of z' is computed once. The product with the gradient of z is the derivative
    of the loss of z in its direction, by forward mode, so no gradient of a training example is computed.

    Raises AdtrainError for equations, whose points have no loss of their own, and for a part without examples.
    """
    network, params, others = trained
    if isinstance(network.task, Solution):
        raise AdtrainError("influence: the run solves equations, expected one on examples with a loss each")
    for name, split in (("training", train), ("test", test)):
        if not len(split):
            raise AdtrainError(f"influence: the {name} part is empty, expected at least one example")

    def of_one(params: Any, image: Value, label: Value) -> Value:
        return network.curvature.loss_of_one(params, others, image, label)

    def losses(params: Any, images: Value, labels: Value) -> Value:
        return vmap(of_one, (None, 0, 0))(params, images, labels)

    def products(params: Any, directions: Any, images: Value, labels: Value) -> Value:
        along = lambda v: jvp(lambda p: losses(p, images, labels), (params,), (v,))[1]  # noqa: E731
        return vmap(along)(directions)

    size = batch_size_of(network.task)
    found = in_batches(test, size, device, stage(losses, ALL), params)
    worst = np.argsort(-found, kind="stable")[:count]
    gradients, changes = stage(per_example_grad(of_one), ALL), stage(products, ALL)
    at_once = max(1, CHUNK_ELEMENTS // max(1, sum(x.size for x in tree.leaves(params))))
    rows: list[np.ndarray] = []
    for start in range(0, len(worst), at_once):
        chosen = worst[start : start + at_once]
        directions = gradients(params, *(rows_on(x, chosen, device) for x in (test.images, test.labels)))
        rows += list(in_batches(train, size, device, changes, params, directions))
    return [
        Influenced(int(i), float(found[i]), most_influential(row, shown, True), most_influential(row, shown, False))
        for i, row in zip(worst, rows, strict=True)
    ]


def in_batches(split: Split, size: int, device: str, f: Callable[..., Value], *args: Any) -> np.ndarray:
    """The results (..., examples) in float64 of a function of `args`, images and labels, for batches of a split."""
    batches = [np.arange(start, min(start + size, len(split))) for start in range(0, len(split), size)]
    found = [f(*args, *(rows_on(x, batch, device) for x in (split.images, split.labels))).numpy() for batch in batches]
    return np.concatenate(found, axis=-1).astype(np.float64)


def rows_on(x: Any, chosen: np.ndarray, device: str) -> Value:
    """The rows `chosen` of images or labels, on the device."""
    return array(np.asarray(x[chosen]), device=device)


def most_influential(row: np.ndarray, shown: int, helpful: bool) -> list[tuple[int, float]]:
    """The largest positive influences of a row, or the most negative ones, with their indices."""
    order = np.argsort(-row if helpful else row, kind="stable")[:shown]
    return [(int(i), float(row[i])) for i in order if (row[i] > 0) == helpful and row[i] != 0]
