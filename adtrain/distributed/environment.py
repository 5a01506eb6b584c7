"""Which rank of which job this process is, from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from adtrain.core.errors import AdtrainError

DIED = 1
"""The exit code of a job in which a rank died or hung."""


class Place(NamedTuple):
    """A process's place in its job.

    Attributes:
        rank: its number, from 0 to size - 1.
        size: the number of processes.
        local_rank: its number among those of its host.
        local_size: how many there are on its host; `size` where the launcher does not say.
        launcher: what started it, for messages.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


# The names of rank, size, local rank and local size. The first whose rank and size are set count. PMI_RANK is set by
# MPICH and Intel MPI. A shell in a Slurm allocation has SLURM_PROCID and SLURM_NTASKS too, but is not a task of a step.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpiexec", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def has_rank(environment: Mapping[str, str]) -> bool:
    """Whether a variable has a rank's number; which rank of which job it is, is decided later."""
    return any(rank in environment for _, rank, *_ in _LAUNCHERS)


def place(environment: Mapping[str, str]) -> Place | None:
    """The place of a process with these environment variables; None for a process that no launcher started.

    Raises:
        AdtrainError: a launcher's variables contradict each other, or are not numbers.
    """
    for launcher, *names in _LAUNCHERS:
        if names[0] in environment and names[1] in environment:
            rank, size = (_number(environment, name) for name in names[:2])
            local_rank, local_size = (
                _number(environment, name) if name in environment else default
                for name, default in zip(names[2:], (rank, size), strict=True)
            )
            if not (rank < size and local_rank < size):
                found = f"found {names[0]}={rank}, {names[2]}={local_rank} and {names[1]}={size}"
                raise AdtrainError(f"{found}, expected ranks below the number of ranks")
            return Place(rank, size, local_rank, local_size, launcher)
    return None


def _valid_place(environment: Mapping[str, str]) -> Place | None:
    """`place`; None for variables that are wrong, which is reported where the rank is needed."""
    try:
        return place(environment)
    except AdtrainError:
        return None


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables is one of several ranks."""
    process = _valid_place(environment)
    return process is not None and process.size > 1


def other_rank(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables is a rank other than 0."""
    process = _valid_place(environment)
    return process is not None and process.rank > 0


def threads(environment: Mapping[str, str], cores: int, usable: int) -> int | None:
    """The number of threads for a rank, so that the ranks of a host share its cores; None to leave the default.

    Args:
        cores: of the host.
        usable: those that this process may use. If they are fewer, the launcher has divided them.
    """
    process = _valid_place(environment)
    if process is None or "OMP_NUM_THREADS" in environment or usable < cores:
        return None
    return max(1, cores // process.local_size)


def divide_host(environment: MutableMapping[str, str]) -> None:
    """Give a rank its part of the host's cores and GPUs, before a library that reads the variables is loaded."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    if count := threads(environment, cores, usable):
        environment["OMP_NUM_THREADS"] = str(count)
    if (gpu := visible_gpu(environment)) is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu


def visible_gpu(environment: Mapping[str, str]) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES that gives a rank a GPU of its own; None to leave the variable as it is.

    That GPU is number `local_rank` of the visible ones. A single visible GPU was chosen by the launcher.
    """
    process = _valid_place(environment)
    if process is None or process.size == 1:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(process.local_rank)
    names = [name for name in visible.split(",") if name]
    if len(names) < 2:
        return None
    return names[process.local_rank] if process.local_rank < len(names) else ""


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise AdtrainError(f"found {name}={text!r} in the environment, expected a number, as a launcher sets it")
    return int(text)
