"""Plug-ins for tests, commands on them, and fixtures: a folder for them, and the removal of what they register."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import invoke
from training_runs import TEXT, write_config

from adtrain import plugins, register
from adtrain.config.specs import FAMILIES
from adtrain.core import kernel as registry
from adtrain.core.primitive import PRIMITIVES
from adtrain.custom_ops import OWN_OPS

LAYER = """\
import adtrain as ad
from adtrain.option_types import Positive


@ad.register.layer("mish")
class Mish(ad.nn.Module):
    beta: Positive = 1.0

    def output_shape(self, shape):
        return shape

    def forward(self, params, state, x, mode):
        return x * ad.ops.tanh(ad.ops.softplus(self.beta * x)), state
"""


@contextmanager
def forgetting() -> Iterator[None]:
    """Removes after a `with` block what plug-ins have registered in it."""
    before = {name: dict(family) for name, family in FAMILIES.items()}
    tables: list[tuple[Any, Any]] = [(table, dict(table)) for table in (plugins._loaded, register._defined, OWN_OPS)]
    primitives = set(PRIMITIVES)
    yield
    for name, family in before.items():
        FAMILIES[name].clear()
        FAMILIES[name].update(family)
    for table, old in tables:
        table.clear()
        table.update(old)
    for name in set(PRIMITIVES) - primitives:
        del PRIMITIVES[name]
        registry.forget(name)


@pytest.fixture
def no_plugins() -> Iterator[None]:
    """Removes what the plug-ins of a test have registered."""
    with forgetting():
        yield


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: object, expect: int = 0) -> str:
    """Run the command in this process; returns its stdout, or its one line of stderr for an error."""
    result = invoke(*arguments)
    assert result.exit_code == expect, result.output
    if expect == 0:
        return result.stdout
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("adtrain: ")]
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("adtrain: error: ")


def train(cfg: object, *more: object, expect: int = 0) -> str:
    return call("train", cfg, "--device", "cpu", "--epochs", 1, *more, expect=expect)


def write_plugged(folder: Path, layer: str = "mish: {beta: 1.5}", text: str = LAYER) -> Path:
    """Write a config that names the plug-in mine.py and has `layer` as its second; returns the config's path."""
    (folder / "mine.py").write_text(text)
    named = TEXT.replace("data:", "plugins: [mine.py]\ndata:", 1)
    return write_config(folder, named.replace("- relu", f"- {layer}"))


OPERATION = """
import numpy as np

doubled = ad.custom_op(
    "doubled",
    shape=lambda x: ad.ArrayType(x.shape, x.dtype),
    numpy=lambda x: x + x,
    vjp=lambda ct, out, x: (2.0 * ct,),
)

@ad.register.layer("doubled")
class Doubled(ad.nn.ReLU):
    def forward(self, params, state, x, mode):
        return doubled(x), state
"""
"""A layer that computes an operation of the plug-in, to be appended to LAYER."""

SQUARED = '''
import numpy as np
import adtrain as ad

KERNEL = """{kernel}"""
squared = ad.custom_op(
    "squared",
    shape=lambda x: ad.ArrayType(x.shape, x.dtype),
    numpy=lambda x: x * x,
    {language}=KERNEL,
    vjp=lambda ct, out, x: (2.0 * ct * x,),
    samples=lambda rng: (rng.normal(size=7),),
)
'''
"""An operation with a kernel of its own."""


def gradcheck(folder: Path, text: str, *options: str) -> Result:
    """What `adtrain gradcheck` says of the plug-in mine.py with this text."""
    (folder / "mine.py").write_text(text)
    return invoke("gradcheck", *options, "--plugin", str(folder / "mine.py"))
