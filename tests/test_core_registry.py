"""The registry of kernels, and the example of `adtrain.extend`."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import extend
from adtrain.backends.cpu.compiled_program import CompiledProgram
from adtrain.backends.cuda import H200
from adtrain.core import kernel as registry
from adtrain.core.kernel import CKernel
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.staging import stage


@pytest.fixture
def example(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The names that the docstring's example defines, with its sources in a temporary folder."""
    text = "\n".join(line for line in (extend.__doc__ or "").splitlines() if line.startswith("    ") or not line)
    text = textwrap.dedent(text).replace("/path/to", str(tmp_path))
    for file, source in re.findall(r"^# (\S+):\n((?:#     .*\n)+)", text, re.MULTILINE):
        Path(file).write_text(re.sub(r"^#     ", "", source, flags=re.MULTILINE), encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text, names)
    yield names
    for table in (PRIMITIVES, registry._C_KERNELS, registry._CUDA_RULES):
        del table["triple"]


def test_the_example_has_a_derivative_and_a_kernel_for_a_gpu(example: dict[str, Any], tmp_path: Path) -> None:
    x = ad.array(np.arange(3.0))
    value, gradient = ad.value_and_grad(lambda x: example["bind"](example["triple_p"], x).sum())(x)
    assert value.item() == 9
    assert gradient.numpy().tolist() == [3, 3, 3]
    (kernel,) = registry.cuda_kernels("triple", H200, ad.ArrayType((2, 3), np.dtype("float32")))
    (launch,) = kernel.launches
    assert (launch.file, launch.numbers, launch.elements) == (str(tmp_path / "triple.cu"), (6,), 6)
    assert "KERNEL triple(const T *x" in (tmp_path / "triple.cu").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_example_runs_its_c_kernel(example: dict[str, Any]) -> None:
    x = np.arange(3.0)
    compiled = CompiledProgram(stage(lambda x: example["bind"](example["triple_p"], x)).program(ad.array(x)))
    assert [run.name for runs in compiled.kernels for run in runs] == ["triple_float64"]
    (out,), _ = compiled.run([x])
    assert out.tolist() == [0, 3, 6]


def test_kernels_are_registered_once_and_for_a_known_backend() -> None:
    kernel = CKernel("relu.c", "relu")
    with pytest.raises(ValueError, match="register: 'softmax' already has kernels for 'cpu'"):
        extend.register("softmax", "cpu", kernel)
    with pytest.raises(ValueError, match="register: found backend 'gpu', expected 'cpu' or 'cuda'"):
        extend.register("softmax", "gpu", kernel)


def test_a_primitive_without_kernels_has_none() -> None:
    assert registry.c_kernels("no_such_primitive") == ()
    assert registry.cuda_kernels("no_such_primitive", H200) == ()
