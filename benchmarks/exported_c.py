"""Time of one image by exported C and by onnxruntime, one thread each: python benchmarks/exported_c.py RUN...

Both are called from Python on the same image, alternately; the calls of C go through ctypes. Needs the extra `export`
and a C compiler.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnxruntime

from adtrain.bench.sampling import in_turns
from adtrain.export import onnx_model
from adtrain.export.c import network, source
from adtrain.export.c.source import compiled
from adtrain.training import TrainedModel, model_file

ROUNDS, CALLS = 400, 10


def measure(trained: TrainedModel) -> tuple[float, float]:
    """Median seconds of a call of the exported C, with --simd, and of onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_model.encode(trained), options, providers=["CPUExecutionProvider"])
    about, path = network.interface(trained), Path("net.c")
    image = trained.test_split().images[:1]
    probabilities = np.zeros(about.outputs, np.float32)
    with compiled(source.generate(trained, path, simd=True), path, about) as program:
        predict, addresses = (
            program.library.net_predict,
            [ctypes.c_void_p(x.ctypes.data) for x in (image, probabilities)],
        )

        def seconds(call: Callable[[], object]) -> float:
            start = perf_counter()
            for _ in range(CALLS):
                call()
            return (perf_counter() - start) / CALLS

        calls: dict[str, Callable[[], object]] = {
            "C": lambda: predict(*addresses),
            "onnxruntime": lambda: session.run(["probabilities"], {"images": image}),
        }
        found = in_turns({name: partial(seconds, call) for name, call in calls.items()}, ROUNDS)
    return median(found["C"]), median(found["onnxruntime"])


if __name__ == "__main__":
    for run in sys.argv[1:]:
        ours, theirs = measure(model_file.load(Path(run)))
        print(f"{run}: C {1e6 * ours:.1f} us, onnxruntime {1e6 * theirs:.1f} us, ratio {theirs / ours:.2f}")
