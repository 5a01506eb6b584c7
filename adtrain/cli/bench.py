"""`adtrain bench`: the times of operations over sizes, or of a config's own training step; and what moved since."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from adtrain.bench import page
from adtrain.bench.ops.sweep import DTYPES
from adtrain.bench.ops.table import BENCHES
from adtrain.cli import bench_against, bench_analysis, bench_candidates, bench_compare, bench_step, bench_sweep
from adtrain.cli.bench_against import against_option
from adtrain.cli.bench_analysis import devices_option
from adtrain.cli.op_option import op_option, select_ops
from adtrain.cli.options import autotune_option, print_json, set_autotune, set_option
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic

STDOUT = "-"


class Numbers(click.ParamType):
    """Whole numbers above 0 with commas between them, received as a tuple."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        words = value.split(",") if isinstance(value, str) else [str(x) for x in value]
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"found {value!r}, expected whole numbers above 0 with commas between them", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


@click.command(short_help="Time the operations, or a config's own layers.")
@click.argument("configs", metavar="[CONFIG]...", nargs=-1)
@set_option
@devices_option
@against_option
@autotune_option
@op_option
@click.option("--sizes", type=Numbers(), help="Sizes of the operations in place of the standard ones.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the operations' elements.  [default: float32]")
@click.option(
    "--candidates",
    is_flag=True,
    help="Show what each kernel that a GPU has for the operations reaches, and which one is taken.",
)
@click.option("--batch-sizes", type=Numbers(), help="Time the step of CONFIG on batches of these sizes as well.")
@click.option("--trace", "trace_file", metavar="FILE", help="Write one step of CONFIG for Perfetto, in each mode.")
@click.option("--json", "json_file", metavar="FILE", help="Write the result as JSON; - for stdout, without the table.")
@click.option(
    "--html", "html_file", metavar="FILE", help="Write the result as a page with plots that needs no network."
)
@click.option("--compare", nargs=2, metavar="A B", help="Time nothing; show what moved between two JSON results.")
def command(
    configs: tuple[str, ...],
    overrides: tuple[str, ...],
    devices: tuple[str, ...],
    against: tuple[str, ...],
    autotune: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    dtype: str | None,
    candidates: bool,
    batch_sizes: tuple[int, ...] | None,
    trace_file: str | None,
    json_file: str | None,
    html_file: str | None,
    compare: tuple[str, str] | None,
) -> None:
    """Time each operation, forward and each gradient by itself, over sizes; or the training step that CONFIG describes:
    its layers, and end to end eagerly, with a kernel an operation, and fused, in turn. With --against the same in other
    systems; with --device cpu,gpu the CPU, the GPU and a naive loop. These two take several CONFIGs.

    Every time is a median after a warm-up, with its 95% confidence interval; "~" marks one whose interval is wider than
    5% of it. GFLOP/s and GB/s count what an operation computes, and the bytes it must read and write; "of peak" is the
    least time that the device needs for either, by what it was measured to reach, as a share of the time it took.
    """
    device, config_path = devices[-1], configs[0] if configs else None
    of_operations = {"--op": names, "--sizes": sizes, "--dtype": dtype, "--candidates": candidates}
    of_config = {"--batch-sizes": batch_sizes, "--trace": trace_file, "--set": overrides}
    if against or len(devices) > 1:
        alone = {**of_operations, **of_config, "--compare": compare, "--op": None, "--set": None}
        _refuse([name for name, value in alone.items() if value], "it goes neither with --against nor with two devices")
        if against and len(devices) > 1:
            raise click.UsageError("--against compares on one device: --device cpu or --device gpu")
    elif len(configs) > 1:
        raise click.UsageError("several CONFIGs are for --against and --device cpu,gpu; give one")
    if compare:
        given = [name for name, value in {**of_operations, **of_config, "CONFIG": config_path}.items() if value]
        _refuse(given, "with --compare nothing is timed")
    elif config_path is None:
        _refuse([name for name, value in of_config.items() if value], "it is about the step of a CONFIG, give one")
    else:
        _refuse([name for name, value in of_operations.items() if value], "it is about operations, give no CONFIG")
    if candidates and device == "cpu":
        raise click.UsageError("--candidates: only a GPU has kernels to choose from, and this runs on the CPU")
    set_autotune(device, autotune)
    files = {"--json": None if json_file == STDOUT else json_file, "--html": html_file, "--trace": trace_file}
    for option, file in files.items():
        if file is not None:
            _check_writable(option, Path(file))
    if against:
        result, lines = bench_against.run(configs, overrides, names, device, against, autotune)
    elif len(devices) > 1:
        result, lines = bench_analysis.run(configs, overrides, names, devices)
    elif compare:
        result, lines = bench_compare.run(compare)
    elif candidates:
        result, lines = bench_candidates.run(select_ops(BENCHES, names), sizes)
    elif config_path is None:
        benches = select_ops(BENCHES, names)
        result, lines = bench_sweep.run(benches, sizes, dtype or "float32", device, strict=bool(names))
    else:
        result, lines = bench_step.run(config_path, overrides, device, batch_sizes or (), trace_file)
    if json_file == STDOUT:
        print_json(result)
    else:
        click.echo("\n".join(lines))
        if json_file is not None:
            write_atomic(json_file, json.dumps(result, indent=2, allow_nan=False).encode() + b"\n")
    if html_file is not None:
        write_atomic(html_file, page.render(result).encode())
    if against and bench_against.is_different(result):
        raise SystemExit(1)


def _refuse(given: Sequence[str], why: str) -> None:
    """UsageError for options that do not go together with the others."""
    if given:
        raise click.UsageError(f"{given[0]}: {why}")


def _check_writable(option: str, path: Path) -> None:
    """AdtrainError before anything is measured where the file cannot be written after."""
    if path.is_dir():
        raise AdtrainError(f"{option} {path}: is a folder, expected a file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise AdtrainError(f"{option} {path}: {path.parent} is no folder that can be written to")
