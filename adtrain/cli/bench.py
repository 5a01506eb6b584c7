"""`adtrain bench`: the times of operations at standard sizes, or of a config's own training step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from adtrain import __version__, config, training
from adtrain.cli import bench_candidates, bench_report
from adtrain.cli.devices import describe_cpu
from adtrain.cli.op_option import op_option, select_ops
from adtrain.cli.options import autotune_option, device_option, mode_options, print_json, progress, set_autotune
from adtrain.cli.table import terminal_width
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.measure import bench_config, bench_ops, roofline, timing
from adtrain.measure.bench_ops import BenchRow
from adtrain.measure.bench_sizes import BENCHES, Bench

STDOUT = "-"


@click.command(short_help="Time the operations, or a config's own layers.")
@click.argument("config_path", metavar="[CONFIG]", required=False)
@device_option
@autotune_option
@op_option
@click.option(
    "--candidates",
    is_flag=True,
    help="Show what each kernel that a GPU has for the operations reaches, and which one is taken.",
)
@mode_options
@click.option("--json", "json_file", metavar="FILE", help="Write the result as JSON; - for stdout, without the table.")
def command(
    config_path: str | None,
    device: str,
    autotune: str,
    names: tuple[str, ...],
    candidates: bool,
    mode: str | None,
    json_file: str | None,
) -> None:
    """Time each operation forward and backward at standard sizes, or the training step that CONFIG describes: its
    layers forward, backward and update, and end to end.

    Every time is a median after a warm-up; the JSON holds the 20th and 80th percentiles as well. GFLOP/s and GB/s
    count what an operation computes, and the bytes it must read and write; "of peak" is the least time that the device
    needs for either, as measured by `adtrain devices --measure`, as a share of the time it took.
    """
    if config_path is not None and names:
        raise click.UsageError("--op picks operations of the standard sizes; with a CONFIG all of its layers are timed")
    if config_path is None and mode is not None:
        raise click.UsageError("--eager and --no-fuse are for the step of a CONFIG; operations are timed one by one")
    if candidates and config_path is not None:
        raise click.UsageError("--candidates is for operations at their standard sizes; give no CONFIG")
    if candidates and device == "cpu":
        raise click.UsageError("--candidates: only a GPU has kernels to choose from, and this runs on the CPU")
    set_autotune(device, autotune)
    if json_file not in (None, STDOUT):
        _check_writable(Path(json_file))
    protocol = describe_protocol(device)
    if candidates:
        result: dict[str, Any] = {
            "protocol": protocol,
            "candidates": bench_candidates.measured(select_ops(BENCHES, names)),
        }
        lines = bench_candidates.report(result, terminal_width())
    elif config_path is None:
        rows = _bench_ops(select_ops(BENCHES, names), device)
        result = {"protocol": protocol, "noisy": noisy_share(rows), "ops": [bench_ops.record(row) for row in rows]}
        lines = bench_report.of_ops(result, terminal_width())
    else:
        result = {"protocol": protocol, **_bench_config(config_path, device, training.Mode(mode or "fused"))}
        lines = bench_report.of_config(result, terminal_width())
    if json_file == STDOUT:
        print_json(result)
        return
    click.echo("\n".join(lines))
    if json_file is not None:
        write_atomic(json_file, json.dumps(result, indent=2, allow_nan=False).encode() + b"\n")


def _bench_ops(benches: Sequence[Bench], device: str) -> list[BenchRow]:
    progress(f"bench: timing {len(benches)} sizes")
    shown: Iterable[list[BenchRow]] = tqdm(
        bench_ops.bench(benches, device), total=len(benches), desc="bench", unit=" sizes", disable=None
    )
    return [row for rows in shown for row in rows]


def _bench_config(path: str, device: str, mode: training.Mode) -> dict[str, Any]:
    cfg = config.load(path)
    training.check_precision(cfg, device)
    experiment = training.prepare(cfg, mode)
    images = experiment.full_batch
    progress(f"bench: timing steps of {experiment.config.name}, a few seconds")
    run_steps = training.continuation(experiment, experiment.initial_state(device), device)
    step = bench_config.bench_step(run_steps, images, device=device)
    whole = step.profile.step
    return {
        "config": experiment.config.name,
        "precision": experiment.config.training.precision,
        "batch_size": images,
        "mode": mode.value,
        "images_per_second": step.images_per_second,
        "step_ms": {"median": whole.median_ms, "p20": whole.p20_ms, "p80": whole.p80_ms, "samples": whole.samples},
        "noisy": float(whole.noisy),
        "ops_sum_ms": step.profile.ops_sum_ms,
        "ops_to_step_ratio": step.profile.ratio,
        "layers": step.layers,
        "ops": step.profile.rows,
    }


def describe_protocol(device: str) -> Mapping[str, Any]:
    """What the numbers were measured with, and how."""
    cpu = describe_cpu()
    peak = roofline.known(device)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "device_name": backend(device).device_name(),
        "cores": cpu["usable_cores"],
        "compiler": backend(device).compiler_name(),
        "blas": cpu["blas"],
        "blas_threads": cpu["blas_threads"],
        "versions": {"adtrain": __version__, "python": cpu["python"], "numpy": cpu["numpy"]},
        "min_sample_ms": timing.MIN_SAMPLE_MS,
        "samples": [timing.MIN_SAMPLES, timing.MAX_SAMPLES],
        "overhead_ms": timing.overhead_ms(),
        "roofline": peak and peak._asdict(),
    }


def noisy_share(rows: Sequence[BenchRow]) -> float:
    """The part of the measurements whose percentiles lie far apart."""
    return sum(row.timing.noisy for row in rows) / len(rows)


def _check_writable(path: Path) -> None:
    """AdtrainError before anything is measured where the file cannot be written after."""
    if path.is_dir():
        raise AdtrainError(f"--json {path}: is a folder, expected a file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise AdtrainError(f"--json {path}: {path.parent} is no folder that can be written to")
