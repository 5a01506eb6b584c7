from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import training_runs

from adtrain import training
from adtrain.bench.profile import DEVICE, HOST, trace_step

SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {
                        "required": ["name", "cat", "ph", "ts", "dur", "pid", "tid", "args"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "cat": {"enum": ["forward", "backward", "update", "host"]},
                            "ph": {"const": "X"},
                            "ts": {"type": "number", "minimum": 0},
                            "dur": {"type": "number", "minimum": 0},
                            "pid": {"type": "integer"},
                            "tid": {"enum": [HOST, DEVICE]},
                            "args": {"type": "object"},
                        },
                    },
                    {
                        "required": ["name", "ph", "pid", "tid", "args"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"enum": ["process_name", "thread_name"]},
                            "ph": {"const": "M"},
                            "pid": {"type": "integer"},
                            "tid": {"enum": [HOST, DEVICE]},
                            "args": {"required": ["name"], "properties": {"name": {"type": "string"}}},
                        },
                    },
                ]
            },
        },
    },
}
"""Trace Event Format, JSON object form: complete events and metadata, as chrome://tracing and Perfetto read them."""


def events_of(folder: Path, mode: training.Mode) -> list[dict[str, Any]]:
    experiment = training.prepare(training_runs.load(folder), mode)
    run_steps = training.continuation(experiment, experiment.initial_state("cpu"))
    run_steps(1)
    return trace_step(1, mode.value, run_steps, {("matmul", "0.linear", "forward"): ["gemm"]})


@pytest.mark.parametrize("mode", training.Mode)
def test_events_follow_the_format_and_do_not_overlap(tmp_path: Path, mode: training.Mode) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    events = events_of(tmp_path, mode)
    jsonschema.validate(json.loads(json.dumps({"traceEvents": events}, allow_nan=False)), SCHEMA)
    operations = [e for e in events if e["ph"] == "X" and e["tid"] == DEVICE]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(operations))
    assert {e["cat"] for e in operations} == {"forward", "backward", "update"}
    step, wait = (e for e in events if e["ph"] == "X" and e["tid"] == HOST)
    assert (step["name"], wait["name"]) == ("step", "wait")
    assert wait["ts"] == pytest.approx(step["dur"])
    assert all(e["ts"] + e["dur"] <= step["dur"] for e in operations)


def test_events_of_operations_hold_scope_phase_and_cost(tmp_path: Path) -> None:
    (product,) = [
        e for e in events_of(tmp_path, training.Mode.STAGED)
        if e["name"] == "matmul" and e["args"]["scope"] == "0.linear" and e["cat"] == "forward"
    ]  # fmt: skip
    assert product["args"] == {
        "scope": "0.linear", "phase": "forward", "flops": 2 * 16 * 36 * 16, "bytes": 4 * (16 * 36 + 36 * 16 + 16 * 16),
        "kernel": "gemm",
    }  # fmt: skip
