"""The first steps of one system: `python -m adtrain.bench.startup_worker NAME DEVICE CONFIG [KEY=VALUE]...`.

It prints the seconds of the import of the system's package, the seconds from there to the result of the first steps,
and the loss of the first one. What adtrain does to prepare data, weights and batches is not counted.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from time import perf_counter

from adtrain import config, training
from adtrain.bench.peers import jobs
from adtrain.bench.peers.systems import SYSTEMS


def main(name: str, device: str, config_name: str, *overrides: str) -> None:
    job = jobs.Job(training.prepare(config.load(config_name, overrides)), device)
    for prepared in ("orders", "weights", "statistics", "normalization"):
        getattr(job, prepared)
    start = perf_counter()
    import_module(SYSTEMS[name].package)
    imported = perf_counter()
    losses = jobs.runner(name, job).losses()
    spans = {"imports": imported - start, "first steps": perf_counter() - imported}
    print(json.dumps({"spans": spans, "loss": losses[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
