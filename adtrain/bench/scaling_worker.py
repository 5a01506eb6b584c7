"""One rank of a measurement: times steps, or exchanges alone. Rank 0 prints a line of JSON.

Started N times as `python -m adtrain.bench.scaling_worker REQUEST`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from adtrain.bench.peers.systems import ADTRAIN
from adtrain.distributed.environment import divide_host

PEERS = {"torch-ddp": ("cpu", "gpu"), "torch-graph": ("gpu",)}
"""The other systems, and the devices that they run on. torch-ddp: PyTorch's DistributedDataParallel, eager.
torch-graph: PyTorch, with the whole step and an all-reduce of the gradients in one CUDA graph."""


class Request(NamedTuple):
    """Steps of a config, or with `exchange_bytes` the sum of a vector of that size over all ranks.

    Attributes:
        config: a path or a name.
        batch_size: of all ranks together.
        system: "adtrain", or a name in `PEERS`, which take steps only.
    """

    config: str
    overrides: Sequence[str]
    device: str
    batch_size: int
    exchange_bytes: int = 0
    system: str = ADTRAIN


class Measured(NamedTuple):
    """Microseconds of a step, or of the sum of a vector over all ranks, in each sample; the bytes of the gradients."""

    microseconds: Sequence[float]
    gradient_bytes: int
    device: str


if TYPE_CHECKING:
    from adtrain.training import Experiment

SAMPLES = 7
SAMPLE_SECONDS = 0.3
"""The approximate time of a sample: many steps, or many exchanges."""
TIMEOUT = 120.0


def steps(request: Request) -> Measured:
    """Time steps on full batches."""
    from adtrain import training
    from adtrain.core import tree

    experiment = _experiment(request)
    state = tree.map(lambda x: x.numpy(), experiment.initial_state("cpu"))
    take = training.continuation(experiment, state, request.device)
    return _measured(request, take, sum(x.nbytes for x in tree.leaves(experiment.divided(state).params)))


def _experiment(request: Request) -> Experiment:
    """The config's experiment with the request's batch size."""
    from adtrain import config, training

    overrides = [*request.overrides, f"data.batch_size={request.batch_size}"]
    return training.prepare(config.load(request.config, overrides))


def peer_steps(request: Request) -> Measured:
    """Time steps on full batches in another system."""
    from adtrain.bench.peers import torch_ranks
    from adtrain.bench.peers.jobs import Job

    job = Job(_experiment(request), request.device)
    with torch_ranks.process_group(request.device, TIMEOUT) as ranks:
        form = request.system.partition("-")[2]
        # No name for the runner: its CUDA graph must be gone when the process group ends. NCCL waits for that.
        samples = _samples(torch_ranks.runner(job, form, ranks), ranks.barrier, ranks.broadcast)
        size = sum(x.nbytes for x in job.weights.values())
        return Measured(samples, size, ranks.device_name)


def exchanges(request: Request) -> Measured:
    """Time the sum of a vector of float32 numbers over all ranks, which is computed as in a step."""
    from adtrain.core import communicator
    from adtrain.core.array import array
    from adtrain.core.staging import stage
    from adtrain.passes import ALL, passes_of_ranks

    ranks = communicator.current().size
    count = request.exchange_bytes // 4 // ranks * ranks
    staged = stage(summed, passes_of_ranks(ALL), donate=(0,))
    held = [array(np.zeros(count, np.float32), device=request.device)]

    def take(times: int) -> None:
        held.append(staged.repeat(times, held.pop()))

    return _measured(request, take, count * 4)


def summed(x: Any) -> Any:
    """The sum of a vector over all ranks. Each rank adds a slice; no optimizer changes it."""
    from adtrain import ops
    from adtrain.core import communicator
    from adtrain.ops.collectives import tree_sum

    gradients = x + 0.0  # in the arena of the Program, as gradients are
    received = ops.all_to_all(ops.reshape(gradients, (communicator.current().size, -1)))
    return ops.reshape(ops.all_gather(tree_sum(received)), x.shape)


def _measured(request: Request, take: Callable[[int], object], size: int) -> Measured:
    from adtrain.core import communicator
    from adtrain.core.backend import backend
    from adtrain.training.loop import of_first_rank

    device = backend(request.device)

    def run(times: int) -> None:
        take(times)
        device.synchronize()

    def barrier() -> None:
        communicator.all_gathered(np.zeros(1))

    samples = _samples(run, barrier, of_first_rank)
    return Measured(samples, size, device.device_name())


def _samples(
    run: Callable[[int], object], barrier: Callable[[], object], broadcast: Callable[[int], int]
) -> Sequence[float]:
    """The microseconds of a repetition, a mean for each sample.

    Args:
        run: takes a number of repetitions, and waits for the device.
        barrier: returns when all ranks have called it.
        broadcast: returns the argument of rank 0 on all ranks.
    """

    def seconds(times: int) -> float:
        barrier()
        started = perf_counter()
        run(times)
        return perf_counter() - started

    seconds(20)  # compilation, connections, graphs
    times = broadcast(max(10, int(SAMPLE_SECONDS / (seconds(20) / 20)) // 10 * 10))
    return [1e6 * seconds(times) / times for _ in range(SAMPLES)]


def main() -> None:
    """Measure what the argument, a Request as JSON, describes."""
    divide_host(os.environ)
    from adtrain.core.errors import AdtrainError
    from adtrain.distributed.agreement import joined

    request = Request(**json.loads(sys.argv[1]))
    try:
        if request.system != ADTRAIN:
            found = peer_steps(request)
        else:
            with joined(TIMEOUT, lambda line: print(line, file=sys.stderr), lambda error: (str(error), 2)):
                found = exchanges(request) if request.exchange_bytes else steps(request)
        if os.environ["RANK"] == "0":
            print(json.dumps(found._asdict()), flush=True)
    except AdtrainError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
