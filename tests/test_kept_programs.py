"""A kept Program equals one that is traced again. Files that are damaged or belong to another key are not used."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_samples import for_gpu
from training_runs import prepare

from adtrain import array, config, grad, ops
from adtrain.backends.cpu import CpuBackend
from adtrain.backends.cuda.lower import Lowering, Plan
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.cache import open_cache
from adtrain.core.staging import Staged, stage
from adtrain.core.target import H200
from adtrain.passes import ALL
from adtrain.training import kept_programs
from adtrain.training.kept_programs import KeptPrograms
from adtrain.training.preparation import outline


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "adtrain" / kept_programs.KIND


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_kept_program_has_the_kernels_and_the_memory_plan_that_were_stored(name: str) -> None:
    program, lowering = for_gpu(outline(config.load(name)).step_program(passes=())), Lowering(H200)
    layout = Layout(program, lowering)
    placed = dict.fromkeys(step.equation for steps, _ in layout.runs(2) for step in steps)
    kept = KeptPrograms(name)
    kept.store("key", (program, layout, {e: Plan(lowering.launches(e), lowering.scratch(e)) for e in placed}))
    found, places, plans = kept.find("key")
    assert str(found) == str(program)
    assert set(found.equations) <= set(plans)
    assert places.memory == layout.memory
    other = Lowering(H200)
    other.planned.update(plans)
    for (steps, swaps), (expected, expected_swaps) in zip(places.runs(3), layout.runs(3), strict=True):
        assert swaps == expected_swaps
        assert [step[1:] for step in steps] == [step[1:] for step in expected]
        for step, before in zip(steps, expected, strict=True):
            assert step.equation in plans
            assert other.launches(step.equation) == lowering.launches(before.equation)
            assert other.scratch(step.equation) == lowering.scratch(before.equation)


def test_a_kept_program_is_not_traced_again(monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    monkeypatch.setattr(CpuBackend, "lowering_key", lambda self: "cpu")
    factor, x, calls = array(np.arange(6.0)), array(np.linspace(0, 1, 6)), list[int]()

    def f(x: Any) -> Any:
        calls.append(1)
        return ops.sum(ops.tanh(x) * factor)

    def staged(about: str) -> Staged:
        calls.clear()
        return stage(f, ALL, kept=KeptPrograms(about))

    expected = staged("one")(x).item()
    assert len(calls) == 1
    assert staged("one")(x).item() == expected
    assert not calls
    np.testing.assert_array_equal(grad(staged("one"))(x).numpy(), grad(f)(x).numpy())
    assert staged("another")(x).item() == expected
    assert len(calls) == 1
    for path in own_folder.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    assert staged("one")(x).item() == expected
    assert len(calls) == 1


ABOUT = """
from adtrain import config
from adtrain.training.preparation import outline
names = [name for name in config.packaged() if config.load(name).data.path is None]
print([outline(config.load(name))._kept(part).about for name in names for part in ("step", "evaluation")])
"""


def test_keys_are_equal_in_all_processes() -> None:
    run = partial(subprocess.run, [sys.executable, "-c", ABOUT], capture_output=True, text=True, check=True)
    first, second = run().stdout, run().stdout
    assert first == second
    assert len(set(ast.literal_eval(first))) == len(ast.literal_eval(first)) > 10


def test_a_value_without_a_description_is_refused() -> None:
    assert kept_programs.description((1.5, prepare)) == "(1.5, prepare)"
    with pytest.raises(ValueError, match="found no description of <object object at 0x"):
        kept_programs.description(object())


def test_a_file_that_pickle_refuses_is_removed_with_a_warning(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptPrograms("one")
    kept.store("key", 5)
    (path,) = own_folder.iterdir()
    path.unlink()
    open_cache(kept_programs.KIND).store(path.name.split(".")[0], ".pickle", b"no pickle")
    assert kept.find("key") is None
    assert "a kept Program cannot be read" in caplog.text
    assert list(own_folder.iterdir()) == []


def test_functions_and_shards_are_not_kept_and_each_config_has_a_key_of_its_own(tmp_path: Path) -> None:
    kept = KeptPrograms("one")
    kept.store("key", lambda: None)
    assert kept.find("key") is None
    about = [prepare(tmp_path, *changes)._kept("step") for changes in ([], ["optimizer.adam.lr=0.02"])]
    assert len({kept.about for kept in about if kept is not None}) == 2
    assert prepare(tmp_path, "data.shards=2")._kept("step") is None
