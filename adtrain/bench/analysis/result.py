"""The result of `adtrain bench devices`: times and speed-ups of operations, configs and launch shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adtrain import config, training
from adtrain.backends.cpu import naive
from adtrain.bench.analysis import launch, steps
from adtrain.bench.analysis.ops import LabelledDevice, SizedOp, measured
from adtrain.bench.peers.numpy_steps import naive_step
from adtrain.bench.peers.processes import Unsupported
from adtrain.bench.timing.protocol import observed_load, protocol
from adtrain.core.backend import backend

BASE_CONFIG = "mlp"
"""The packaged config whose layers are replaced to vary width and depth."""

Progress = Callable[[str], object]


def of_configs(
    names: Sequence[str], overrides: Sequence[str], devices: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """The result for configs, as JSON values; `progress` is called with lines for the user.

    Raises:
        ConfigError, DataError: a config is wrong. All are checked before the first is measured.
    """
    for name in names:
        cfg = config.load(name, overrides)
        training.check_whole_batches(cfg)
        for device in devices:
            training.check_precision(cfg, device)
        training.prepare(cfg)
    load = observed_load(progress)
    rows = [config_row(name, overrides, _labelled(devices), progress) for name in names]
    return _result({"configs": rows}, devices, load)


def of_operations(ops: Sequence[SizedOp], whole: bool, devices: Sequence[str], progress: Progress) -> dict[str, Any]:
    """The result for operations, as JSON values; if `whole`, also for networks of varying width and depth, and for
    launch shapes and kernel candidates of a GPU."""
    rows, load = [], observed_load(progress)
    for op in ops:
        progress(f"bench: {op.op} at {len(op.sizes)} sizes")
        rows.append(measured(op, _labelled(devices)))
    found: dict[str, Any] = {"operations": rows}
    if whole:
        progress("bench: networks that grow")
        found["growing"] = [over(BASE_CONFIG, _labelled(devices)) for over in (steps.over_widths, steps.over_depths)]
        if "gpu" in devices:
            progress("bench: launch shapes and candidates")
            found |= {"launch": launch.launch_shapes(), "candidates": launch.candidates()}
    return _result(found, devices, load)


def config_row(
    name: str, overrides: Sequence[str], devices: Sequence[LabelledDevice], progress: Progress = str
) -> dict[str, Any]:
    """The step of a config: whole, by layer and over batch sizes."""
    progress(f"bench: {name}, by naive loops and on {', '.join(each.label for each in devices)}")
    try:
        step = steps.step(name, overrides, devices, naive_step)
    except Unsupported as reason:
        step = {**steps.step(name, overrides, devices), "without_naive": str(reason)}
    return {
        **step,
        "layers": steps.layers(name, overrides, devices),
        "batches": steps.over_batches(name, overrides, devices),
    }


def _labelled(devices: Sequence[str]) -> list[LabelledDevice]:
    return [LabelledDevice(device, device) for device in devices]


def _result(found: dict[str, Any], devices: Sequence[str], load: float | None) -> dict[str, Any]:
    conditions = {
        **protocol(devices[-1], load),
        "clock": dict.fromkeys(("operations", "steps"), "the host's, until the device has finished"),
        "devices": {device: backend(device).device_name() for device in devices},
        "naive": f"{naive.LABEL}: {backend('cpu').compiler_name()}, {naive.OPTIMIZATION}",
    }
    return {"kind": "analysis", "protocol": conditions, **found}
