"""The scores of a model on a split: its mean loss, and the metrics of its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeAlias

from adtrain.config import records
from adtrain.config.records import Measured
from adtrain.data.errors import printable
from adtrain.metrics import AMOUNT, SCALES, ByClass, Scale
from adtrain.option_types import Probability
from adtrain.table import COUNT, TEXT, Column, render

HIGHER_IS_BETTER = frozenset(name for name, scale in SCALES.items() if scale.higher_is_better)
LARGEST_LOG = 690.0
"""exp of it is below the limit of measured numbers."""


class ClassScore(NamedTuple):
    """The score of a classification. `accuracy` is the fraction of images whose most probable class is the label."""

    loss: Measured
    accuracy: Probability


class RegressionScore(NamedTuple):
    """The score of numbers to predict, in their original units. Each metric is the mean over the targets.

    `rmse` is the root of the mean squared error, `mae` the mean absolute error, and `r2` the coefficient of
    determination: 1 minus the squared error divided by that of the split's own mean. As in scikit-learn, the `r2` of a
    constant target is 1 if it is predicted exactly, otherwise 0. The loss is in the units of the network's outputs.
    """

    loss: Measured
    rmse: Measured
    mae: Measured
    r2: Measured


class MultilabelScore(NamedTuple):
    """The score of labels that are each 0 or 1.

    `accuracy` is the fraction of images with no wrong label (subset accuracy).
    `f1` is the mean over the labels of 2 tp / (2 tp + fp + fn) (macro F1), 0 for a label without any of the three.
    """

    loss: Measured
    accuracy: Probability
    f1: Probability


class TextScore(NamedTuple):
    """The score of a text of characters or bytes.

    `accuracy` is the fraction of positions whose most probable class is the next character or byte.
    `perplexity` is exp of the mean of -log p, where p is the probability of the next character or byte, and at most
    exp(690).
    """

    loss: Measured
    perplexity: Measured
    accuracy: Probability


class TokenScore(NamedTuple):
    """The score of a text of tokens. `perplexity` and `accuracy` are those of `TextScore`, for a token.

    `bits_per_byte` is the sum of -log2 p, where p is the probability of the next token, divided by the bytes of these
    tokens. It compares models with different tokenizers. The end of a text has no bytes.
    """

    loss: Measured
    perplexity: Measured
    bits_per_byte: Measured
    accuracy: Probability


class SolutionScore(NamedTuple):
    """The score of equations whose solution is known. `error` is the relative error in the L2 norm.

    It is the root of the sum of the squared errors of all outputs, divided by that of the squares of the solution;
    where the solution is 0 everywhere, it is not divided. In training it is that of a few points in each step.
    """

    loss: Measured
    error: Measured


class FieldScore(NamedTuple):
    """The score of a neural field, for all outputs together.

    `rmse` is the root of the mean squared error.
    `psnr` is the peak signal-to-noise ratio in decibels.
    """

    loss: Measured
    psnr: Measured
    rmse: Measured


class ResidualScore(NamedTuple):
    """The score of equations whose solution is not known."""

    loss: Measured


KINDS = (
    ClassScore, RegressionScore, MultilabelScore, TextScore, TokenScore, ResidualScore, SolutionScore, FieldScore
)  # fmt: skip


def _kind(value: Any) -> str:
    """The name of the kind of score with the fewest fields that has all keys of a record."""
    keys = set(value) if isinstance(value, Mapping) else set()
    fewest_first: list[Any] = sorted(KINDS, key=lambda kind: len(kind._fields))
    return next((kind.__name__ for kind in fewest_first if keys and keys <= set(kind._fields)), "ClassScore")


Score: TypeAlias = Annotated[
    Annotated[ClassScore, records.named("ClassScore")]
    | Annotated[RegressionScore, records.named("RegressionScore")]
    | Annotated[MultilabelScore, records.named("MultilabelScore")]
    | Annotated[TextScore, records.named("TextScore")]
    | Annotated[TokenScore, records.named("TokenScore")]
    | Annotated[SolutionScore, records.named("SolutionScore")]
    | Annotated[FieldScore, records.named("FieldScore")]
    | Annotated[ResidualScore, records.named("ResidualScore")],
    records.chosen_by(_kind),
]


def text(score: Score) -> str:
    """Loss and metrics on one line."""
    return ", ".join(f"{name} {value_text(name, value)}" for name, value in score._asdict().items())


def short_text(score: Score) -> str:
    """The loss and the first metric, if there is one, in few columns."""
    if isinstance(score, (ResidualScore, SolutionScore)):
        return text(score)
    metric, value = list(score._asdict().items())[1]
    shown = f"acc {value:.1%}" if metric == "accuracy" else f"{metric} {value:.3g}"
    return f"loss {_fixed('{:.3f}', score.loss)}, {shown}"


def metrics_first(names: Sequence[str]) -> list[str]:
    """The fields of a score, the loss last."""
    return [*(name for name in names if name != "loss"), "loss"]


def single_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of `training.metrics` that are one number, or have one: the mean over the classes, or the first."""
    numbers = {name: _first(found.macro if isinstance(found, ByClass) else found) for name, found in metrics.items()}
    return {name: x for name, x in numbers.items() if isinstance(x, float)}


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, (list, tuple)) and found else found


MOST_CLASSES = 5
"""Classes of which the terminal shows the value of each; the report shows those of all."""


def metric_lines(metrics: Mapping[str, Any]) -> list[str]:
    """A line for each metric of `training.metrics` that is a single number.

    A mean over at most MOST_CLASSES classes is followed by the value of each class.
    """
    names = {
        name: f"{name} (macro)" if isinstance(metrics[name], ByClass) else name for name in single_numbers(metrics)
    }
    width = max(map(len, names.values()), default=0)
    return [
        f"{names[name]:<{width}} {value_text(name, x)}{_class_values(name, metrics[name])}"
        for name, x in single_numbers(metrics).items()
    ]


def _class_values(name: str, found: Any) -> str:
    """The value of a metric for each class, such as ` (no 0.9912, yes 0.7500)`; empty for many classes."""
    if not isinstance(found, ByClass) or not 0 < len(found.by_class) <= MOST_CLASSES:
        return ""
    return f" ({', '.join(f'{printable(each)} {value_text(name, x)}' for each, x in found.by_class.items())})"


def confusion_lines(metrics: Mapping[str, Any], classes: Sequence[str], width: int) -> list[str]:
    """The confusion matrix among the metrics as a table, with a row for each label; none without it."""
    matrix: Sequence[Sequence[int]] = metrics.get("confusion", ())
    names = [*classes[: len(matrix)], *map(str, range(len(classes), len(matrix)))]
    columns = [Column("label", itemgetter(0), TEXT)]
    columns += [Column(name, itemgetter(i), COUNT, rank=i) for i, name in enumerate(names, 1)]
    rows = [(name, *row) for name, row in zip(names, matrix, strict=True)]
    return ["examples by label and predicted class", *render(columns, rows, width)] if rows else []


SMALL_LOSS = 1e-3
"""A loss below it, such as that of equations, is written with three digits."""


def value_text(metric: str, value: float) -> str:
    if metric == "loss" and 0 < abs(value) < SMALL_LOSS:
        return f"{value:.3g}"
    form = SCALES.get(metric, Scale()).form
    return amount_text(value) if form == AMOUNT.form else _fixed(form, value)


def amount_text(value: float) -> str:
    """A number in the units of a target with four digits, or more before the decimal point: 0.01234, 56,540."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else AMOUNT.form.format(value)


def _fixed(form: str, value: float) -> str:
    """The value in a format of fixed decimals, such as 2.3046; from 10^9 on as 4.079e+30."""
    return form.format(value) if abs(value) < 1e9 else f"{value:.4g}"
