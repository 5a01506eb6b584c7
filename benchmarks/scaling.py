"""Measure several GPUs of one machine in one call: the tests of ranks, exchanges, and steps of adtrain and PyTorch.

    python benchmarks/scaling.py FOLDER [--ranks 1,2] [--device gpu] [--parts steps,tests,exchanges,peers]

The parts run in the given order. The tests train three times with the same bytes, and kill and stop a rank. Writes
FOLDER/scaling.json after each workload, FOLDER/tests.txt, and prints tables. What fails is reported, and the rest is
measured. For a first look: `--parts steps,peers --scalings weak --peers torch-graph`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from adtrain.bench.peers.systems import ADTRAIN
from adtrain.bench.result import part_lines
from adtrain.bench.scaling import COLUMNS, SCALINGS, run, scaling
from adtrain.bench.scaling_worker import PEERS, Request
from adtrain.bench.view import Table
from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError

TESTS = Path(__file__).resolve().parents[1] / "tests/test_gpu_ranks.py"
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
PARTS = ("steps", "tests", "exchanges", "peers")
WIDTH = 120

Keep = Callable[[str, object], None]
"""Stores a result under a name, and writes all results so far."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--scalings", default=",".join(SCALINGS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    arguments.ranks = [int(x) for x in arguments.ranks.split(",")]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {}

    def keep(name: str, value: object) -> None:
        found[name] = value
        (arguments.folder / "scaling.json").write_text(json.dumps(found, indent=2) + "\n")

    peers = [name for name in arguments.peers.split(",") if arguments.device in PEERS[name]]
    parts: dict[str, Callable[[], None]] = {
        "steps": lambda: steps(arguments, [ADTRAIN], keep),
        "tests": lambda: tests(arguments.folder / "tests.txt"),
        "exchanges": lambda: exchanges(arguments.device, max(arguments.ranks), keep),
        "peers": lambda: steps(arguments, peers, keep),
    }
    for part in arguments.parts.split(","):
        parts[part]()


def steps(arguments: argparse.Namespace, systems: Sequence[str], keep: Keep) -> None:
    """Time steps of systems."""
    for name in arguments.workloads.split(","):
        config, overrides, batch = WORKLOADS[name]
        measured = arguments.ranks, systems, arguments.scalings.split(",")
        try:
            points = scaling(config, overrides, arguments.device, batch, *measured).points
        except AdtrainError as error:
            print(f"{name}: {error}", flush=True)
            continue
        keep(f"{name}, {', '.join(systems)}", plain(points, sparse=True))
        print(*part_lines([Table(COLUMNS, points, title=name)], WIDTH), sep="\n", flush=True)


def tests(output: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(TESTS)], capture_output=True, text=True)
    output.write_text(done.stdout + done.stderr)
    print(f"\ntests: exit code {done.returncode}", *done.stdout.splitlines()[-3:], sep="\n", flush=True)


def exchanges(device: str, ranks: int, keep: Keep) -> None:
    """Time exchanges alone."""
    for size in SIZES:
        try:
            measured = run(Request("mlp", (), device, 1, exchange_bytes=size), ranks, 1)
        except AdtrainError as error:
            print(f"exchange of {size:,} bytes: {error}", flush=True)
            continue
        keep(f"exchange {size}", measured._asdict())
        print(f"exchange of {size:>11,} bytes: {median(measured.microseconds):9.1f} us", flush=True)


if __name__ == "__main__":
    main()
