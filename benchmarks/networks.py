"""Training steps of networks beyond the packaged configs, in adtrain, JAX and PyTorch, on random data.

    python benchmarks/networks.py [NETWORK...] [--system SYSTEM]... [--rounds N] [--threads N] [--json PATH]

The systems are those of `adtrain bench against`. They run in processes of their own, in turns; a process is stopped
while another one works. A time is the median of the samples of a step. "ahead" is the best time of the others over
adtrain's. The worst network is printed first.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import yaml
from gpu_report import Report

from adtrain.bench.peers.jobs import CHUNK
from adtrain.bench.peers.processes import WorkerFailed, WorkerProcess, started
from adtrain.bench.timing.sampling import in_turns

SAMPLE_SECONDS = 0.5
SYSTEMS = ("adtrain", "torch-eager", "torch-compile", "torch-max", "jax-jit", "jax-scan")
SGD = {"sgd": {"lr": 0.01, "momentum": 0.9}}
ADAMW = {"adamw": {"lr": 0.0003, "weight_decay": 0.1}}

Layer = Any
"""A layer of a config."""


def conv(channels: int, size: int = 3, **options: Any) -> Layer:
    padding = {"padding": size // 2} if size > 1 else {}
    return {"conv2d": {"out_channels": channels, "kernel_size": size, "bias": False, **padding, **options}}


def residual(body: list[Layer], shortcut: list[Layer] | None = None) -> Layer:
    return {"residual": {"body": body, "shortcut": shortcut}} if shortcut else {"residual": body}


def air() -> list[Layer]:
    """A CIFAR-10 network after airbench (Jordan, 2024)."""
    layers: list[Layer] = [{"conv2d": {"out_channels": 24, "kernel_size": 2}}, "gelu"]
    for c in (64, 256, 256):
        layers += [conv(c), {"max_pool2d": 2}, "batch_norm2d", "gelu", conv(c), "batch_norm2d", "gelu"]
    return [*layers, {"max_pool2d": 3}, "flatten", {"linear": {"out_features": 10, "bias": False}}]


def resnet18() -> list[Layer]:
    """ResNet-18 (He et al., 2016), whose first convolution is 3x3."""
    layers: list[Layer] = [conv(64), "batch_norm2d", "relu"]
    for c, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        body = [conv(c, stride=stride), "batch_norm2d", "relu", conv(c), "batch_norm2d"]
        layers += [residual(body, [conv(c, 1, stride=stride), "batch_norm2d"] if stride > 1 else None), "relu"]
    return [*layers, {"adaptive_avg_pool2d": 1}, "flatten", {"linear": 10}]


def bottlenecks() -> list[Layer]:
    """Blocks of ResNet-50."""
    layers: list[Layer] = [conv(64), "batch_norm2d", "relu"]
    for c, stride in ((64, 1), (64, 1), (128, 2), (128, 1)):
        body = [conv(c, 1), "batch_norm2d", "relu", conv(c, stride=stride), "batch_norm2d", "relu"]
        body += [conv(4 * c, 1), "batch_norm2d"]
        changes = stride > 1 or len(layers) == 3
        layers += [residual(body, [conv(4 * c, 1, stride=stride), "batch_norm2d"] if changes else None), "relu"]
    return [*layers, {"adaptive_avg_pool2d": 1}, "flatten", {"linear": 10}]


def depthwise() -> list[Layer]:
    """Inverted residual blocks of MobileNetV2 (Sandler et al., 2018)."""
    layers: list[Layer] = [conv(32), "batch_norm2d", "relu"]
    given = 32
    for c, stride in ((24, 1), (24, 1), (48, 2), (48, 1), (96, 2), (96, 1)):
        wide = 4 * given
        body = [conv(wide, 1), "batch_norm2d", "relu", conv(wide, groups=wide, stride=stride), "batch_norm2d", "relu"]
        body += [conv(c, 1), "batch_norm2d"]
        layers += [residual(body)] if given == c else body
        given = c
    return [*layers, {"adaptive_avg_pool2d": 1}, "flatten", {"linear": 10}]


def blocks(count: int, heads: int, hidden: int, causal: bool) -> list[Layer]:
    options = {"nhead": heads, "dim_feedforward": hidden, "dropout": 0.0, "activation": "gelu", "norm_first": True}
    return [{"transformer_encoder_layer": {**options, "causal": causal}} for _ in range(count)]


def gpt() -> list[Layer]:
    """A GPT-2 of 4 layers, 256 wide."""
    layers: list[Layer] = [{"embedding": {"num_embeddings": 4096, "embedding_dim": 256}}, "positional_embedding"]
    return [*layers, *blocks(4, 8, 1024, True), "layer_norm", {"linear": {"out_features": 4096, "bias": False}}]


def encoder() -> list[Layer]:
    """A vision transformer on 64 patches, 192 wide."""
    layers: list[Layer] = [{"patches": 4}, {"linear": 192}, "positional_embedding"]
    return [*layers, *blocks(4, 6, 768, False), "layer_norm", "mean", {"linear": 10}]


def gru() -> list[Layer]:
    """Two wide GRU layers on 32 rows of 96 numbers."""
    return [{"gru": {"hidden_size": 384, "num_layers": 2}}, {"linear": 10}]


NETWORKS: dict[str, tuple[Any, str, int, Any]] = {
    "air": (air, "images", 128, {"sgd": {"lr": 0.01, "momentum": 0.85, "nesterov": True}}),
    "resnet18": (resnet18, "images", 32, SGD),
    "gpt": (gpt, "tokens", 8, ADAMW),
    "bottlenecks": (bottlenecks, "images", 32, SGD),
    "depthwise": (depthwise, "images", 64, SGD),
    "encoder": (encoder, "images", 32, ADAMW),
    "gru": (gru, "sequences", 64, ADAMW),
}
"""The layers, the data, the batch size and the optimizer of each network."""


def write_data(folder: Path) -> None:
    """Random images 3x32x32, sequences of 32 x 96 numbers, and a text of 4,096 different characters."""
    r = np.random.default_rng(0)
    for name, shape in (("images", (3, 32, 32)), ("sequences", (1, 32, 96))):
        parts = {"train": 2048, "test": 128}
        arrays: dict[str, Any] = {f"x_{part}": r.integers(0, 256, (n, *shape), np.uint8) for part, n in parts.items()}
        arrays |= {f"y_{part}": r.integers(0, 10, n) for part, n in parts.items()}
        np.savez(folder / f"{name}.npz", **arrays)
    letters = np.concatenate([np.arange(4096), r.integers(0, 4096, 80_000)])
    (folder / "tokens.txt").write_text("".join(chr(0x4E00 + int(i)) for i in letters), encoding="utf-8")


def config_file(folder: Path, name: str) -> Path:
    """The config of a network, in a file."""
    layers, data, batch, optimizer = NETWORKS[name]
    text = {"path": str(folder / "tokens.txt"), "length": 256, "test": 0.05}
    given = {
        "name": name,
        "data": {**(text if data == "tokens" else {"path": str(folder / f"{data}.npz")}), "batch_size": batch},
        "model": {"layers": layers()},
        "loss": "cross_entropy",
        "optimizer": optimizer,
        "training": {"epochs": 1, "seed": 0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False))
    return path


def measured(name: str, device: str, rounds: int, workers: dict[str, WorkerProcess], folder: Path) -> dict[str, Any]:
    """Milliseconds of a step and the first losses by system, and the reasons of those that did not run it."""
    losses, calls, failed = dict[str, list[float]](), dict[str, int](), dict[str, str]()
    for system, worker in workers.items():
        try:
            losses[system] = worker.ask("step", config_name=str(config_file(folder, name)), overrides=[])["losses"]
            calls[system] = max(1, round(SAMPLE_SECONDS / worker.ask("time", calls=1)["seconds"]))
        except WorkerFailed as reason:
            failed[system] = str(reason)
    if not calls:
        raise click.ClickException(f"{name}: no system could train it; {next(iter(failed.values()), '')}")
    answers = in_turns({system: partial(workers[system].ask, "time", calls=calls[system]) for system in calls}, rounds)
    steps = {system: calls[system] * CHUNK[device] for system in calls}
    ms = {system: median(each["seconds"] for each in answers[system]) / steps[system] * 1e3 for system in calls}
    others = [t for system, t in ms.items() if system != "adtrain"]
    ahead = min(others) / ms["adtrain"] if others else None
    return {"network": name, "batch": NETWORKS[name][2], "ms": ms, "losses": losses, "failed": failed, "ahead": ahead}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(NETWORKS)))
@click.option("--system", "systems", multiple=True, default=SYSTEMS, help="A system; all by default.")
@click.option("--rounds", type=int, default=9, show_default=True, help="Samples of each system.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--threads", type=int, default=2, show_default=True, help="Threads of each system.")
@click.option("--json", "path", type=Path, help="Write the results to a file.")
def command(
    names: tuple[str, ...], systems: tuple[str, ...], rounds: int, device: str, threads: int, path: Path | None
) -> None:
    """Measure and print a table."""
    report = Report(path)
    with tempfile.TemporaryDirectory() as site, started(systems, device, threads) as workers:
        write_data(folder := Path(site))
        for name in names or NETWORKS:
            report.add(measured(name, device, rounds, workers, folder))
            click.echo(f"{name}: {report.rows[-1]['ms']}", err=True)
    click.echo(f"{'network':12} {'ahead':>6}  " + "  ".join(f"{system:>16}" for system in systems))
    for row in sorted(report.rows, key=lambda row: row["ahead"] or 0):
        cells = [f"{row['ms'][s]:9.2f} ms" if s in row["ms"] else "failed" for s in systems]
        ahead = f"{row['ahead']:6.2f}" if row["ahead"] else f"{'':6}"
        click.echo(f"{row['network']:12} {ahead}  " + "  ".join(f"{cell:>16}" for cell in cells))
        for system, reason in row["failed"].items():
            click.echo(f"    {system}: {reason[:100]}")
    click.echo(report.line())


if __name__ == "__main__":
    command()
