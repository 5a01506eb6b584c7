"""The result of `adtrain bench against`: training steps or operations in adtrain and in its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

from adtrain import config, training
from adtrain.bench.peers import comparison
from adtrain.bench.peers.op_cases import OpCase
from adtrain.bench.peers.processes import WorkerProcess, started
from adtrain.bench.peers.systems import ADTRAIN, Choice
from adtrain.bench.timing.machine import thread_count
from adtrain.bench.timing.protocol import observed_load, protocol
from adtrain.sweeps.members import with_seeds

Progress = Callable[[str], object]


def of_configs(
    names: Sequence[str],
    overrides: Sequence[str],
    device: str,
    choice: Choice,
    autotune: str,
    progress: Progress,
    members: int | None = None,
) -> dict[str, Any]:
    """The result for the training step of each config, as JSON values; `progress` is called with lines for the user.

    Args:
        members: the number of networks that are trained together; None: one network.

    Raises:
        ConfigError, DataError: a config is wrong. All are checked before any process is started.
        WorkerFailed: adtrain itself fails.
    """
    overrides = [*overrides, "schedule=constant"]
    configs = []
    for name in names:
        cfg = config.load(name, overrides)
        training.check_precision(cfg, device)
        training.check_whole_batches(cfg)
        configs.append((name, cfg, training.prepare(cfg).full_batch))
    rows, load = [], observed_load(progress)
    for name, cfg, batch in configs:
        precision, seeds, count = cfg.training.precision, list[str](), dict[str, int]()
        if members is not None:
            seeds, count = [with_seeds(cfg.training.seed, members)], {"members": members}
        systems = ", ".join([ADTRAIN, *(peer.name for peer in choice.runnable)])
        progress(f"bench: {cfg.name} in {systems}: setting up, then timing in interleaved samples")
        with _workers(device, choice, autotune) as workers:
            do = "step" if members is None else "members"
            found = comparison.compare_steps(workers, name, [*overrides, *seeds], precision, do)
        what = {"config": cfg.name, "overrides": overrides, **count, "batch_size": batch, "precision": precision}
        rows.append({**what, "tolerance": comparison.LOSS_TOLERANCE[precision], **_record(found, choice)})
    return _result({"steps": rows}, comparison.STEPS, device, load, choice)


def of_operations(
    cases: Sequence[OpCase], device: str, choice: Choice, autotune: str, progress: Progress
) -> dict[str, Any]:
    """The result for single operations, as JSON values. Raises WorkerFailed if adtrain itself fails."""
    rows, load = [], observed_load(progress)
    with _workers(device, choice, autotune) as workers:
        for i, case in enumerate(cases, 1):
            progress(f"bench: {case.name} ({i} of {len(cases)})")
            for phase in case.phases:
                found = comparison.compare_operation(workers, case, phase)
                what = {"op": case.op, "size": case.size, "phase": phase, "flops": case.flops(phase)}
                tolerance = comparison.OPERATION_TOLERANCE[case.precision]
                how = {"precision": case.precision, "tolerance": tolerance}
                rows.append({**what, **how, **_record(found, choice)})
    return _result({"operations": rows}, comparison.OPERATIONS, device, load, choice)


def is_different(result: dict[str, Any]) -> bool:
    """Whether the results of any system differ too much."""
    return any(row["different"] for row in (*result.get("steps", ()), *result.get("operations", ())))


def _workers(device: str, choice: Choice, autotune: str) -> AbstractContextManager[dict[str, WorkerProcess]]:
    return started([ADTRAIN, *(peer.name for peer in choice.runnable)], device, thread_count(), autotune)


def _record(found: comparison.Comparison, choice: Choice) -> dict[str, Any]:
    record = found.record()
    return {**record, "skipped": {**choice.skipped, **record["skipped"]}}


def conditions(device: str, load: float | None, choice: Choice) -> dict[str, Any]:
    """The protocol, with threads and the versions of the peers."""
    found = {**protocol(device, load), "threads": thread_count()}
    found["versions"] |= {package: version(package) for package in {peer.package for peer in choice.runnable}}
    return found


def _result(
    rows: dict[str, Any], budget: comparison.Budget, device: str, load: float | None, choice: Choice
) -> dict[str, Any]:
    sampling = {
        "samples": [comparison.MIN_ROUNDS, comparison.MAX_ROUNDS],
        "min_sample_ms": budget.sample * 1e3,
        "clock": dict.fromkeys(("operations", "steps"), "the host's in each process, until the device has finished"),
    }
    return {"kind": "against", "protocol": {**conditions(device, load, choice), **sampling}, **rows}
