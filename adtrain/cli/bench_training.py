"""`adtrain bench step`, `scaling` and `startup`: the times of the training of a config."""

from __future__ import annotations

import json
from pathlib import Path

import click

from adtrain import config
from adtrain.bench.peers.systems import Choice, chosen
from adtrain.bench.scaling import measure, request
from adtrain.bench.startup import measure as startup_measure
from adtrain.bench.steps import result as steps
from adtrain.cli.bench_arguments import PEER_LIST, Numbers
from adtrain.cli.bench_output import Output, check_writable, output_options
from adtrain.cli.options import (
    ConfigName,
    FilePath,
    NameOf,
    Whole,
    autotune_option,
    device_option,
    json_option,
    plugin_option,
    set_autotune,
    set_option,
)
from adtrain.cli.output import progress
from adtrain.files import write_atomic
from adtrain.plugins import find

RANK_PEERS = list(request.PEERS)


@click.command(short_help="Time the training step of a config, whole and by layer.")
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@set_option
@plugin_option
@click.option("--batch-sizes", type=Numbers(), default=(), help="Also time the step with these batch sizes.")
@click.option("--trace", type=FilePath(), metavar="FILE", help="Write the timeline of a step, for Perfetto.")
@device_option
@autotune_option
@output_options
def step(
    config_path: str,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    trace: Path | None,
    device: str,
    autotune: str,
    output: Output,
) -> None:
    """Time the training step of CONFIG, or of the run in the folder RUN: by layer, by kernel, and as a whole.

    The whole step is timed eager, with one kernel for each operation ("staged"), and fused.
    """
    if trace is not None:
        check_writable("--trace", trace)
    for name in plugins:
        find(name).run()
    set_autotune(device, autotune)
    result, timeline = steps.result(config_path, overrides, device, batch_sizes, progress)
    if trace is not None:
        write_atomic(trace, json.dumps(timeline(), allow_nan=False).encode() + b"\n")
    output.write(result)


@click.command(short_help="Time the training step of a config on several numbers of ranks.")
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option(
    "--ranks", metavar="N,...", type=Numbers(), default="1,2", show_default=True, help="Numbers of processes."
)
@click.option(
    "--batch-size", metavar="N", type=Whole(min=1), default=128, show_default=True, help="Images of one rank."
)
@click.option(
    "--against",
    "peers",
    metavar="PEER,...",
    type=NameOf(RANK_PEERS, separator=","),
    default=(),
    help="Also time torch-ddp (eager) or torch-graph (a CUDA graph with an all-reduce).",
)
@set_option
@device_option
@output_options
def scaling(
    config_path: str,
    ranks: tuple[int, ...],
    batch_size: int,
    peers: tuple[str, ...],
    overrides: tuple[str, ...],
    device: str,
    output: Output,
) -> None:
    """Time the training step of CONFIG by several processes, and the exchanges of a step alone.

    Weak scaling: the batch grows with the ranks. Strong scaling: it stays.
    """
    output.write(measure.result(config_path, overrides, device, batch_size, sorted(ranks), peers, progress))


@click.command(short_help="Time the start of a training, with empty and with filled caches.")
@click.argument("config_path", metavar="CONFIG", type=ConfigName())
@click.option("--against", "wanted", metavar="PEER,...", type=PEER_LIST, help="Peers to start as well.")
@click.option(
    "--samples",
    metavar="N",
    type=Whole(1, 100),
    default=3,
    show_default=True,
    help="Processes with empty caches, and as many with filled ones.",
)
@set_option
@device_option
@click.option("--json-file", type=FilePath(), metavar="FILE", help="Also write the result as JSON.")
@json_option
def startup(
    config_path: str,
    wanted: tuple[str, ...] | None,
    samples: int,
    overrides: tuple[str, ...],
    device: str,
    json_file: Path | None,
    as_json: bool,
) -> None:
    """Time `adtrain train CONFIG` from the start of its process to its end, and show what the time goes into.

    Each sample is two processes: one with empty caches, and one with the caches that the first one has filled. A PEER,
    such as torch-compile, imports its package, compiles and takes its first steps. Its losses are compared with
    adtrain's; the exit code is 1 if they differ.
    """
    output = Output(as_json, json_file, None)
    precision = config.load(config_path, overrides).training.precision
    choice = chosen(wanted, device, "steps") if wanted else Choice([], {})
    task = startup_measure.Task(config_path, overrides, device)
    result = startup_measure.result(task, precision, choice, samples, progress)
    output.write(result)
    if result["different"]:
        raise SystemExit(1)
