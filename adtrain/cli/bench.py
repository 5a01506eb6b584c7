"""`adtrain bench`: its options, and where its result goes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from adtrain.bench import compare as comparing
from adtrain.bench import page, text
from adtrain.bench.analysis import result as analysis
from adtrain.bench.analysis.ops import SIZED_OPS
from adtrain.bench.ops import candidates as kernel_candidates
from adtrain.bench.ops import sweep
from adtrain.bench.ops.own import own_bench
from adtrain.bench.ops.sweep import DTYPES
from adtrain.bench.ops.table import BENCHES
from adtrain.bench.peers import op_cases
from adtrain.bench.peers import result as peers
from adtrain.bench.peers.systems import chosen
from adtrain.bench.steps import result as step
from adtrain.bench.text.cells import wrapped
from adtrain.cli.op_option import op_option, own_ops, select_ops
from adtrain.cli.options import autotune_option, plugin_option, resolve_device, set_autotune, set_option
from adtrain.cli.output import print_json, progress, show
from adtrain.config.problems import shortened
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.plugins import find
from adtrain.table import terminal_width

STDOUT = "-"


class Numbers(click.ParamType):
    """Whole numbers above 0, separated by commas; received as a tuple."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        words = value.split(",") if isinstance(value, str) else [str(x) for x in value]
        if not all(word.strip().isdecimal() and len(word) < 20 and 0 < int(word) < 2**29 for word in words):
            expected = "whole numbers above 0 with commas between them, below 2^29"
            self.fail(f"found {shortened(value)!r}, expected {expected}", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


def _split_names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",")) if value is not None else ()


def _resolve_devices(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    if value == "cpu,gpu":
        return resolve_device("cpu"), resolve_device("gpu")
    if value not in ("auto", "cpu", "gpu"):
        raise click.BadParameter(f"{value!r} is not one of 'auto', 'cpu', 'gpu', 'cpu,gpu'.")
    return (resolve_device(value),)


@click.command(short_help="Time the operations, or a config's own layers.")
@click.argument("configs", metavar="[CONFIG]...", nargs=-1)
@set_option
@plugin_option
@click.option(
    "--device",
    "devices",
    metavar="auto|cpu|gpu|cpu,gpu",
    default="auto",
    show_default=True,
    callback=_resolve_devices,
    help="Where to run; with cpu,gpu both are compared.",
)
@click.option(
    "--against",
    metavar="PEER,...",
    callback=_split_names,
    help="Compare with torch, jax or numpy, or with one form of them: torch-eager, torch-compile, torch-graph, "
    "jax-jit, jax-scan.",
)
@autotune_option
@op_option
@click.option("--sizes", type=Numbers(), help="Sizes of the operations instead of the default ones.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Type of the elements of the operations.  [default: float32]")
@click.option(
    "--candidates",
    is_flag=True,
    help="Show the speed of each kernel that a GPU has for the operations, and which one is chosen.",
)
@click.option("--batch-sizes", type=Numbers(), help="Also time the step of CONFIG with these batch sizes.")
@click.option(
    "--trace", "trace_file", metavar="FILE", help="Write the timeline of one step of CONFIG in each mode, for Perfetto."
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Write the result as JSON; - writes it to stdout in place of the tables.",
)
@click.option(
    "--html", "html_file", metavar="FILE", help="Write the result as a page with plots that needs no network."
)
@click.option(
    "--compare", nargs=2, metavar="A B", help="Time nothing; show the times that changed between two JSON results."
)
def command(
    configs: tuple[str, ...],
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
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
    """Time each operation at several sizes: the forward pass, and each gradient by itself. With CONFIG, time its
    training step by layer, and as a whole: eager, with one kernel per operation, and fused. --against compares with
    other systems, --device cpu,gpu compares CPU, GPU and naive loops. Both take several CONFIGs.

    Every time is a median after a warm-up, with its 95% confidence interval; "~" marks an interval wider than 5% of the
    median. GFLOP/s and GB/s count the FLOPs of an operation, and the bytes that it must read and write. "of peak" is
    the share of the device's roofline: the minimum time for these FLOPs and bytes, divided by the measured time.
    """
    device, config_path = devices[-1], configs[0] if configs else None
    of_operations = {"--op": names, "--sizes": sizes, "--dtype": dtype, "--candidates": candidates}
    of_config = {"--batch-sizes": batch_sizes, "--trace": trace_file, "--set": overrides, "--plugin": plugins}
    if against or len(devices) > 1:
        alone = {**of_operations, **of_config, "--compare": compare, "--op": None, "--set": None}
        _refuse([name for name, value in alone.items() if value], "cannot be combined with --against or two devices")
        if against and len(devices) > 1:
            raise click.UsageError("--against compares on one device: --device cpu or --device gpu")
    elif len(configs) > 1:
        raise click.UsageError("several CONFIGs are for --against and --device cpu,gpu; give one")
    if compare:
        given = [name for name, value in {**of_operations, **of_config, "CONFIG": config_path}.items() if value]
        _refuse(given, "cannot be combined with --compare, which times nothing")
    elif config_path is None:
        given = [name for name, value in of_config.items() if value and name != "--plugin"]
        _refuse(given, "is for the step of a CONFIG; give one")
        if candidates and plugins:
            raise click.UsageError(
                "--plugin: cannot be combined with --candidates: its operations have one kernel each"
            )
    else:
        _refuse([name for name, value in of_operations.items() if value], "is for operations; give no CONFIG")
    if candidates and device == "cpu":
        raise click.UsageError("--candidates: only a GPU has kernels to choose from, and this runs on the CPU")
    for name in plugins:
        find(name).run()
    set_autotune(device, autotune)
    files = {"--json": None if json_file == STDOUT else json_file, "--html": html_file, "--trace": trace_file}
    for option, file in files.items():
        if file is not None:
            _check_writable(option, Path(file))
    warnings: list[str] = []
    if against:
        choice = chosen(against, device, operations=not configs)
        if configs:
            result = peers.of_configs(configs, overrides, device, choice, autotune, progress)
        else:
            result = peers.of_operations(select_ops(op_cases.cases(device), names), device, choice, autotune, progress)
    elif len(devices) > 1:
        if configs:
            result = analysis.of_configs(configs, overrides, devices, progress)
        else:
            result = analysis.of_operations(select_ops(SIZED_OPS, names), not names, devices, progress)
    elif compare:
        result, warnings = comparing.result(*compare), comparing.warnings(compare)
    elif candidates:
        result = kernel_candidates.result(select_ops(BENCHES, names), sizes, progress)
    elif config_path is None:
        track = partial(tqdm, desc="bench", unit=" sizes", disable=None, leave=False)
        own = [own_bench(op) for op in own_ops(())] if plugins else []
        benches = select_ops([*BENCHES, *own], names) if names else own or BENCHES
        result = sweep.result(benches, sizes, dtype or "float32", device, bool(names), progress, track)
    else:
        result, trace = step.result(config_path, overrides, device, batch_sizes or (), progress)
        if trace_file is not None:
            write_atomic(trace_file, json.dumps(trace(), allow_nan=False).encode() + b"\n")
    if json_file == STDOUT:
        print_json(result)
    else:
        width = terminal_width()
        show(*text.render(result, width), *wrapped(warnings, width))
        if json_file is not None:
            write_atomic(json_file, json.dumps(result, indent=2, allow_nan=False).encode() + b"\n")
    if html_file is not None:
        write_atomic(html_file, page.render(result).encode())
    if against and peers.is_different(result):
        raise SystemExit(1)


def _refuse(given: Sequence[str], why: str) -> None:
    """UsageError if any options are given."""
    if given:
        raise click.UsageError(f"{given[0]}: {why}")


def _check_writable(option: str, path: Path) -> None:
    """Raise AdtrainError before measuring if the file cannot be written."""
    if path.is_dir():
        raise AdtrainError(f"{option} {path}: is a folder, expected a file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise AdtrainError(f"{option} {path}: {path.parent} is not a writable folder")
