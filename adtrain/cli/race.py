"""`adtrain race`: trains a config from several seeds, and measures the time until a test accuracy is reached."""

from __future__ import annotations

from pathlib import Path

import click

from adtrain.bench.peers import races
from adtrain.bench.peers.systems import PEERS, Choice, chosen
from adtrain.cli.bench_output import Output
from adtrain.cli.options import (
    ConfigName,
    FilePath,
    NameOf,
    Number,
    Whole,
    autotune_option,
    device_option,
    json_option,
    set_autotune,
    set_option,
)
from adtrain.cli.output import progress

RACERS = [name for peer in PEERS if peer.races for name in (peer.package, peer.name)]


@click.command(short_help="Time trainings until they reach a test accuracy.")
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option(
    "--target",
    type=Number(0, 1),
    required=True,
    metavar="A",
    help="Test accuracy to reach, such as 0.99.",
)
@click.option("--seeds", type=Whole(1, 1000), default=20, show_default=True, metavar="N", help="Number of trainings.")
@click.option(
    "--against", "wanted", metavar="PEER,...", type=NameOf(RACERS, separator=","), help="Peers that train the same."
)
@set_option
@device_option
@autotune_option
@click.option("--json-file", type=FilePath(), metavar="FILE", help="Also write the result as JSON.")
@json_option
def command(
    config_path: str,
    target: float,
    seeds: int,
    wanted: tuple[str, ...] | None,
    overrides: tuple[str, ...],
    device: str,
    autotune: str,
    json_file: Path | None,
    as_json: bool,
) -> None:
    """Train CONFIG from several seeds, one after another, and measure when it reaches a test accuracy.

    The clock counts training only. The accuracy is computed after each epoch. The result has the number of seeds that
    reach the target, the distribution of their times, and that of the accuracies at the end.

    A PEER is torch, or one form of it: torch-eager, torch-compile, torch-graph. It starts from the same weights, takes
    the same batches at the same learning rates, and trains in turns with adtrain. The first losses are compared before;
    the exit code is 1 if they differ.
    """
    output = Output(as_json, json_file, None)
    set_autotune(device, autotune)
    choice = chosen(wanted, device, "races") if wanted else Choice([], {})
    result = races.result(config_path, overrides, device, target, seeds, choice, autotune, progress)
    output.write(result)
    if result["different"]:
        raise SystemExit(1)
