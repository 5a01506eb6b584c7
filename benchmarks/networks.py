"""Training steps of networks beyond the packaged configs, in adtrain and in other systems, on random data.

    python benchmarks/networks.py [NETWORK...] [--seed N] [--count N] [--only NUMBER]... [--device cpu|gpu]
        [--precision PRECISION] [--peer PEER]... [--seconds SECONDS] [--json-file PATH]

NETWORK is one of NETWORKS, by default each. With --count or --only, networks are drawn in their place, of each family
in turn: residual, bottleneck, grouped, inverted residual, dilated, plain convolutions, encoder, recurrent, and linear
layers; then, with small batches, inverted residual with squeeze and excitation, convolutions over sequences, U-shaped
with concatenations, group norm, and linear layers with layer norm. Widths, depths, heads, kernels and image sizes are
drawn too. The systems and the comparison of their first losses are those of `adtrain bench against`. On a GPU all
networks are set up and compiled first, side by side. Then each one is timed alone, in interleaved samples of all
systems. A ratio is the least time of the peers over adtrain's; below 1 adtrain is slower. The worst ratios are printed
last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import numpy as np
import yaml
from gpu_report import Report

from adtrain.bench.machine import thread_count
from adtrain.bench.peers import comparison
from adtrain.bench.peers.systems import ADTRAIN, Choice, WorkerFailed, chosen, started

PEERS = "torch-eager", "torch-compile", "torch-max", "jax-jit", "jax-scan"
CLASSES = 10
BUDGET = comparison.Budget(0.05, 1.0)
MARGIN = 1 / 1.1
"""The ratio of times that adtrain may not fall below."""
BATCHES, WORDS, LENGTH = 8, 4096, 256
"""Batches of the data set; different characters of a text, and characters of an example."""
SGD, ADAMW = {"sgd": {"lr": 0.01, "momentum": 0.9}}, {"adamw": {"lr": 0.0003}}

Layers = list[Any]


def conv(channels: int, kernel: int = 3, stride: int = 1, groups: int = 1, dilation: int = 1) -> Layers:
    """A convolution that keeps the size of images, or divides it by the stride, and its batch norm."""
    options = {"out_channels": channels, "kernel_size": kernel, "padding": dilation * (kernel // 2), "bias": False}
    others = {"stride": stride, "groups": groups, "dilation": dilation}
    return [{"conv2d": options | {name: x for name, x in others.items() if x != 1}}, "batch_norm2d"]


def stages(
    depths: Sequence[int], widths: Sequence[int], activation: str, body: Callable[[int, int, int], Layers]
) -> Layers:
    """Stages of residual blocks, and a classifier. The first block of each later stage halves the images.

    `body` returns the layers of a block, given the channels of its input and output, and the stride.
    """
    layers, before = [*conv(widths[0]), activation], widths[0]
    for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        for block in range(depth):
            stride = 2 if i and not block else 1
            residual: dict[str, Any] = {"body": body(before, width, stride)}
            if stride > 1 or before != width:
                residual["shortcut"] = conv(width, 1, stride)
            layers += [{"residual": residual}, activation]
            before = width
    return [*layers, {"adaptive_avg_pool2d": 1}, "flatten", {"linear": CLASSES}]


def depths(rng: Random, count: int) -> list[int]:
    return [rng.choice([1, 2]) for _ in range(count)]


def transformer(count: int, heads: int, hidden: int, causal: bool = False) -> Layers:
    """Equal encoder layers, each with `hidden` columns between its linear layers."""
    options = {"nhead": heads, "dim_feedforward": hidden, "dropout": 0.0, "activation": "gelu", "norm_first": True}
    return [{"transformer_encoder_layer": {**options, "causal": causal}}] * count


def on_patches(size: int, width: int, layers: Layers) -> Layers:
    """A classifier with these layers on the patches of images."""
    return [
        {"patches": size},
        {"linear": width},
        "positional_embedding",
        *layers,
        "layer_norm",
        "mean",
        {"linear": CLASSES},
    ]


def residual(rng: Random) -> Layers:
    first, activation = rng.choice([32, 48, 64, 80, 96, 128]), rng.choice(["relu", "gelu", "silu"])
    body = lambda _, width, stride: [*conv(width, 3, stride), activation, *conv(width)]  # noqa: E731
    return stages(depths(rng, 3), [first, 2 * first, 4 * first], activation, body)


def bottleneck(rng: Random, groups: int = 1) -> Layers:
    inner, wider = rng.choice([32, 48, 64, 128]), rng.choice([2, 4])

    def body(_: int, width: int, stride: int) -> Layers:
        within = width // wider
        return [*conv(within, 1), "relu", *conv(within, 3, stride, groups), "relu", *conv(width, 1)]

    return stages(depths(rng, 3), [wider * inner << i for i in range(3)], "relu", body)


def grouped(rng: Random) -> Layers:
    return bottleneck(rng, rng.choice([2, 4, 8, 16]))


def inverted(rng: Random) -> Layers:
    kernel, factor, first = rng.choice([3, 5, 7]), rng.choice([2, 4, 6]), rng.choice([16, 24, 32, 40])

    def body(before: int, width: int, stride: int) -> Layers:
        inner = factor * before
        return [*conv(inner, 1), "relu", *conv(inner, kernel, stride, inner), "relu", *conv(width, 1)]

    return stages(depths(rng, 3), [first, 2 * first, 3 * first], "relu", body)


def dilated(rng: Random) -> Layers:
    first, dilation = rng.choice([36, 52, 60, 100, 180]), rng.choice([2, 3, 4])
    body = lambda _, width, stride: [*conv(width, 3, stride, dilation=dilation), "relu", *conv(width)]  # noqa: E731
    return stages(depths(rng, 2), [first, first + 20], "relu", body)


def plain(rng: Random) -> Layers:
    width, layers = rng.choice([24, 32, 50, 64, 96]), list[Any]()
    for i in range(3):
        for _ in range(rng.choice([1, 2])):
            layers += [*conv(width << i, rng.choice([3, 3, 5])), "relu"]
        layers.append({"max_pool2d": 2})
    return [*layers, "flatten", {"linear": rng.choice([128, 500])}, "relu", {"linear": CLASSES}]


def encoder(rng: Random) -> Layers:
    head, heads = rng.choice([32, 48, 64, 80]), rng.choice([3, 4, 6, 8])
    hidden, size, count = rng.choice([2, 3, 4]) * head * heads, rng.choice([4, 8]), rng.choice([2, 4, 6])
    return on_patches(size, head * heads, transformer(count, heads, hidden))


def recurrent(rng: Random) -> Layers:
    options = {"hidden_size": rng.choice([256, 384, 512, 768, 1024]), "num_layers": rng.choice([1, 2])}
    return [{rng.choice(["lstm", "gru", "rnn"]): options}, {"linear": CLASSES}]


def linear(rng: Random) -> Layers:
    layers: Layers = ["flatten"]
    for _ in range(rng.choice([2, 3, 4])):
        layers += [{"linear": rng.choice([1000, 1536, 2048, 4096])}, rng.choice(["relu", "gelu"])]
    return [*layers, {"linear": CLASSES}]


def squeezed(rng: Random) -> Layers:
    """Inverted residual blocks whose channels are scaled (squeeze and excitation)."""
    kernel, factor, first = rng.choice([3, 5, 7]), rng.choice([3, 4, 6]), rng.choice([16, 24, 37])

    def body(before: int, width: int, stride: int) -> Layers:
        inner = factor * before
        factors = [{"linear": before // 4}, "silu", {"linear": inner}, "sigmoid", {"reshape": [inner, 1, 1]}]
        scaled = {"multiply": [[{"scale": 1}], [{"adaptive_avg_pool2d": 1}, "flatten", *factors]]}
        return [*conv(inner, 1), "silu", *conv(inner, kernel, stride, inner), "silu", scaled, *conv(width, 1)]

    return stages(depths(rng, 2), [first, first + 16], "silu", body)


def sequence(rng: Random) -> Layers:
    """Convolutions over sequences of three features."""
    layers: Layers = [{"reshape": [3, 1024]}]
    for i in range(rng.choice([2, 3])):
        options = {"kernel_size": rng.choice([3, 7, 15]), "padding": "same", "dilation": rng.choice([1, 2])}
        layers += [{"conv1d": {"out_channels": rng.choice([16, 23, 32]) << i, **options}}, "batch_norm1d", "relu"]
    return [*layers, {"mean": -1}, {"linear": CLASSES}]


def u_shaped(rng: Random) -> Layers:
    """Convolutions of images and of smaller ones, whose results are concatenated (U-Net)."""
    width, mode = rng.choice([12, 20, 32]), rng.choice(["nearest", "bilinear"])
    larger = {"upsample": {"scale_factor": 2, "mode": mode}}
    layers: Layers = [*conv(4 * width), "relu"]
    for channels in (2 * width, width):
        inner: Layers = [{"max_pool2d": 2}, *layers, larger, *conv(channels, 1)]
        layers = [*conv(channels), "relu", {"concat": [[{"scale": 1}], inner]}, *conv(channels), "relu"]
    return [*layers, {"adaptive_avg_pool2d": 1}, "flatten", {"linear": CLASSES}]


def group_normed(rng: Random) -> Layers:
    """Residual blocks that begin with group norm."""
    width, groups = rng.choice([24, 32, 64]), rng.choice([4, 8])
    part: Layers = [{"group_norm": groups}, "silu", *conv(width)[:1]]
    layers: Layers = [*conv(width)[:1], *[{"residual": part * 2}] * rng.choice([2, 3])]
    return [*layers, {"adaptive_avg_pool2d": 1}, "flatten", {"linear": CLASSES}]


def layer_normed(rng: Random) -> Layers:
    """Residual linear layers, each with layer norm."""
    width = rng.choice([128, 300, 500, 1024])
    block: Layers = [{"linear": width}, "layer_norm", rng.choice(["gelu", "silu"])]
    return ["flatten", *block, *[{"residual": block}] * rng.choice([2, 4]), {"linear": CLASSES}]


SMALL = squeezed, sequence, u_shaped, group_normed, layer_normed
FAMILIES = residual, bottleneck, grouped, inverted, dilated, plain, encoder, recurrent, linear, *SMALL


class Network(NamedTuple):
    """A network, its batch size and optimizer, and the shape of its images; None: its data are a text."""

    layers: Layers
    batch: int
    optimizer: Any
    shape: tuple[int, int, int] | None = (3, 32, 32)


def air() -> Network:
    """A CIFAR-10 network after airbench (Jordan, 2024)."""
    layers: Layers = [{"conv2d": {"out_channels": 24, "kernel_size": 2}}, "gelu"]
    for c in (64, 256, 256):
        first, norm = conv(c)
        layers += [first, {"max_pool2d": 2}, norm, "gelu", *conv(c), "gelu"]
    layers += [{"max_pool2d": 3}, "flatten", {"linear": {"out_features": CLASSES, "bias": False}}]
    return Network(layers, 128, {"sgd": {"lr": 0.01, "momentum": 0.85, "nesterov": True}})


def resnet18() -> Network:
    """ResNet-18 (He et al., 2016), whose first convolution is 3x3."""
    body = lambda _, width, stride: [*conv(width, 3, stride), "relu", *conv(width)]  # noqa: E731
    return Network(stages([2] * 4, [64, 128, 256, 512], "relu", body), 32, SGD)


def gpt() -> Network:
    """A GPT-2 of 4 layers, 256 wide."""
    first = [{"embedding": {"num_embeddings": WORDS, "embedding_dim": 256}}, "positional_embedding"]
    last = {"linear": {"out_features": WORDS, "bias": False}}
    return Network([*first, *transformer(4, 8, 1024, causal=True), "layer_norm", last], 8, ADAMW, None)


def vit() -> Network:
    """A vision transformer on 64 patches, 192 wide."""
    return Network(on_patches(4, 192, transformer(4, 6, 768)), 32, ADAMW)


NETWORKS: dict[str, Callable[[], Network]] = {"air": air, "resnet18": resnet18, "gpt": gpt, "encoder": vit}


def drawn(seed: int, index: int) -> tuple[str, Network]:
    """A random network with its name."""
    rng, family = Random(f"{seed} {index}"), FAMILIES[index % len(FAMILIES)]
    size = rng.choice([32, 32, 64, 96]) if family not in (linear, sequence, layer_normed) else 32
    batch = rng.choice([4, 16, 64]) if family in SMALL else max(32, rng.choice([128, 256, 512]) * 32 * 32 // size**2)
    layers, shape = family(rng), (1, size, 3 * size) if family is recurrent else (3, size, size)
    return f"{family.__name__}-{seed}-{index}", Network(layers, batch, rng.choice([SGD, ADAMW]), shape)


def written(name: str, network: Network, precision: str, folder: Path) -> Path:
    """The file of a network's config, beside which its data are written."""
    rng, model, data = np.random.default_rng(0), {"layers": network.layers}, dict[str, Any](batch_size=network.batch)
    if network.shape is None:
        letters = np.concatenate([np.arange(WORDS), rng.integers(0, WORDS, 20 * WORDS)])
        (folder / f"{name}.txt").write_text("".join(chr(0x4E00 + int(i)) for i in letters), encoding="utf-8")
        data |= {"path": str(folder / f"{name}.txt"), "length": LENGTH, "test": 0.05}
    else:
        count = BATCHES * network.batch
        images, labels = rng.integers(0, 256, (count, *network.shape), np.uint8), np.arange(count) % CLASSES
        test = images[:CLASSES], labels[:CLASSES]
        np.savez(folder / f"{name}.npz", x_train=images, y_train=labels, x_test=test[0], y_test=test[1])
        data["path"] = str(folder / f"{name}.npz")
        model |= {"input": list(network.shape[1:])} if network.shape[0] == 1 else {}
    training = {"epochs": 1, "seed": 0, "precision": precision}
    config = {"name": name, "data": data, "model": model, "loss": "cross_entropy", "optimizer": network.optimizer}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | {"training": training}, sort_keys=False))
    return path


def measure(
    networks: dict[str, Network], choice: Choice, device: str, precision: str, seconds: float, report: Report
) -> list[tuple[float, str]]:
    """Set the networks up side by side in at most `seconds`, and time one after the other. Returns ratios and lines."""
    timed: list[tuple[float, str]] = []
    names = [ADTRAIN, *(peer.name for peer in choice.runnable)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=len(networks)))
        found = []
        for name, network in networks.items():
            path = written(name, network, precision, folder)
            workers = stack.enter_context(started(names, device, thread_count()))
            config = str(path), ["schedule=constant"], precision
            found.append((name, workers, pool.submit(comparison.compare_losses, workers, choice, *config)))
        late = wait([first for *_, first in found], seconds).not_done
        for _, workers, first in found:
            for worker in workers.values() if first in late else ():
                worker.close()
        for name, workers, first in found:
            try:
                times = comparison.step_times(workers, first.result(), precision, BUDGET)
            except WorkerFailed as reason:
                click.echo(f"not timed: {name}: {reason}")
                continue
            short = yaml.safe_dump(networks[name].layers[:8], default_flow_style=True, width=10**6).strip()
            shape = networks[name].shape or (LENGTH,)
            about = f"{name}: batch {networks[name].batch}, {'x'.join(map(str, shape))}: {short}"
            ms = {system: time.median_ms for system, time in times.times.items()}
            ratios = {peer: ratio.median for peer, ratio in times.ratios.items()}
            why = times.skipped | times.failed
            report.add({"network": about, "ms": ms, "ratios": ratios, "loss_errors": times.off, "failed": why})
            text = f"{', '.join(f'{system} {x:.3f}' for system, x in ms.items())}  {about}"
            if ratios:
                timed.append((min(ratios.values()), text))
                click.echo(f"{timed[-1][0]:6.3f} {text}")
            else:
                click.echo(f"  none {text}: {why or times.off}")
    return timed


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(NETWORKS)))
@click.option("--seed", default=0, help="The drawn networks depend on it.")
@click.option("--count", default=0, help="How many networks are drawn: one of each family, then again.")
@click.option("--only", "indices", type=int, multiple=True, help="Only the drawn network with this number, from 0.")
@click.option("--peer", "peers", multiple=True, default=PEERS, help="A system, as in bench against; five by default.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--precision", type=click.Choice(list(comparison.LOSS_TOLERANCE)), default="float32", show_default=True)
@click.option("--seconds", default=300.0, help="On a GPU, networks that are not compiled by then are left out.")
@click.option("--json-file", type=click.Path(path_type=Path), help="Where to write the times.")
def main(
    names: tuple[str, ...], seed: int, count: int, indices: Sequence[int], peers: Sequence[str], device: str,
    precision: str, seconds: float, json_file: Path | None,
) -> None:  # fmt: skip
    """Compare the training steps of networks with those of other systems."""
    report = Report(json_file)
    click.echo(report.line())
    if count or indices:
        networks = dict(drawn(seed, index) for index in indices or range(count))
    else:
        networks = {name: NETWORKS[name]() for name in names or NETWORKS}
    groups = [networks] if device == "gpu" else [{name: network} for name, network in networks.items()]
    given = chosen(peers, device, "steps"), device, precision, seconds if device == "gpu" else 1e9, report
    timed = [row for group in groups for row in measure(group, *given)]
    behind = sum(ratio < MARGIN for ratio, _ in timed)
    click.echo(f"{behind} of {len(timed)} networks are slower than a peer by more than 10%; the worst ten:")
    for ratio, text in sorted(timed)[:10]:
        click.echo(f"{ratio:6.3f} {text}")


if __name__ == "__main__":
    main()
