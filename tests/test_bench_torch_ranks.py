"""PyTorch on several ranks, in the forms that are timed, takes the steps of one process on the whole batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training_runs import write_config

from adtrain import config, training
from adtrain.bench.peers.jobs import Job
from adtrain.distributed.launch import end, start

pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch
STEPS = 4
RANK = f"""
import json, sys
from adtrain import config, training
from adtrain.bench.peers import torch_ranks
from adtrain.bench.peers.jobs import Job
import torch

job = Job(training.prepare(config.load(sys.argv[1])), "cpu")
found = []
with torch_ranks.process_group("cpu", 60) as ranks:
    for made in (torch_ranks.with_ddp(job), torch_ranks.MeanGradients(job, "eager", ranks.size)):
        parts = job.orders.reshape(-1, ranks.size, job.experiment.full_batch // ranks.size)[:, ranks.rank]
        for part in parts[:{STEPS}]:
            made.step(torch.tensor(part))
        found.append({{path: x.tolist() for path, x in made.parameters.items()}})
print(json.dumps(found))
"""


def test_steps_of_pytorch_on_two_ranks_equal_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from adtrain.bench.peers.torch_system import Training

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = write_config(tmp_path)
    job = Job(training.prepare(config.load(path)), "cpu")
    alone = Training(job, "eager")
    for at in job.orders.reshape(-1, job.experiment.full_batch)[:STEPS]:
        alone.step(torch.tensor(at))
    pipes = {"stdout": subprocess.PIPE, "text": True}
    processes = start(2, [sys.executable, "-c", RANK, str(path)], {}, **pipes)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert end(processes) == [0, 0]
    for output in outputs:
        for found in json.loads(output):
            for name, x in alone.parameters.items():
                np.testing.assert_allclose(found[name], x.detach().numpy(), rtol=1e-4, atol=1e-6)
