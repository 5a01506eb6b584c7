"""`adtrain bench against`, `devices` and `compare`: comparisons with other systems, of devices, and of two results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from adtrain.bench import compare as comparing
from adtrain.bench.analysis import result as analysis
from adtrain.bench.analysis.ops import SIZED_OPS
from adtrain.bench.peers import op_cases
from adtrain.bench.peers import result as peers
from adtrain.bench.peers.systems import Work, chosen
from adtrain.cli.bench_arguments import PEER_LIST
from adtrain.cli.bench_output import Output, output_options
from adtrain.cli.options import (
    ConfigName,
    FilePath,
    Whole,
    autotune_option,
    device_option,
    op_option,
    resolve_device,
    select_ops,
    set_autotune,
    set_option,
)
from adtrain.cli.output import progress


@click.command(short_help="Compare with PyTorch, JAX and NumPy.")
@click.argument("wanted", metavar="PEER,...", type=PEER_LIST)
@click.argument("configs", metavar="[CONFIG|RUN]...", nargs=-1, type=ConfigName())
@op_option(case.op for case in op_cases.cases("cpu"))
@click.option("--members", type=Whole(min=1), metavar="N", help="Train N networks together, with N seeds.")
@set_option
@device_option
@autotune_option
@output_options
def against(
    wanted: tuple[str, ...],
    configs: tuple[str, ...],
    names: tuple[str, ...],
    members: int | None,
    overrides: tuple[str, ...],
    device: str,
    autotune: str,
    output: Output,
) -> None:
    """Compare the training step of each CONFIG, or single operations, with other systems.

    A PEER is torch, jax or numpy, or one form of them: torch-eager, torch-compile, torch-graph, jax-jit or jax-scan.
    With --members it is torch or jax, or one of torch-vmap, torch-vmap-compile and jax-vmap.

    Results are compared before times; the exit code is 1 if they differ. Only one process runs at a time.
    """
    _check_choice(configs, names, overrides)
    if members is not None and not configs:
        raise click.UsageError("--members trains networks; give a CONFIG")
    set_autotune(device, autotune)
    work: Work = "operations" if not configs else "steps" if members is None else "members"
    choice = chosen(wanted, device, work)
    if configs:
        result = peers.of_configs(configs, overrides, device, choice, autotune, progress, members)
    else:
        result = peers.of_operations(select_ops(op_cases.cases(device), names), device, choice, autotune, progress)
    output.write(result)
    if peers.is_different(result):
        raise SystemExit(1)


@click.command(short_help="Compare CPU, GPU and naive loops.")
@click.argument("configs", metavar="[CONFIG|RUN]...", nargs=-1, type=ConfigName())
@op_option(each.op for each in SIZED_OPS)
@set_option
@autotune_option
@output_options
def devices(
    configs: tuple[str, ...], names: tuple[str, ...], overrides: tuple[str, ...], autotune: str, output: Output
) -> None:
    """Compare the CPU, the GPU with and without copies of data, and naive loops.

    Times the training step of each CONFIG, or single operations, and shows the size from which the GPU is faster.
    """
    _check_choice(configs, names, overrides)
    both = resolve_device("cpu"), resolve_device("gpu")
    set_autotune("gpu", autotune)
    if configs:
        result = analysis.of_configs(configs, overrides, both, progress)
    else:
        result = analysis.of_operations(select_ops(SIZED_OPS, names), not names, both, progress)
    output.write(result)


@click.command(short_help="Show the times that changed between two results.")
@click.argument("before", type=FilePath())
@click.argument("after", type=FilePath())
@output_options
def compare(before: Path, after: Path, output: Output) -> None:
    """Show the times that changed between two results, files of `bench --json-file`. Nothing is timed."""
    output.write(comparing.result(str(before), str(after)))


def _check_choice(configs: Sequence[str], names: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise UsageError for --op with a CONFIG, and for --set without one."""
    if configs and names:
        raise click.UsageError("--op selects operations; give no CONFIG")
    if overrides and not configs:
        raise click.UsageError("--set changes a config; give a CONFIG")
