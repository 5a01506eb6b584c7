"""Eager operations and Programs on a fake of the driver: which cubins are loaded, and how kernels are launched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver")

PARTS = ("eager", "program", "eager again", "recurrent")
SCRIPT = """
import json
import cuda_driver_fake
gpu = cuda_driver_fake.install()

import numpy as np
from adtrain import ops
from adtrain.core.array import array
from adtrain.core.staging import stage
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.trace import bind
from adtrain.passes import SIMPLIFY

found = {}

def note(name, f, *args):
    before = len(gpu.launched)
    results = f(*args)
    found[name] = [{"kernel": gpu.names[x.function], **x._asdict()} for x in gpu.launched[before:]]
    return results

def ones(shape):
    return array(np.ones(shape, np.float32), device="gpu")

x = ones((300, 7))
result = note("eager", lambda x: ops.softmax(x, 0), x)
found["addresses"] = [x.buffer.address, result.buffer.address]
note("program", stage(lambda x: ops.softmax(ops.softmax(x)), SIMPLIFY), x)
note("eager again", lambda x: ops.softmax(ops.softmax(x)), x)
of_cell = [(64, 8, 4096), (4096, 1024), (4096,), (64, 1024), (64, 1024)]
note("recurrent", lambda *xs: bind(PRIMITIVES["lstm"], *xs, reverse=False), *(ones(s) for s in of_cell))
array(np.ones(1, np.bool_), device="gpu").numpy()
print(json.dumps({**found, "staged": gpu.staged, "loaded": [len(gpu.loaded), len(set(gpu.loaded))]}))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    """The launches of each part of SCRIPT, the addresses of the eager operation, and counts of loaded cubins."""
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return json.loads(run.stdout)


def test_each_cubin_is_loaded_once(found: Any) -> None:
    loaded, different = found["loaded"]
    assert loaded == different == len({launch["kernel"] for name in PARTS for launch in found[name]})


def test_copies_leave_the_block_that_the_pool_of_the_host_holds(found: Any) -> None:
    held, *others = found["staged"]
    assert held == 1
    assert min(others) >= 8


def test_an_eager_launch_gets_addresses_and_lengths(found: Any) -> None:
    (launch,) = found["eager"]
    lines, length, inner = 7, 300, 7
    assert launch["arguments"] == [*found["addresses"], lines, length, inner]


def test_launches_of_a_graph_may_start_early_and_eager_operations_wait(found: Any) -> None:
    assert [launch["attributes"] for launch in found["program"]] == [["PROGRAMMATIC_STREAM_SERIALIZATION"]] * 2
    assert [launch["attributes"] for launch in found["eager again"]] == [[], []]


def test_the_results_of_a_graph_have_the_kernels_of_eager_operations(found: Any) -> None:
    names = [[launch["kernel"] for launch in found[part]] for part in ("program", "eager again")]
    assert names[0] == names[1]


def test_blocks_that_wait_for_each_other_start_together(found: Any) -> None:
    attributes = {launch["kernel"]: launch["attributes"] for launch in found["recurrent"]}
    assert attributes["grid_recurrent"] == ["COOPERATIVE"]
