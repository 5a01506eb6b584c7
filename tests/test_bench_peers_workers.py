from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import training_runs
from waiting import wait_until

from adtrain.bench.peers import systems
from adtrain.bench.peers.systems import SYSTEMS, Unsupported, Work, WorkerFailed, WorkerProcess, chosen, load, started
from adtrain.core.errors import OptionError

PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states of processes are read from /proc")


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with started(["numpy"], "cpu", 1) as workers:
        yield workers["numpy"]


def state(pid: int) -> str:
    """The state as proc(5) names it: "T" for a stopped process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.exhaustive
def test_worker_sets_up_a_step_and_times_it(worker: WorkerProcess, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    answer = worker.ask("step", config_name=path, overrides=[])
    assert len(answer["losses"]) == 5
    assert worker.ask("time", calls=2)["seconds"] > 0


@PROC
def test_worker_is_stopped_after_its_answer(worker: WorkerProcess, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    for _ in range(2):
        worker.ask("step", config_name=path, overrides=[])
        wait_until(lambda: state(worker.process.pid) == "T")


def test_worker_continues_after_errors(worker: WorkerProcess, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    with pytest.raises(Unsupported, match="no counterpart of gelu in plain NumPy"):
        worker.ask("step", config_name=path, overrides=["model.layers=[gelu, {linear: 3}]"])
    with pytest.raises(WorkerFailed, match=r"nosuch: neither a file"):
        worker.ask("step", config_name="nosuch", overrides=[])
    assert worker.ask("step", config_name=path, overrides=[])["losses"]


def test_loss_that_is_not_finite_is_an_error(worker: WorkerProcess, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    with pytest.raises(WorkerFailed, match=r"numpy: the first steps have the losses .*expected finite numbers"):
        worker.ask("step", config_name=path, overrides=["optimizer={sgd: {lr: 1e30}}"])


@pytest.mark.exhaustive
def test_early_end_of_the_process_is_an_error_with_its_last_line() -> None:
    with started(["numpy"], "cpu", 1) as workers:
        stdin = workers["numpy"].process.stdin
        assert stdin is not None
        stdin.write("not JSON\n")
        stdin.flush()
        with pytest.raises(WorkerFailed, match=r"numpy: the process ended early; json\..*Error"):
            workers["numpy"].receive()


@PROC
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_workers_are_killed_when_the_block_fails(error: type[BaseException]) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with started(["numpy", "adtrain"], "cpu", 1) as workers:
            pids.extend(worker.process.pid for worker in workers.values())
            raise error

    with pytest.raises(error):
        interrupted()
    assert [state(pid) for pid in pids] == [""] * len(pids)


PARENT = """\
import signal, sys
from adtrain.bench.peers.systems import WorkerProcess

worker = WorkerProcess("numpy", "cpu", 1)
worker.ask("step", config_name=sys.argv[1], overrides=[])
print(worker.process.pid, flush=True)
signal.pause()
"""


@PROC
def test_stopped_worker_dies_with_its_parent(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    with subprocess.Popen([sys.executable, "-c", PARENT, path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: state(pid) == "T")
        parent.kill()
    wait_until(lambda: state(pid) in ("Z", ""))


def test_package_name_chooses_all_its_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "find_spec", lambda name: True)

    def names(against: list[str], device: str, work: Work) -> list[str]:
        return [peer.name for peer in chosen(against, device, work).runnable]

    assert names(["torch", "numpy"], "cpu", "steps") == ["torch-eager", "torch-compile", "torch-max", "numpy"]
    assert names(["torch"], "gpu", "operation") == ["torch-eager", "torch-graph"]
    assert names(["jax-scan", "torch-eager"], "gpu", "steps") == ["torch-eager", "jax-scan"]
    assert names(["jax", "torch"], "gpu", "members") == ["torch-vmap", "torch-vmap-compile", "jax-vmap"]


def test_every_system_has_a_function_for_each_kind_of_its_work() -> None:
    for system in SYSTEMS.values():
        assert all(callable(getattr(load(system), work)) for work in system.works)


def test_skipped_peers_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "find_spec", lambda name: None if name == "jax" else True)
    found = chosen(["jax-jit", "torch", "numpy"], "gpu", "operation")
    assert found.skipped == {
        "jax-jit": "jax is not installed (pip install jax)",
        "torch-compile": "runs whole steps only",
        "torch-max": "runs whole steps only",
        "torch-max-tf32": "runs whole steps only",
        "numpy": "runs on cpu only",
    }


def test_unknown_peer_is_an_error_that_suggests_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"^toch: no such peer; did you mean torch\?"):
        chosen(["numpy", "toch"], "cpu", "steps")
