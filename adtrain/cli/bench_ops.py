"""`adtrain bench ops`: the times of single operations."""

from __future__ import annotations

from functools import partial

import click
from tqdm import tqdm

from adtrain.bench.ops import candidates as kernel_candidates
from adtrain.bench.ops import sweep
from adtrain.bench.ops.own import own_bench
from adtrain.bench.ops.sweep import DTYPES
from adtrain.bench.ops.table import BENCHES
from adtrain.cli.bench_arguments import Numbers
from adtrain.cli.bench_output import Output, output_options
from adtrain.cli.options import (
    OneOf,
    autotune_option,
    device_option,
    op_option,
    own_ops,
    plugin_option,
    select_ops,
    set_autotune,
)
from adtrain.cli.output import progress
from adtrain.plugins import find


@click.command(short_help="Time each operation and its gradients at several sizes.")
@op_option(each.op for each in BENCHES)
@click.option("--sizes", type=Numbers(), help="Sizes instead of the default ones.")
@click.option(
    "--dtype",
    type=OneOf(DTYPES),
    metavar="TYPE",
    default="float32",
    show_default=True,
    help=f"Type of the elements: {', '.join(DTYPES)}.",
)
@click.option("--candidates", is_flag=True, help="Time each kernel that a GPU has for the operations, in float32.")
@plugin_option
@device_option
@autotune_option
@output_options
def ops(
    names: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    dtype: str,
    candidates: bool,
    plugins: tuple[str, ...],
    device: str,
    autotune: str,
    output: Output,
) -> None:
    """Time each operation at several sizes: the forward pass, and each gradient by itself.

    With --plugin, time the operations that the file registers.
    """
    for name in plugins:
        find(name).run()
    set_autotune(device, autotune)
    own = [own_bench(op) for op in own_ops(())] if plugins else []
    benches = select_ops([*BENCHES, *own], names) if names else own or BENCHES
    if candidates:
        if plugins:
            raise click.UsageError("--candidates: the operations of a --plugin have one kernel each")
        if device == "cpu":
            raise click.UsageError("--candidates: only a GPU has kernels to choose from, and this runs on the CPU")
        if dtype != "float32":
            raise click.UsageError(f"--candidates times kernels in float32, and takes no --dtype {dtype}")
        output.write(kernel_candidates.result(benches, sizes, progress))
        return
    track = partial(tqdm, desc="bench", unit=" sizes", disable=None, leave=False)
    output.write(sweep.result(benches, sizes, dtype, device, bool(names), progress, track))
