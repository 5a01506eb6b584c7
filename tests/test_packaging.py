from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import adtrain
from adtrain import files
from adtrain.core.errors import AdtrainError

CHECKOUT = Path(__file__).parents[1]
LOADED_WHEN_USED = {
    "pycuda",
    "cuda",
    "nvmath",
    "cudnn",
    "torch",
    "tensorboard",
    "tokenizers",
    "onnx",
    "onnxruntime",
    "pandas",
    "PIL",
    "resvg_py",
    "matplotlib",
    "mpi4py",
    "nccl",
    "scipy",
}


@cache
def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys; print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_importing_the_package_loads_no_optional_library() -> None:
    modules = modules_after("import adtrain; dir(adtrain)")
    assert not {name.split(".")[0] for name in modules} & (LOADED_WHEN_USED | {"click", "tqdm", "pydantic", "yaml"})
    assert not modules & {"adtrain.api", "adtrain.config", "adtrain.data", "adtrain.training"}


def test_importing_the_package_loads_no_numpy_and_every_public_name_is_found() -> None:
    assert not {"numpy", "adtrain.core.array", "adtrain.ops"} & modules_after("import adtrain; dir(adtrain)")
    assert all(hasattr(adtrain, name) for name in adtrain.__all__)
    assert (callable(adtrain.jit), callable(adtrain.custom_op)) == (True, True)


def modules_of(arguments: tuple[str, ...]) -> set[str]:
    """The modules that a command has loaded at its end."""
    return modules_after(f"""
from adtrain.cli.main import cli
try:
    cli.main({list(arguments)!r})
except SystemExit:
    pass""")


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("train", "no-such-config")])
def test_help_and_an_unknown_config_name_load_no_config_language(arguments: tuple[str, ...]) -> None:
    assert not {"pydantic", "yaml", "adtrain.nn", "adtrain.training.experiment"} & modules_of(arguments)


@pytest.mark.parametrize("setting", ["trainig.epochs=3", "data.lable=x", "model.layers.0.linear.outs=3"])
def test_a_setting_of_an_unknown_key_loads_no_class_of_the_config(setting: str) -> None:
    modules = modules_of(("train", "mlp", "--set", setting))
    assert not {"pydantic", "adtrain.core.array", "adtrain.data", "adtrain.nn", "adtrain.optim"} & modules


def test_a_training_on_a_gpu_loads_no_cpu_backend() -> None:
    modules = modules_after("from adtrain import config; config.load('mlp'); import adtrain.cli.train_run")
    assert not {"adtrain.backends.cpu.cpu_backend", "adtrain.lowering.cpu", "adtrain.codegen", "tqdm"} & modules


FIRST = ("passes", "lowering.cpu", "codegen", "backends.cpu", "core.vmap", "custom_ops", "jitted")


@pytest.mark.exhaustive
def test_packages_below_ops_can_be_imported_before_it() -> None:
    """Each one first, in a child of a process that has imported NumPy. Operators find the operations that they need."""
    code = f"""
import importlib, os, sys
import numpy
for name in {FIRST}:
    child = os.fork()
    if not child:
        importlib.import_module(f"adtrain.{{name}}")
        from adtrain.core.array import array
        assert float(array(1.0) + 1) == 2
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "", done.stderr


def test_training_is_a_name_of_the_package_and_needs_no_optional_library() -> None:
    loaded = {name.split(".")[0] for name in modules_after("import adtrain; adtrain.train, adtrain.load, adtrain.save")}
    assert not loaded & (LOADED_WHEN_USED | {"click", "tqdm"})
    assert {"train", "load", "save"} <= set(adtrain.__all__)
    assert dir(adtrain) == sorted([*adtrain.__all__, "__version__"])


def test_importing_the_commands_loads_no_optional_library() -> None:
    commands = ", ".join(f"adtrain.cli.{name}" for name in ("train", "report", "compare", "export", "data"))
    assert not {name.split(".")[0] for name in modules_after(f"import {commands}")} & LOADED_WHEN_USED


def test_help_imports_no_commands_module() -> None:
    loaded = modules_after("from adtrain.cli.main import cli\ntry: cli(['--help'])\nexcept SystemExit: pass")
    own = {name.removeprefix("adtrain.cli.") for name in loaded if name.startswith("adtrain.cli.")}
    assert own == {"main", "output"}
    assert not loaded & {"pydantic", "yaml", "tqdm", "adtrain.config", "adtrain.training", "adtrain.bench"}


def test_the_installed_version_equals_the_packages_version() -> None:
    try:
        installed = importlib.metadata.version("adtrain")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("adtrain runs from a checkout that is not installed")
    assert installed == adtrain.__version__


@pytest.mark.parametrize("folder", get_args(files.Folder))
def test_packaged_folders_are_complete(folder: files.Folder) -> None:
    def inside(root: Path) -> set[str]:
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}

    assert inside(files.asset_path(folder)) == inside(CHECKOUT / folder) != set()


def test_assets_inside_the_package_take_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "adtrain")
    with pytest.raises(AdtrainError, match="the folder configs/ is missing"):
        files.asset_path("configs")
    (tmp_path / "configs").mkdir()
    assert files.asset_path("configs") == tmp_path / "configs"
    (tmp_path / "adtrain/_assets/configs").mkdir(parents=True)
    assert files.asset_path("configs") == tmp_path / "adtrain/_assets/configs"
