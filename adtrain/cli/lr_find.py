"""`adtrain lr-find`: tries many learning rates as one sweep, draws the losses, and proposes a rate."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import click

from adtrain import config
from adtrain.cli.options import (
    ConfigName,
    Number,
    OutputFile,
    Whole,
    device_option,
    json_option,
    plugin_option,
    set_option,
)
from adtrain.cli.output import is_silent, message, print_json, progress, show, write_file
from adtrain.data.errors import warn
from adtrain.files import expect_writable
from adtrain.report.record import rates_svg
from adtrain.signals import stop_signals
from adtrain.sweeps import rates
from adtrain.sweeps.session import prepared
from adtrain.text import counted

RATE = Number(min=0, min_open=True, max=1e30)


@click.command()
@click.argument("config_path", metavar="CONFIG", type=ConfigName())
@click.option("-o", "--output", type=OutputFile(".svg"), metavar="FILE.svg", help="The plot.  [default: NAME-lr.svg]")
@click.option("--from", "low", type=RATE, default=1e-5, help="The smallest rate.")
@click.option("--to", "high", type=RATE, default=10, help="The largest rate.")
@click.option("--rates", "count", type=Whole(min=3, max=1000), default=64, help="How many rates.")
@click.option("--steps", type=Whole(min=1), default=100, help="Steps of each training.")
@device_option
@set_option
@plugin_option
@json_option
def command(
    config_path: str,
    output: Path | None,
    low: float,
    high: float,
    count: int,
    steps: int,
    device: str,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    as_json: bool,
) -> None:
    """Propose a learning rate for CONFIG: train it for some steps with many rates at once, from the same weights.

    The rates are constant, and evenly spaced on a logarithmic scale. The loss of a rate is the mean training loss over
    its steps. The proposal is the middle of the rates whose loss is nearly as small as the smallest one. It is a rate
    to begin with, or the highest one of a schedule: longer trainings often end better with a smaller one. No run is
    written.
    """
    if low >= high:
        raise click.UsageError(f"--from is {low:g}, expected less than --to, {high:g}")
    started = perf_counter()
    cfg = config.load(config_path, overrides, plugins)
    key = rates.key_of(cfg)
    wanted = rates.settings(cfg, rates.rates_within(low, high, count), steps)
    session = prepared(config.load(config_path, [*overrides, *wanted], plugins), device)
    path = output or Path(f"{cfg.name}-lr.svg")
    if output is None:
        expect_writable(path)
    progress(f"training with {count} rates from {low:g} to {high:g}, {counted(steps, 'steps')} each, on the {device}")
    with stop_signals(is_silent()) as signals:
        found = rates.search(session, key, signals.stop_requested)
    if found is None:
        message("stopped; nothing was written")
        raise SystemExit(signals.exit_code)
    if found.is_at_end:
        end = "--from" if found.best == 0 else "--to"
        warn(key, f"the best rate is {found.tried[found.best].rate:g}, the end of the range; change {end}")
    write_file(path, rates_svg(found).encode())
    seconds = perf_counter() - started
    first, last = (found.tried[i].rate for i in found.near)
    best = found.tried[found.best]
    if as_json:
        tried = [{"rate": x.rate, "loss": x.loss} for x in found.tried]
        values = {"key": key, "proposal": found.proposal, "near": [first, last], "steps": found.steps, "device": device}
        print_json({**values, "plot": str(path), "seconds": seconds, "rates": tried})
        return
    lost = [x.rate for x in found.tried if x.loss is None]
    lines = [
        f"best rate      {best.rate:.2g}" + ("" if best.loss is None else f", loss {best.loss:.4g}"),
        f"nearly as good {first:.2g} to {last:.2g}",
        f"not finite     {counted(len(lost), 'rates')}, from {min(lost):.2g} on" if lost else "",
        f"proposal       --set {key}={found.proposal:g}",
        f"plot           {path}",
        f"time           {seconds:.1f} s",
    ]
    show(*filter(None, lines))
