"""Programs that another process has cached run as if they were traced again; nothing foreign or damaged is used."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_samples import for_gpu
from training_runs import prepare

from adtrain import array, config, grad, ops
from adtrain.backends.cpu import compiled_program
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import Plan
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.cache import open_cache
from adtrain.core import tree
from adtrain.core.memory import poisoned
from adtrain.core.staging import Staged, stage
from adtrain.passes import ALL
from adtrain.training import program_cache
from adtrain.training.preparation import outline
from adtrain.training.program_cache import PersistentProgramCache


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "adtrain" / program_cache.KIND


RESULT = tree.flatten({"loss": 1.0, "state": (2.0, None)})[1]


def stored(cache: PersistentProgramCache) -> Any:
    found = cache.find("key")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("mlp", []), ("resnet", []), ("cnn", ["training.precision=bfloat16"])],
    ids=["mlp", "resnet", "bfloat16"],
)
def test_a_cached_program_has_the_stored_kernels_and_memory_plan(name: str, overrides: list[str]) -> None:
    program, lowering = for_gpu(outline(config.load(name, overrides)).step_program(passes=())), Lowering(H200)
    layout = Layout(program, lowering)
    placed = dict.fromkeys(step.equation for steps, _ in layout.runs(2) for step in steps)
    cache = PersistentProgramCache(name)
    kept = layout, {e: Plan(lowering.launches(e), lowering.scratch(e)) for e in placed}
    cache.store("key", program, RESULT, kept)
    found, result, (places, plans) = stored(cache)
    assert result == RESULT
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


def test_a_cached_program_is_not_traced_again(own_folder: Path) -> None:
    factor, x, calls = array(np.arange(6.0)), array(np.linspace(0, 1, 6)), list[int]()

    def f(x: Any) -> Any:
        calls.append(1)
        return ops.sum(ops.tanh(x) * factor)

    def staged(name: str) -> Staged:
        calls.clear()
        return stage(f, ALL, cache=PersistentProgramCache(name))

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


@pytest.mark.compiled
def test_a_cached_program_is_not_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = array(np.linspace(0, 1, 6))

    def run() -> float:
        result: float = stage(ops.mean, ALL, cache=PersistentProgramCache("one"))(x).item()
        return result

    expected = run()
    with monkeypatch.context() as patch:
        patch.setattr(compiled_program, "_lower", None)
        assert run() == expected
    with poisoned():
        assert run() == expected


LAUNCHES = """
import numpy as np
from adtrain import array, ops
from adtrain.core.staging import stage
from adtrain.passes import ALL
from adtrain.training.program_cache import PersistentProgramCache

def f(x):
    print("traced")
    return ops.exp(x)

executable = stage(f, ALL, cache=PersistentProgramCache("f")).compile(array(np.ones(6)))
print(executable.kernels[0][0].launch["threads"])
"""


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_a_cached_program_runs_with_another_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, printed in {"1": ["traced", "1"], "2": ["2"]}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        process = subprocess.run([sys.executable, "-c", LAUNCHES], capture_output=True, text=True, check=True)
        assert process.stdout.split() == printed


def test_the_key_holds_the_state_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "asset_path", lambda name: tmp_path)
    digests = {program_cache.source_digest.__wrapped__()}
    for text in ("1", "12"):
        (tmp_path / "kernel.c").write_text(text)
        digests.add(program_cache.source_digest.__wrapped__())
    assert len(digests) == 3


def test_programs_are_not_cached_while_memory_is_poisoned(own_folder: Path) -> None:
    with poisoned():
        stage(ops.tanh, ALL, cache=PersistentProgramCache("one"))(array(np.arange(6.0)))
    assert not own_folder.exists()


KEYS = """
from adtrain import config
from adtrain.training.preparation import outline
made = {x: config.load(x).data for x in config.packaged()}
names = [x for x, data in made.items() if data.path is data.measurements is data.sdf is None]
experiments = [outline(config.load(name)) for name in names]
print([x._program_cache(part).function_key for x in experiments for part in ("step", "evaluation")])
"""


@pytest.mark.exhaustive
def test_processes_have_the_same_keys() -> None:
    run = partial(subprocess.run, [sys.executable, "-c", KEYS], capture_output=True, text=True, check=True)
    first, second = run().stdout, run().stdout
    assert first == second
    assert len(set(ast.literal_eval(first))) == len(ast.literal_eval(first)) > 10


def mark(name: str, document: bytes) -> bytes:
    return program_cache._mark(name, document) + b"\n" + document


BAD: dict[str, Any] = {
    "nothing": lambda name, content: b"",
    "a pickle": lambda name, content: pickle.dumps(5),
    "text": lambda name, content: b"no JSON",
    "cut": lambda name, content: content[: len(content) // 2],
    "another digest": lambda name, content: content.replace(b"exp", b"log"),
    "of another key": lambda name, content: mark("0" * 40, content.partition(b"\n")[2]),
    "an empty document": lambda name, content: mark(name, b""),
    "another JSON": lambda name, content: mark(name, b"[1, 2, 3]"),
    "deep JSON": lambda name, content: mark(name, b"[" * 100_000),
    "an unknown operation": lambda name, content: mark(name, content.partition(b"\n")[2].replace(b'"exp"', b'"exq"')),
    "a class of another module": lambda name, content: mark(
        name, content.partition(b"\n")[2].replace(b'"adtrain.core.tree","TreeDef"', b'"subprocess","Popen"')
    ),
    "a class without its fields": lambda name, content: mark(
        name, content.partition(b"\n")[2].replace(b'"children","data"', b'"children"')
    ),
    "no Program": lambda name, content: mark(name, program_cache.encoded((1, RESULT, None))),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_entry_is_deleted_and_written_again(bad: str, own_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = array(np.linspace(0, 1, 6))

    def run() -> list[float]:
        found: list[float] = stage(lambda x: ops.exp(x), ALL, cache=PersistentProgramCache("one"))(x).numpy().tolist()
        return found

    expected = run()
    (path,) = own_folder.iterdir()
    name, content = path.name.partition(".")[0], path.read_bytes()
    path.unlink()
    open_cache(program_cache.KIND).store(name, program_cache.SUFFIX, BAD[bad](name, content))
    assert run() == expected
    assert "a cached Program cannot be read" in caplog.text
    assert [x.read_bytes() for x in own_folder.iterdir()] == [content]


class Kind(Enum):
    A = 1


def test_a_value_is_written_and_read() -> None:
    value = (
        None,
        True,
        -7,
        2**70,
        0.1,
        float("inf"),
        "ä" * 50,
        [1, (2,)],
        {1: {2.5}},
        frozenset([3]),
        np.dtype("int8"),
    )
    found = program_cache.decoded(program_cache.encoded(value))
    assert repr(found) == repr(value)


@pytest.mark.parametrize("value", [lambda: None, Kind.A, object(), b"bytes"], ids=["lambda", "enum", "object", "bytes"])
def test_an_object_that_is_not_of_the_package_is_not_written(value: Any) -> None:
    with pytest.raises(TypeError):
        program_cache.encoded(value)


def test_trainings_from_other_seeds_share_their_programs(tmp_path: Path) -> None:
    augment = "data.augment=[{flip: {alternate: true}}, {noise: 0.1}]"
    dropout = "[flatten, {linear: 8}, {dropout: 0.5}, {linear: 3}]"
    steps = [prepare(tmp_path, augment, f"training.seed={seed}", layers=dropout) for seed in (0, 1)]
    keys = [experiment._program_cache(name) for experiment in steps for name in ("step", "evaluation")]
    assert len({x.function_key for x in keys if x is not None}) == 2
    first, second = (experiment.step_program() for experiment in steps)
    assert str(first) == str(second)
    for one, other in zip(first.constants.values(), second.constants.values(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_values_that_the_key_does_not_cover_are_not_cached(tmp_path: Path) -> None:
    cache = PersistentProgramCache("one")
    program = stage(ops.exp).program(array(1.0))
    cache.store("key", program, RESULT, lambda: None)
    assert cache.find("key") is None
    cache.store(object(), program, RESULT, None)
    assert cache.find(object()) is None
    caches = [prepare(tmp_path, *changes)._program_cache("step") for changes in ([], ["optimizer.adam.lr=0.02"])]
    assert len({x.function_key for x in caches if x is not None}) == 2
    assert prepare(tmp_path, "data.shards=2")._program_cache("step") is None
