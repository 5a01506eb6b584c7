"""Measure several GPUs of one machine: steps, exchanges, and their overlap, in one call.

    python benchmarks/scaling.py FOLDER [--ranks 1,2] [--device gpu]

Writes FOLDER/scaling.json and prints tables. What fails is reported, and the rest is measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from adtrain.bench.scaling.measure import run, scaling
from adtrain.bench.scaling.request import Request
from adtrain.bench.text.scaling import cells
from adtrain.core.errors import AdtrainError

WIDE = ("model.layers=[{linear: 7500}, relu, {linear: 7500}, relu, {linear: 10}]", "optimizer={sgd: {lr: 0.01}}")
SGD = ("optimizer={sgd: {lr: 0.01}}",)
WORKLOADS = {
    "mlp 128 SGD": ("mlp", SGD, 128),
    "mlp 1024 Adam": ("mlp", (), 1024),
    "cnn 128 Adam": ("cnn", (), 128),
    "cnn 1024 Adam": ("cnn", (), 1024),
    "wide mlp 7500 SGD": ("mlp", WIDE, 7500),
}
SIZES = (1 << 10, 16 << 10, 256 << 10, 2_143_232, 4_800_000, 64 << 20, 256 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    arguments = parser.parse_args()
    ranks = [int(x) for x in arguments.ranks.split(",")]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {}
    for size in SIZES:
        try:
            request = Request("mlp", (), arguments.device, 1, exchange_bytes=size)
            measured = run(request, max(ranks), 1)
        except AdtrainError as error:
            print(f"exchange of {size:,} bytes: {error}", flush=True)
            continue
        found[f"exchange {size}"] = measured._asdict()
        print(f"exchange of {size:>11,} bytes: {median(measured.microseconds):9.1f} us", flush=True)
    for name in arguments.workloads.split(","):
        config, overrides, batch = WORKLOADS[name]
        try:
            result = scaling(config, overrides, arguments.device, batch, ranks)
        except AdtrainError as error:
            print(f"{name}: {error}", flush=True)
            continue
        found[name] = [point._asdict() for point in result.points]
        print(f"\n{name}", *(" ".join(cells(point._asdict())) for point in result.points), sep="\n", flush=True)
        (arguments.folder / "scaling.json").write_text(json.dumps(found, indent=2) + "\n")
    (arguments.folder / "scaling.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
