"""Training steps of random networks on a GPU, in adtrain and in PyTorch at its fastest (`torch-max`).

    python benchmarks/network_sweep.py --seed 0 --count 12 [--json-file PATH]

The networks of a seed are of each family in turn: residual, bottleneck, grouped, inverted residual, dilated, plain
convolutions, encoder, recurrent, and linear layers. Widths, depths, heads, kernels and image sizes are drawn too. The
data are random images. All networks are set up and compiled first, side by side. Then each one is timed alone, in
interleaved samples of both systems. The worst ratios are printed first; below 1 adtrain is slower.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
import yaml
from gpu_report import Report

from adtrain.bench.peers import comparison
from adtrain.bench.peers.processes import WorkerFailed, started
from adtrain.bench.peers.systems import ADTRAIN, chosen
from adtrain.bench.timing.machine import thread_count

PEER, CLASSES, BUDGET = "torch-max", 10, comparison.Budget(sample=0.05, system=1.0)
MARGIN = 1 / 1.1
"""The ratio of times that adtrain may not fall below."""
BATCHES = 8
"""Batches of the data set."""

Layers = list[Any]


def conv(channels: int, kernel: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1) -> Layers:
    """A convolution that keeps the size of images, or divides it by the stride, and its batch norm."""
    options = {"out_channels": channels, "kernel_size": kernel, "padding": dilation * (kernel // 2), "bias": False}
    others = {"stride": stride, "groups": groups, "dilation": dilation}
    return [{"conv2d": options | {name: x for name, x in others.items() if x != 1}}, "batch_norm2d"]


def stages(rng: Random, widths: Sequence[int], activation: str, body: Callable[[int, int, int], Layers]) -> Layers:
    """Stages of residual blocks, and a classifier. The first block of each later stage halves the images.

    `body` returns the layers of a block, given the channels of its input and output, and the stride.
    """
    layers, before = [*conv(widths[0]), activation], widths[0]
    for i, width in enumerate(widths):
        for block in range(rng.choice([1, 2])):
            stride = 2 if i and not block else 1
            residual: dict[str, Any] = {"body": body(before, width, stride)}
            if stride > 1 or before != width:
                residual["shortcut"] = conv(width, 1, stride)
            layers += [{"residual": residual}, activation]
            before = width
    return [*layers, {"adaptive_avg_pool2d": 1}, "flatten", {"linear": CLASSES}]


def residual(rng: Random) -> Layers:
    first, activation = rng.choice([32, 48, 64, 80, 96, 128]), rng.choice(["relu", "gelu", "silu"])
    body = lambda _, width, stride: [*conv(width, 3, stride), activation, *conv(width)]  # noqa: E731
    return stages(rng, [first, 2 * first, 4 * first], activation, body)


def bottleneck(rng: Random, groups: int = 1) -> Layers:
    inner, wider = rng.choice([32, 48, 64, 128]), rng.choice([2, 4])

    def body(_: int, width: int, stride: int) -> Layers:
        within = width // wider
        return [*conv(within, 1), "relu", *conv(within, 3, stride, groups), "relu", *conv(width, 1)]

    return stages(rng, [wider * inner << i for i in range(3)], "relu", body)


def grouped(rng: Random) -> Layers:
    return bottleneck(rng, rng.choice([2, 4, 8, 16]))


def inverted(rng: Random) -> Layers:
    kernel, factor, first = rng.choice([3, 5, 7]), rng.choice([2, 4, 6]), rng.choice([16, 24, 32, 40])

    def body(before: int, width: int, stride: int) -> Layers:
        inner = factor * before
        return [*conv(inner, 1), "relu", *conv(inner, kernel, stride, inner), "relu", *conv(width, 1)]

    return stages(rng, [first, 2 * first, 3 * first], "relu", body)


def dilated(rng: Random) -> Layers:
    first, dilation = rng.choice([36, 52, 60, 100, 180]), rng.choice([2, 3, 4])
    body = lambda _, width, stride: [*conv(width, 3, stride, dilation=dilation), "relu", *conv(width)]  # noqa: E731
    return stages(rng, [first, first + 20], "relu", body)


def plain(rng: Random) -> Layers:
    width, layers = rng.choice([24, 32, 50, 64, 96]), list[Any]()
    for i in range(3):
        for _ in range(rng.choice([1, 2])):
            layers += [*conv(width << i, rng.choice([3, 3, 5])), "relu"]
        layers.append({"max_pool2d": 2})
    return [*layers, "flatten", {"linear": rng.choice([128, 500])}, "relu", {"linear": CLASSES}]


def encoder(rng: Random) -> Layers:
    head, heads = rng.choice([32, 48, 64, 80]), rng.choice([3, 4, 6, 8])
    options = {"nhead": heads, "dim_feedforward": rng.choice([2, 3, 4]) * head * heads, "dropout": 0.0}
    layer = {"transformer_encoder_layer": {**options, "activation": "gelu", "norm_first": True}}
    first = [{"patches": rng.choice([4, 8])}, {"linear": head * heads}, "positional_embedding"]
    return [*first, *[layer] * rng.choice([2, 4, 6]), "layer_norm", "mean", {"linear": CLASSES}]


def recurrent(rng: Random) -> Layers:
    options = {"hidden_size": rng.choice([256, 384, 512, 768, 1024]), "num_layers": rng.choice([1, 2])}
    return [{rng.choice(["lstm", "gru", "rnn"]): options}, {"linear": CLASSES}]


def linear(rng: Random) -> Layers:
    layers: Layers = ["flatten"]
    for _ in range(rng.choice([2, 3, 4])):
        layers += [{"linear": rng.choice([1000, 1536, 2048, 4096])}, rng.choice(["relu", "gelu"])]
    return [*layers, {"linear": CLASSES}]


FAMILIES = residual, bottleneck, grouped, inverted, dilated, plain, encoder, recurrent, linear


def network(seed: int, index: int, folder: Path) -> tuple[str, Path]:
    """The description of a random network, and the file of its config, beside which its data are written."""
    rng, family = Random(f"{seed} {index}"), FAMILIES[index % len(FAMILIES)]
    size = rng.choice([32, 32, 64, 96]) if family is not linear else 32
    batch = max(32, rng.choice([128, 256, 512]) * 32 * 32 // size**2)
    layers = family(rng)
    model = {"layers": layers} if family is not recurrent else {"input": [size, 3 * size], "layers": layers}
    name = f"{family.__name__}-{seed}-{index}"
    pixels = np.random.default_rng(index)
    shape = (1, size, 3 * size) if family is recurrent else (3, size, size)
    images, labels = pixels.integers(0, 256, (BATCHES * batch, *shape), np.uint8), np.arange(BATCHES * batch) % CLASSES
    test = images[:CLASSES], labels[:CLASSES]
    np.savez(folder / f"{name}.npz", x_train=images, y_train=labels, x_test=test[0], y_test=test[1])
    config = {
        "name": name,
        "data": {"path": str(folder / f"{name}.npz"), "batch_size": batch},
        "model": model,
        "loss": "cross_entropy",
        "optimizer": rng.choice([{"sgd": {"lr": 0.01, "momentum": 0.9}}, {"adamw": {"lr": 0.0003}}]),
        "training": {"epochs": 1, "precision": "bfloat16"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    short = yaml.safe_dump(layers[:8], default_flow_style=True, width=10**6).strip()
    return f"{name}: batch {batch}, {size}x{size}: {short}", path


@click.command()
@click.option("--seed", default=0, help="The networks depend on it.")
@click.option("--count", default=len(FAMILIES), help="The number of networks: one of each family, then again.")
@click.option("--only", "indices", type=int, multiple=True, help="Only the network with this number, from 0.")
@click.option("--seconds", default=300.0, help="Networks that are not compiled by then are left out.")
@click.option("--json-file", type=click.Path(path_type=Path), help="Where to write the times.")
def main(seed: int, count: int, indices: Sequence[int], seconds: float, json_file: Path | None) -> None:
    """Compare the training steps of random networks in bfloat16 with PyTorch's."""
    report, choice = Report(json_file), chosen([PEER], "gpu", "steps")
    click.echo(report.line())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=len(indices or range(count))))
        found = []
        for index in indices or range(count):
            name, path = network(seed, index, folder)
            workers = stack.enter_context(started([ADTRAIN, PEER], "gpu", thread_count()))
            first = pool.submit(
                comparison.compare_losses, workers, choice, str(path), ["schedule=constant"], "bfloat16"
            )
            found.append((name, workers, first))
        late = wait([first for *_, first in found], seconds).not_done
        for _, workers, first in found:
            for worker in workers.values() if first in late else ():
                worker.close()
        timed: list[tuple[float, str]] = []
        for name, workers, first in found:
            try:
                times = comparison.step_times(workers, first.result(), "bfloat16", BUDGET)
            except WorkerFailed as reason:
                click.echo(f"not timed: {name}: {reason}")
                continue
            ms = {system: time.median_ms for system, time in times.times.items()}
            ratio = times.ratios[PEER].median if PEER in times.ratios else None
            why = times.skipped.get(PEER) or times.failed.get(PEER)
            report.add({"network": name, "ms": ms, "ratio": ratio, "loss_error": times.off.get(PEER), "failed": why})
            text = f"{ms[ADTRAIN]:8.3f} {ms.get(PEER, float('nan')):8.3f}  {name}"
            if ratio is None:
                click.echo(f"  none {text}: {why or times.off}")
            else:
                timed.append((ratio, text))
                click.echo(f"{ratio:6.3f} {text}")
    behind = sum(ratio < MARGIN for ratio, _ in timed)
    click.echo(f"{behind} of {len(timed)} networks are slower than {PEER} by more than 10%; the worst ten:")
    for ratio, text in sorted(timed)[:10]:
        click.echo(f"{ratio:6.3f} {text}")


if __name__ == "__main__":
    main()
