"""`adtrain train --dry-run`: everything about a training that is known before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adtrain import training
from adtrain.bench.timing import roofline
from adtrain.core.backend import backend
from adtrain.text import counted, short
from adtrain.training import Experiment, RunFolder
from adtrain.training.costs import too_large


def plan(experiment: Experiment, device: str, path: Path | None) -> dict[str, Any]:
    """The plan of a training into the folder `path`, or runs/NAME, as JSON values. Nothing is written.

    `seconds_at_peak` is the time of the FLOPs of all steps at the device's measured peak rate; None if that rate was
    not measured. A training takes longer, unless its kernels need fewer FLOPs (Winograd convolutions, 2:4 sparsity).

    Raises:
        AdtrainError: the folder cannot be made, or the step does not fit on the device.
    """
    folder = RunFolder.planned(experiment, path)
    if (error := too_large(experiment, device)) is not None:
        raise error
    costs, peak, cfg = training.step_costs(experiment, device), roofline.known(device), experiment.config
    validation = 0 if experiment.validation is None else len(experiment.validation)
    flops = costs.fused.flops
    rate = None if peak is None else peak.gflops_per_s.get(cfg.training.precision, peak.gflops_per_s["float32"])
    return {
        "name": cfg.name,
        "folder": str(folder),
        "device": device,
        "device_name": backend(device).device_name(),
        "data": {"train": len(experiment.train), "validation": validation, "test": len(experiment.test)},
        "parameters": sum(row.parameters for row in costs.layers),
        "precision": cfg.training.precision,
        "epochs": experiment.epochs,
        "steps": experiment.total_steps,
        "batch_size": experiment.full_batch,
        "step_flops": flops,
        "step_bytes": costs.fused.bytes,
        "planned_bytes": costs.memory.peak,
        "seconds_at_peak": None if rate is None else flops * experiment.total_steps / rate * 1e-9,
    }


def lines(plan: dict[str, Any], examples: str) -> list[str]:
    """The plan as lines of text; `examples` says what the data consist of."""
    data, steps, seconds = plan["data"], plan["steps"], plan["seconds_at_peak"]
    held_out = f"{data['validation']:,} validation, " if data["validation"] else ""
    time = (
        "unknown; adtrain devices --measure measures the rates that predict it"
        if seconds is None
        else f"at least {f'{seconds:,.1f}' if seconds >= 1 else f'{seconds:.1g}'} s, at the device's peak FLOP rate"
    )
    return [
        f"data    {data['train']:,} training, {held_out}{counted(data['test'], f'test {examples}')}",
        f"model   {plan['parameters']:,} parameters, {plan['precision']}",
        f"device  {plan['device']}, {plan['device_name']}",
        f"steps   {steps:,} of {counted(plan['batch_size'], examples)}; epochs: {plan['epochs']}",
        f"work    {short(plan['step_flops'])}FLOP and {short(plan['step_bytes'], 'B')} a step",
        f"memory  {plan['planned_bytes'] / 2**20:,.1f} MiB planned peak",
        f"time    {time}",
        f"folder  {plan['folder']}",
    ]
