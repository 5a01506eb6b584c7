"""The comparison of an exported file with the run, as all formats report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adtrain.cli.output import progress
from adtrain.data import Split
from adtrain.training import TrainedModel


def note_float32(trained: TrainedModel) -> None:
    """Tell the user if the run's precision is not that of the file."""
    if (precision := trained.config.training.precision) != "float32":
        progress(f"trained in {precision}, written in float32")


def test_images(trained: TrainedModel) -> Split:
    """The run's test set, with a note that the comparison starts. Raises DataError where it cannot be read."""
    test = trained.test_split()
    progress(f"comparing on {len(test):,} test images")
    return test


def comparison_lines(check: Mapping[str, Any]) -> list[str]:
    """The result of a comparison as lines of text."""
    if "skipped" in check:
        return [f"check   not checked: {check['skipped']}"]
    verdict = f"{check['different']:,} predicted otherwise" if check["different"] else "same predictions"
    return [
        f"check   {check['program']}, {check['images']:,} test images: {verdict}",
        f"        {', '.join(f'{name} within {gap:.2g}' for name, gap in check['outputs'].items())}",
    ]
