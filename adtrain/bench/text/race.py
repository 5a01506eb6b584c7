"""The text of a race: a row for each system, and one for each seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.peers.systems import ADTRAIN
from adtrain.bench.text.against import absent
from adtrain.bench.text.cells import wrapped
from adtrain.bench.timing.protocol import busy
from adtrain.table import Column, render

SYSTEMS = (
    Column("system", text=True),
    Column("reached"),
    Column("median s"),
    Column("min", rank=1),
    Column("max", rank=1),
    Column("ratio"),
    Column("accuracy"),
    Column("deviation", rank=2),
    Column("lowest", rank=2),
    Column("loss error", rank=3),
)


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    about, systems = result["protocol"], result["systems"]
    commit = f" ({about['commit']})" if about["commit"] else ""
    yield from wrapped([f"{about['device']}: {about['device_name']}, {about['threads']} threads{commit}"], width)
    what = ", ".join([result["config"], *result["overrides"]])
    yield from wrapped(
        [
            f"{what}: seconds of training until a test accuracy of {result['target']:.2%}, checked after each epoch; "
            "compilation and evaluation are not counted",
            "accuracy: mean at the end; ratio: a system's median time over adtrain's",
        ],
        width,
    )
    yield ""
    yield from render(SYSTEMS, [_system(result, name) for name in systems], width)
    yield ""
    columns = [Column("seed"), *(column for name in systems for column in (Column(f"{name} s"), Column("accuracy")))]
    rows = zip(*(each["runs"] for each in systems.values()), strict=True)
    yield from render(columns, [[str(runs[0]["seed"]), *_seed(runs)] for runs in rows], width)
    notes = list(absent(result))
    notes += [f"{name}: other first losses than adtrain's, so it did not race" for name in result["different"]]
    if warning := busy(about):
        notes.append(warning)
    yield from wrapped(notes, width)


def _system(result: Mapping[str, Any], name: str) -> list[str]:
    found, own = result["systems"][name], result["systems"][ADTRAIN]["seconds"]
    seconds, accuracy = found["seconds"], found["accuracy"]
    times = [f"{seconds[field]:.4g}" for field in ("median", "min", "max")] if seconds else ["", "", ""]
    ratio = f"{seconds['median'] / own['median']:.2f}" if seconds and own and name != ADTRAIN else ""
    error = f"{result['off'][name]:.0e}" if name in result["off"] else ""
    return [
        name,
        f"{found['reached']} of {len(found['runs'])}",
        *times,
        ratio,
        *(f"{accuracy[field]:.2%}" for field in ("mean", "deviation", "min")),
        error,
    ]


def _seed(runs: tuple[Mapping[str, Any], ...]) -> Iterator[str]:
    for run in runs:
        yield "" if run["seconds"] is None else f"{run['seconds']:.4g}"
        yield f"{run['epochs'][-1]['accuracy']:.2%}"
