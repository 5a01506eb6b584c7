"""How often `adtrain explain` names the cause of a slowdown that was planted, and that it names none for the configs of
the package.

    python benchmarks/explain.py [--try] [--only NAME]... [--healthy/--no-healthy] [--json PATH]

Each row is a process of `adtrain explain`. A slowdown counts as named if its cause is the first or the second one.
The load of the machine is no part of a config: "busy cores" is left out of the causes, but where it is planted. A
row has the predicted gain of the planted cause. With --try it also has the measured one: of the proposal, or where this
is no setting of the config, of the step without the slowdown, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

NAMED = 2
"""A cause is named if it is one of this many first ones."""

OWN_KERNEL = '''
import numpy as np
import adtrain as ad

C = """
#include "common.h"
void FN(slow_relu)(const Team *team, const T *x, T *out, int64_t size) {
    int64_t begin, end;
    my_share(team, size, &begin, &end);
    for (int64_t start = 0; start < 4096; start++)
        for (int64_t i = begin + start; i < end; i += 4096) {
            volatile T y = x[i];
            for (int again = 0; again < 50; again++) y = y * (T)1;
            out[i] = y > 0 ? y : 0;
        }
}
"""
slow_relu = ad.custom_op(
    "slow_relu",
    shape=lambda x: ad.ArrayType(x.shape, x.dtype),
    numpy=lambda x: np.maximum(x, 0),
    c=C,
    vjp=lambda ct, out, x: (ct * ad.ops.astype(out > 0, "float32"),),
)


@ad.register.layer("slow_relu")
class SlowRelu(ad.nn.Module):
    def output_shape(self, shape):
        return shape

    def forward(self, params, state, x, mode):
        return slow_relu(x), state
'''

COLUMNS = """
import adtrain as ad


@ad.register.layer("column_softmax")
class ColumnSoftmax(ad.nn.Module):
    axis, length = 1, 392

    def output_shape(self, shape):
        return shape

    def forward(self, params, state, x, mode):
        rows = ad.ops.reshape(x, (x.shape[0], self.length, x.shape[1] // self.length))
        return ad.ops.reshape(ad.ops.softmax(rows, axis=self.axis), x.shape), state


@ad.register.layer("row_softmax")
class RowSoftmax(ColumnSoftmax):
    axis, length = 2, 2
"""

SLOW_READER = """
import time

from adtrain.training import examples

gather = examples.Streamed._gather


def slow(self, indices, capacity):
    time.sleep(1e-4 * len(indices))
    return gather(self, indices, capacity)


examples.Streamed._gather = slow
examples._usable_in_place = lambda images, device: False
examples._copy_limit = lambda device: 0
"""

TINY_LAYERS = "[" + ", ".join(["{linear: 8}, relu"] * 60) + ", {linear: 10}]"
ROTATED = "[{affine: {rotation: 10, shift: 0.05, scale: 0.1}}]"


@dataclass(frozen=True)
class Plant:
    """A slowdown: what is changed, and the name of its cause."""

    name: str
    cause: str
    config: str = "mlp"
    overrides: Sequence[str] = ()
    options: Sequence[str] = ()
    plugin: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    busy: int = 0  # processes that keep cores busy
    without: Sequence[str] | None = None  # overrides of the same config without the slowdown, which is measured too


PLANTS = (
    Plant("a width of 509", "unaligned width", overrides=["model.layers.0.linear=509"], without=()),
    Plant(
        "two odd widths", "unaligned width", overrides=["model.layers.0.linear=1021", "model.layers.2.linear=509"],
        without=["model.layers.0.linear=1024", "model.layers.2.linear=512"],
    ),
    Plant("batch 7", "small batch", overrides=["data.batch_size=7"]),
    Plant("batch 2, convolutions", "small batch", "lenet5", ["data.batch_size=2"]),
    Plant("float64", "float64", overrides=["training.precision=float64"]),
    Plant("float64, convolutions", "float64", "cnn", ["training.precision=float64"]),
    Plant("many tiny layers", "launches", overrides=[f"model.layers={TINY_LAYERS}", "data.batch_size=64"]),
    Plant(
        "own kernel", "own kernel", plugin=OWN_KERNEL,
        overrides=["model.layers=[{linear: 512}, slow_relu, {linear: 10}]"],
        without=["model.layers=[{linear: 512}, relu, {linear: 10}]"],
    ),
    Plant(
        "softmax over 2 columns", "strided axis", plugin=COLUMNS,
        overrides=["model.layers=[" + "column_softmax, " * 4 + "{linear: 10}]"],
        without=["model.layers=[" + "row_softmax, " * 4 + "{linear: 10}]"],
    ),
    Plant("slow reader", "streamed data", plugin=SLOW_READER),
    Plant("one thread", "few threads", environment={"OMP_NUM_THREADS": "1"}, without=()),
    Plant("busy cores", "busy cores", busy=2),
    Plant("eager", "eager step", options=["--eager"], without=()),
    Plant("eager, convolutions", "eager step", "lenet5", options=["--eager"], without=()),
    Plant("no compiler", "no compiler", environment={"CC": "no-such-compiler"}, without=()),
    Plant("small last batch", "small last batch", overrides=["data.batch_size=229", "training.epochs=1"]),
    Plant(
        "evaluation every 5 steps", "frequent evaluation",
        overrides=["data.validation=0.1", "training.validate_every=5"],
    ),
    Plant("augmentation", "augmentation", "mlp-small", [f"data.augment={ROTATED}"]),
    Plant("checkpoint every 2 steps", "frequent checkpoints", overrides=["training.checkpoint_every=2"]),
    Plant("batch 7 in float64", "small batch", overrides=["data.batch_size=7", "training.precision=float64"]),
)  # fmt: skip
HEALTHY = ("smoke", "mlp", "mlp-small", "lenet5", "cnn", "lenet5-augmented", "resnet", "vit", "lstm", "mnist-99")
BUSY = [sys.executable, "-c", "import time\nend = time.time() + 60\nwhile time.time() < end: pass"]


def explained(plant: Plant, with_trials: bool) -> dict[str, Any]:
    """What `adtrain explain --json` prints; an error as {"error": its text}."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = [sys.executable, "-m", "adtrain", "explain", plant.config, "--device", "cpu", "--json", *plant.options]
        words += [word for setting in plant.overrides for word in ("--set", setting)]
        if plant.plugin:
            (folder / "planted.py").write_text(plant.plugin, encoding="utf-8")
            words += ["--plugin", str(folder / "planted.py")]
        others = [stack.enter_context(subprocess.Popen(BUSY)) for _ in range(plant.busy)]
        environment = {**os.environ, **plant.environment}
        run = subprocess.run(
            [*words, *["--try"] * with_trials], capture_output=True, text=True, env=environment, check=False
        )
        for other in others:
            other.kill()
    found: dict[str, Any] = json.loads(run.stdout) if run.returncode == 0 else {"error": run.stderr.splitlines()[-1]}
    return found


def row_of(plant: Plant, found: Mapping[str, Any]) -> dict[str, Any]:
    """The causes in their order, and the gains of the planted one."""
    ignored = "" if plant.busy else "busy cores"
    findings = [x for x in found.get("findings", ()) if x["cause"] != ignored]
    causes = [x["cause"] for x in findings]
    own: Mapping[str, Any] = next((x for x in findings if x["cause"] == plant.cause), {})
    return {
        "name": plant.name,
        "planted": plant.cause,
        "causes": causes,
        "named": plant.cause in causes[:NAMED],
        "predicted": own.get("predicted_gain"),
        "measured": own.get("measured_gain"),
        "step_ms": found.get("step", {}).get("step_ms"),
        "error": found.get("error"),
    }


def shown(row: Mapping[str, Any]) -> str:
    gains = [f"{row[x]:.2f} x {x}" for x in ("predicted", "measured") if row[x] is not None]
    causes = row["error"] or ", ".join(row["causes"]) or "none"
    return f"{row['name']:26}{'yes' if row['named'] else 'no':5}{'; '.join(gains):40}{causes}"


@click.command(help=__doc__)
@click.option("--try", "with_trials", is_flag=True)
@click.option("--only", multiple=True, metavar="NAME")
@click.option("--healthy/--no-healthy", default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(with_trials: bool, only: tuple[str, ...], healthy: bool, path: Path | None) -> None:
    rows = []
    for plant in PLANTS:
        if not only or plant.name in only:
            rows.append(row_of(plant, explained(plant, with_trials)))
            if with_trials and plant.without is not None and rows[-1]["step_ms"]:
                usual = explained(replace(plant, overrides=plant.without, options=(), environment={}), False)
                rows[-1]["measured"] = rows[-1]["step_ms"] / usual["step"]["step_ms"]
            print(shown(rows[-1]), flush=True)
    print(f"{sum(row['named'] for row in rows)} of {len(rows)} planted slowdowns are named")
    clean = []
    for name in HEALTHY if healthy else ():
        plant = Plant(name, "", name)
        clean.append(row_of(plant, explained(plant, False)))
        print(shown(clean[-1]), flush=True)
    if clean:
        silent = sum(not row["causes"] and not row["error"] for row in clean)
        print(f"{silent} of {len(clean)} configs of the package have no cause")
    if path is not None:
        path.write_text(json.dumps({"planted": rows, "healthy": clean}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
