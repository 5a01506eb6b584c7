"""`adtrain train --repeat`: trains one config from several seeds, and tabulates mean and deviation of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

from adtrain.cli.output import is_quiet, message, print_json, progress, show
from adtrain.config import Config
from adtrain.core.errors import AdtrainError
from adtrain.table import Column, render, terminal_width
from adtrain.training import RunFolder, Summary, scores

Train: TypeAlias = Callable[[Config, Path | None, str], tuple[RunFolder, Summary]]
"""(config, path, name) to (folder, summary): trains into the folder `path`, or runs/NAME if that is None."""

SECONDS = "train_seconds"


def repeat(configs: Sequence[Config], output_dir: Path | None, train: Train, as_json: bool) -> None:
    """Train two or more configs that differ in their seeds; print the runs, their mean and sample standard deviation.

    If one of them fails or is interrupted, the finished runs are kept and listed.
    Raises AdtrainError, before anything is trained, where a run's folder in `output_dir` exists.
    """
    targets: list[tuple[Path | None, str]] = []
    for cfg in configs:
        seed = f"seed{cfg.training.seed}"
        targets.append((output_dir and output_dir / seed, f"{cfg.name}-{seed}"))
        if output_dir is not None and (output_dir / seed).exists():
            raise AdtrainError(f"{output_dir / seed}: already exists; give another --output-dir, or remove it first")
    runs: list[dict[str, Any]] = []
    try:
        for number, (cfg, target) in enumerate(zip(configs, targets, strict=True), 1):
            progress(f"run {number} of {len(configs)}, seed {cfg.training.seed}")
            folder, summary = train(cfg, *target)
            results = {**summary.test._asdict(), SECONDS: summary.train_seconds}
            runs.append({"run": str(folder.path), "seed": cfg.training.seed, **results})
    except BaseException:
        if runs:
            message(f"finished runs are kept: {', '.join(run['run'] for run in runs)}")
        raise
    if is_quiet() and not as_json:
        show(*(run["run"] for run in runs))
        return
    metrics = scores.metrics_first(summary.test._fields)
    measured = (*metrics, SECONDS)
    means = {field: mean(run[field] for run in runs) for field in measured}
    deviations = {field: stdev(run[field] for run in runs) for field in measured}
    if as_json:
        print_json({"runs": runs, "mean": means, "deviation": deviations})
        return
    rows = [[run["run"], str(run["seed"]), *_cells(metrics, run)] for run in runs]
    rows += [["mean", "", *_cells(metrics, means)], ["deviation", "", *_cells(metrics, deviations)]]
    columns = (Column("run", text=True), Column("seed", rank=1), *map(Column, metrics), Column("training"))
    show(*render(columns, rows, terminal_width()))


def _cells(metrics: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    return [*(scores.value_text(name, values[name]) for name in metrics), f"{values[SECONDS]:.2f} s"]
