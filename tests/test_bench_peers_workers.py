from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import training_runs

from adtrain.bench.peers import catalogue
from adtrain.bench.peers.catalogue import chosen
from adtrain.bench.peers.sides import Side, SideFailed, SideSkips, started
from adtrain.core.errors import OptionError

PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states of processes are read from /proc")


@pytest.fixture
def side() -> Iterator[Side]:
    with started(["numpy"], "cpu", 1) as sides:
        yield sides["numpy"]


def state(pid: int) -> str:
    """ "T" for a stopped process, "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def comes_to(pid: int, states: str | tuple[str, ...]) -> bool:
    """Whether the process is in one of the states, now or within seconds."""
    for _ in range(500):
        if state(pid) in states:
            return True
        time.sleep(0.01)
    return False


def test_a_side_gets_ready_and_is_timed(side: Side, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    answer = side.ask("step", config_name=path, overrides=[])
    assert len(answer["losses"]) == 5
    assert side.ask("time", calls=2)["seconds"] > 0


@PROC
def test_a_side_is_stopped_but_while_it_is_asked(side: Side, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    for _ in range(2):
        side.ask("step", config_name=path, overrides=[])
        assert comes_to(side.process.pid, "T")


def test_what_it_cannot_do_is_told_and_it_goes_on(side: Side, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    with pytest.raises(SideSkips, match="no counterpart of gelu in plain NumPy"):
        side.ask("step", config_name=path, overrides=["model.layers=[gelu, {linear: 3}]"])
    with pytest.raises(SideFailed, match=r"nosuch  no such file"):
        side.ask("step", config_name="nosuch", overrides=[])
    assert side.ask("step", config_name=path, overrides=[])["losses"]


def test_a_loss_that_is_not_finite_is_a_failure(side: Side, tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    with pytest.raises(SideFailed, match=r"numpy: found the losses .*expected finite numbers"):
        side.ask("step", config_name=path, overrides=["optimizer={sgd: {lr: 1e30}}"])


def test_the_end_of_its_process_is_a_failure_with_its_last_words() -> None:
    with started(["numpy"], "cpu", 1) as sides:
        stdin = sides["numpy"].process.stdin
        assert stdin is not None
        stdin.write("no question\n")
        stdin.flush()
        with pytest.raises(SideFailed, match=r"numpy: the process ended early; json\..*Error"):
            sides["numpy"].answer()


@PROC
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_side_outlives_the_block_whatever_ends_it(error: type[BaseException]) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with started(["numpy", "adtrain"], "cpu", 1) as sides:
            pids.extend(side.process.pid for side in sides.values())
            raise error

    with pytest.raises(error):
        interrupted()
    assert [state(pid) for pid in pids] == [""] * len(pids)


PARENT = """\
import signal, sys
from adtrain.bench.peers.sides import Side

side = Side("numpy", "cpu", 1)
side.ask("step", config_name=sys.argv[1], overrides=[])
print(side.process.pid, flush=True)
signal.pause()
"""


@PROC
def test_a_stopped_side_ends_with_its_parent(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    with subprocess.Popen([sys.executable, "-c", PARENT, path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert comes_to(pid, "T")
        parent.kill()
    assert comes_to(pid, ("Z", ""))


def test_a_package_stands_for_all_its_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_spec", lambda name: True)
    assert chosen(["torch", "numpy"], "cpu", operations=False).taking_part == ["torch-eager", "torch-compile", "numpy"]
    assert chosen(["torch"], "gpu", operations=True).taking_part == ["torch-eager", "torch-graph"]
    assert chosen(["jax-scan", "torch-eager"], "gpu", operations=False).taking_part == ["torch-eager", "jax-scan"]


def test_who_cannot_take_part_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None if name == "jax" else True)
    found = chosen(["jax-jit", "torch", "numpy"], "gpu", operations=True)
    assert found.skipped == {
        "jax-jit": "jax is not installed (pip install jax)",
        "torch-compile": "is for whole steps",
        "numpy": "runs on cpu only",
    }


def test_an_unknown_peer_is_an_error_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"--against toch: no such peer; did you mean torch\?"):
        chosen(["numpy", "toch"], "cpu", operations=False)
