"""`adtrain bench`: measures operations and training steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from tqdm import tqdm

from adtrain import config
from adtrain.bench import against, candidates, compare, devices, ops, race, scaling, startup, step
from adtrain.bench.op_table import BENCHES, BY_NAIVE_LOOPS, TABLE, cases
from adtrain.bench.peers.systems import PEERS, Choice, Work, chosen
from adtrain.bench.scaling_worker import PEERS as RANK_PEERS
from adtrain.cli.options import (
    ConfigName,
    FilePath,
    NameOf,
    Number,
    OneOf,
    Output,
    OutputFile,
    Whole,
    autotune_option,
    device_option,
    op_option,
    output_options,
    own_ops,
    plugin_option,
    resolve_device,
    select_ops,
    set_autotune,
    set_option,
)
from adtrain.cli.output import progress, write_file
from adtrain.config.problems import shortened, similar
from adtrain.plugins import find

PEER_LIST = NameOf([name for peer in PEERS for name in (peer.package, peer.name)], separator=",")
"""Names of other systems, separated by commas; received as a tuple."""


class Numbers(click.ParamType):
    """Whole numbers above 0, separated by commas; received as a tuple."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        words = value.split(",") if isinstance(value, str) else [str(x) for x in value]
        if not all(word.strip().isdecimal() and len(word) < 20 and 0 < int(word) < 2**29 for word in words):
            expected = "whole numbers above 0 with commas between them, below 2^29"
            self.fail(f"found {shortened(value)!r}, expected {expected}", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


@click.command("ops", short_help="Time each operation and its gradients at several sizes.")
@op_option(each.op for each in BENCHES)
@click.option("--sizes", type=Numbers(), help="Sizes instead of the default ones.")
@click.option(
    "--dtype",
    type=OneOf(ops.DTYPES),
    metavar="TYPE",
    default="float32",
    help=f"Type of the elements: {', '.join(ops.DTYPES)}.",
)
@click.option(
    "--candidates",
    "with_candidates",
    is_flag=True,
    help="Time each kernel that a GPU has for the operations, in float32.",
)
@plugin_option
@device_option
@autotune_option
@output_options
def bench_ops(
    names: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    dtype: str,
    with_candidates: bool,
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
    own = [ops.own_bench(op) for op in own_ops(())] if plugins else []
    benches = select_ops([*BENCHES, *own], names) if names else own or BENCHES
    if with_candidates:
        if plugins:
            raise click.UsageError("--candidates: the operations of a --plugin have one kernel each")
        if device == "cpu":
            raise click.UsageError("--candidates: only a GPU has kernels to choose from, and this runs on the CPU")
        if dtype != "float32":
            raise click.UsageError(f"--candidates times kernels in float32, and takes no --dtype {dtype}")
        output.write(candidates.result(benches, sizes, progress))
        return
    track = functools.partial(tqdm, desc="bench", unit=" sizes", disable=None, leave=False)
    output.write(ops.result(benches, sizes, dtype, device, bool(names), progress, track))


@click.command("step", short_help="Time the training step of a config, whole and by layer.")
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@set_option
@plugin_option
@click.option("--batch-sizes", type=Numbers(), default=(), help="Also time the step with these batch sizes.")
@click.option("--trace", type=OutputFile(), metavar="FILE", help="Write the timeline of a step, for Perfetto.")
@device_option
@autotune_option
@output_options
def bench_step(
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
    for name in plugins:
        find(name).run()
    set_autotune(device, autotune)
    result, timeline = step.result(config_path, overrides, device, batch_sizes, progress)
    if trace is not None:
        write_file(trace, json.dumps(timeline(), allow_nan=False).encode() + b"\n")
    output.write(result)


@click.command("scaling", short_help="Time the training step of a config on several numbers of ranks.")
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option("--ranks", metavar="N,...", type=Numbers(), default="1,2", help="Numbers of processes.")
@click.option("--batch-size", type=Whole(min=1), default=128, help="Images of one rank.")
@click.option(
    "--against",
    "peers",
    metavar="PEER,...",
    type=NameOf(list(RANK_PEERS), separator=","),
    default=(),
    help="Also time torch-ddp (eager) or torch-graph (a CUDA graph with an all-reduce).",
)
@set_option
@device_option
@output_options
def bench_scaling(
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
    output.write(scaling.result(config_path, overrides, device, batch_size, sorted(ranks), peers, progress))


@click.command("startup", short_help="Time the start of a training, with empty and with filled caches.")
@click.argument("config_path", metavar="CONFIG", type=ConfigName())
@click.option("--against", "wanted", metavar="PEER,...", type=PEER_LIST, help="Peers to start as well.")
@click.option(
    "--samples", type=Whole(1, 100), default=3, help="Processes with empty caches, and as many with filled ones."
)
@set_option
@device_option
@output_options
def bench_startup(
    config_path: str,
    wanted: tuple[str, ...] | None,
    samples: int,
    overrides: tuple[str, ...],
    device: str,
    output: Output,
) -> None:
    """Time `adtrain train CONFIG` from the start of its process to its end, and show where the time goes.

    Each sample is two processes: one with empty caches, and one with the caches that the first one has filled. A PEER,
    such as torch-compile, imports its package, compiles and takes its first steps. Its losses are compared with
    adtrain's; the exit code is 1 if they differ.
    """
    precision = config.load(config_path, overrides).training.precision
    choice = chosen(wanted, device, "steps") if wanted else Choice([], {})
    task = startup.Task(config_path, overrides, device)
    result = startup.result(task, precision, choice, samples, progress)
    output.write(result)
    if result.different:
        raise SystemExit(1)


@click.command("against", short_help="Compare with PyTorch, JAX and NumPy.")
@click.argument("wanted", metavar="PEER,...", type=PEER_LIST)
@click.argument("configs", metavar="[CONFIG|RUN]...", nargs=-1, type=ConfigName())
@op_option(row.op for row in TABLE if row.peers)
@click.option("--members", type=Whole(min=1), help="Train N networks together, with N seeds.")
@set_option
@device_option
@autotune_option
@output_options
def bench_against(
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

    A PEER is torch, jax or numpy, or one form of them: torch-eager, torch-compile, torch-graph, torch-max,
    torch-max-tf32, jax-jit or jax-scan. With --members it is torch or jax, or one of torch-vmap, torch-vmap-compile and
    jax-vmap.

    torch-max is PyTorch in its fastest form: torch.compile without a break, images channels last, a fused optimizer,
    and on a GPU one CUDA graph. torch-max-tf32 also allows TF32, for a CONFIG in float32. With --autotune full
    torch.compile searches as in its mode max-autotune.

    Results are compared before times; the exit code is 1 if they differ. Only one process runs at a time.
    """
    _check_choice(configs, names, overrides)
    if members is not None and not configs:
        raise click.UsageError("--members trains networks; give a CONFIG")
    set_autotune(device, autotune)
    work: Work = "operation" if not configs else "steps" if members is None else "members"
    choice = chosen(wanted, device, work)
    if configs:
        result = against.of_configs(configs, overrides, device, choice, autotune, progress, members)
    else:
        result = against.of_operations(select_ops(cases(device), names), device, choice, autotune, progress)
    output.write(result)
    if result.is_different:
        raise SystemExit(1)


@click.command("devices", short_help="Compare CPU, GPU and naive loops.")
@click.argument("configs", metavar="[CONFIG|RUN]...", nargs=-1, type=ConfigName())
@op_option(each.op for each in BY_NAIVE_LOOPS)
@set_option
@autotune_option
@output_options
def bench_devices(
    configs: tuple[str, ...], names: tuple[str, ...], overrides: tuple[str, ...], autotune: str, output: Output
) -> None:
    """Compare the CPU, the GPU with and without copies of data, and naive loops.

    Times the training step of each CONFIG, or single operations, and shows the size from which the GPU is faster.
    """
    _check_choice(configs, names, overrides)
    both = resolve_device("cpu"), resolve_device("gpu")
    set_autotune("gpu", autotune)
    if configs:
        result = devices.of_configs(configs, overrides, both, progress)
    else:
        result = devices.of_operations(select_ops(BY_NAIVE_LOOPS, names), not names, both, progress)
    output.write(result)


@click.command("compare", short_help="Show the times that changed between two results.")
@click.argument("before", type=FilePath())
@click.argument("after", type=FilePath())
@output_options
def bench_compare(before: Path, after: Path, output: Output) -> None:
    """Show the times that changed between two results, files of `bench --json-file`. Nothing is timed."""
    output.write(compare.result(str(before), str(after)))


def _check_choice(configs: Sequence[str], names: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise UsageError for --op with a CONFIG, and for --set without one."""
    if configs and names:
        raise click.UsageError("--op selects operations; give no CONFIG")
    if overrides and not configs:
        raise click.UsageError("--set changes a config; give a CONFIG")


RACERS = [name for peer in PEERS if "race" in peer.works for name in (peer.package, peer.name)]


@click.command("race", short_help="Time trainings until they reach a test accuracy.")
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option("--target", type=Number(0, 1), required=True, metavar="A", help="Test accuracy to reach, such as 0.99.")
@click.option("--seeds", type=Whole(1, 1000), default=20, help="Number of trainings.")
@click.option(
    "--against", "wanted", metavar="PEER,...", type=NameOf(RACERS, separator=","), help="Peers that train as well."
)
@set_option
@device_option
@autotune_option
@output_options
def bench_race(
    config_path: str,
    target: float,
    seeds: int,
    wanted: tuple[str, ...] | None,
    overrides: tuple[str, ...],
    device: str,
    autotune: str,
    output: Output,
) -> None:
    """Train CONFIG from several seeds, one after another, and measure when it reaches a test accuracy.

    The clock counts training only. The accuracy is computed after each epoch. The result has the number of seeds that
    reach the target, the distribution of their times, and that of the accuracies at the end.

    A PEER is torch, or one form of it: torch-eager, torch-compile, torch-graph, torch-max, torch-max-tf32. It starts
    from the same weights, takes the same batches at the same learning rates, and trains in turns with adtrain. The
    first losses are compared before; the exit code is 1 if they differ.
    """
    set_autotune(device, autotune)
    choice = chosen(wanted, device, "race") if wanted else Choice([], {})
    result = race.result(config_path, overrides, device, target, seeds, choice, autotune, progress)
    output.write(result)
    if result.different:
        raise SystemExit(1)


class BenchGroup(click.Group):
    """A group of commands that has defaults.

    Without the name of a command, a CONFIG chooses `step`, or with --ranks `scaling`. Without a CONFIG it is `ops`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        (argument, *_) = (param for param in self.commands["step"].params if param.name == "config_path")
        return [*super().shell_complete(ctx, incomplete), *argument.shell_complete(ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((arg for arg in args if arg != "--debug"), None)
        completing_first = ctx.resilient_parsing and first is None
        if first not in (*self.commands, *ctx.help_option_names) and not completing_first:
            lenient = click.Context(self.commands["ops"], resilient_parsing=True, ignore_unknown_options=True)
            _, rest, _ = lenient.command.make_parser(lenient).parse_args(list(args))
            words = [arg for arg in rest if not arg.startswith("-")]
            is_config = words and (Path(words[0]).exists() or words[0] in config.packaged())
            if words and not is_config and (hint := similar(words[0], self.commands)):
                ctx.fail(f"{words[0]}: neither a command nor a config; {hint}")
            of_config = "scaling" if any(arg.partition("=")[0] == "--ranks" for arg in args) else "step"
            args = [of_config if words else "ops", *args]
        return super().parse_args(ctx, args)


@click.group(cls=BenchGroup)
def command() -> None:
    """Time operations and training steps, and compare them with other systems, devices and versions.

    Without the name of a command, `adtrain bench CONFIG` is `bench step CONFIG`, and `adtrain bench` is `bench ops`.

    Every time is a median after a warm-up, with its 95% confidence interval. "~" marks an interval wider than 5% of the
    median. GFLOP/s and GB/s count the FLOPs of an operation, and the bytes that it must read and write. "of peak" is
    the share of the device's roofline: the minimum time for these FLOPs and bytes, divided by the measured time.
    """


for subcommand in (
    bench_ops, bench_step, bench_scaling, bench_startup, bench_against, bench_devices, bench_race, bench_compare
):  # fmt: skip
    command.add_command(subcommand)
