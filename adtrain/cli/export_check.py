"""The comparison of an exported file with the run, as all formats report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adtrain.cli.output import progress
from adtrain.data import Split
from adtrain.text import counted
from adtrain.training import TrainedModel


def note_float32(trained: TrainedModel) -> None:
    """Tell the user if the run's precision is not that of the file."""
    if (precision := trained.config.training.precision) != "float32":
        progress(f"trained in {precision}, written in float32")


def test_images(trained: TrainedModel) -> Split:
    """The run's test set, with a note that the comparison starts. Raises DataError where it cannot be read."""
    test = trained.test_split()
    progress(f"comparing on {counted(len(test), f'test {trained.config.data.examples}')}")
    return test


def comparison_lines(check: Mapping[str, Any], examples: str) -> list[str]:
    """The result of a comparison as lines of text; `examples` says what the data consist of."""
    if "skipped" in check:
        return [f"check   not checked: {check['skipped']}"]
    verdict = f"{check['different']:,} predicted otherwise" if check["different"] else "same predictions"
    return [
        f"check   {check['program']}, {counted(check['images'], f'test {examples}')}: {verdict}",
        f"        {', '.join(f'{name} within {gap:.2g}' for name, gap in check['outputs'].items())}",
    ]
