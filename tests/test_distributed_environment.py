"""Which rank a process is, by the variables of each launcher."""

from __future__ import annotations

import pytest

from adtrain.core.errors import AdtrainError
from adtrain.distributed.environment import Place, other_rank, place, threads, visible_gpu

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "9"}
ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}
SRUN = {
    **ALLOCATION,
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "8",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, Place(3, 4, 1, 2, "torchrun")),
        (OPEN_MPI, Place(2, 8, 0, 8, "mpiexec")),
        (MPICH, Place(1, 2, 1, 2, "mpiexec")),
        (SRUN, Place(5, 16, 1, 8, "srun")),
        ({**SRUN, **MPICH}, Place(1, 2, 1, 2, "mpiexec")),  # mpiexec inside of a step
        ({**SRUN, **OPEN_MPI}, Place(2, 8, 0, 8, "mpiexec")),
        ({**MPICH, **TORCHRUN}, Place(3, 4, 1, 2, "torchrun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Place(1, 2, 1, 2, "mpiexec")),
        ({"SLURM_JOB_ID": "77"}, None),
        (ALLOCATION, None),  # a batch script: not a task of a step
        ({"RANK": "0"}, None),
    ],
)
def test_the_place_of_a_process(environment: dict[str, str], expected: Place | None) -> None:
    assert place(environment) == expected
    assert other_rank(environment) == (expected is not None and expected.rank > 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "two", "WORLD_SIZE": "4"}, "found RANK='two' in the environment, expected a number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "found RANK=4, LOCAL_RANK=4 and WORLD_SIZE=4, expected ranks below"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "found PMI_RANK='-1'"),
    ],
)
def test_contradictory_variables_are_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(AdtrainError, match=f"^{message}"):
        place(environment)
    assert not other_rank(environment)


@pytest.mark.parametrize(
    ("environment", "usable", "expected"),
    [
        ({}, 8, None),
        (MPICH, 8, 4),
        (SRUN, 8, 1),
        (MPICH, 2, None),  # the launcher bound each rank to cores of its own
        ({**MPICH, "OMP_NUM_THREADS": "3"}, 8, None),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, 8, None),
    ],
)
def test_ranks_of_a_host_divide_its_cores(environment: dict[str, str], usable: int, expected: int | None) -> None:
    assert threads(environment, 8, usable) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({**MPICH}, "1"),
        ({**MPICH, "CUDA_VISIBLE_DEVICES": "4,7"}, "7"),
        ({**MPICH, "CUDA_VISIBLE_DEVICES": "GPU-3f"}, None),  # the launcher chose it
        ({**MPICH, "MPI_LOCALRANKID": "1", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({**TORCHRUN, "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, ""),  # fewer GPUs than ranks
    ],
)
def test_each_rank_of_a_host_sees_one_gpu(environment: dict[str, str], expected: str | None) -> None:
    assert visible_gpu(environment) == expected
