"""Kernels from outside the package: registered by primitive name, with sources at absolute paths."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_examples import EXAMPLES
from waiting import PATIENCE

from adtrain import ops
from adtrain.backends.cpu.compiled_program import CompiledProgram, _lower
from adtrain.backends.cuda import H200, compiler
from adtrain.backends.cuda.compiler import CudaCompilerError
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.array import array
from adtrain.core.kernel import CKernel, CudaKernel, CudaLaunch, register
from adtrain.core.primitive import Primitive
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType

numbers = itertools.count()

C = """
#include "common.h"
#include "own.h"
void FN(scaled)(const T *x, T *out, int64_t length) {
    for (int64_t i = 0; i < length; i++) out[i] = FACTOR * x[i];
}
"""
CUDA = """
#include "common/common.cuh"
KERNEL scaled(const T *x, T *out, int64_t count) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < count; i += grid_size()) out[i] = 3 * x[i];
}
"""


def scaled() -> Primitive:
    """A new primitive, 3 x, without kernels."""
    return Primitive(f"scaled_{next(numbers)}", lambda x: ArrayType(x.shape, x.dtype), lambda x: 3 * x, axes="*->*")


def program(primitive: Primitive, x: np.ndarray) -> Any:
    return stage(lambda x: bind(primitive, x)).program(array(x))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("by_item", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_c_kernel_at_an_absolute_path_is_compiled_and_run(tmp_path: Path, dtype: str, by_item: bool) -> None:
    file, primitive = tmp_path / "scaled.c", scaled()
    file.write_text(C)
    (tmp_path / "own.h").write_text("#define FACTOR 3\n")
    x = np.arange(12, dtype=dtype).reshape(3, 4)
    kernel = CKernel(str(file), "scaled", lambda x: (x.size,), items=by_item)
    register(primitive.name, "cpu", kernel)
    compiled = CompiledProgram(program(primitive, x))
    assert [run.name for runs in compiled.kernels for run in runs] == [f"scaled_{dtype}"]
    (out,), _ = compiled.run([x])
    np.testing.assert_array_equal(out, 3 * x)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_header_beside_the_source_may_change(tmp_path: Path) -> None:
    file, primitive = tmp_path / "scaled.c", scaled()
    file.write_text(C)
    register(primitive.name, "cpu", CKernel(str(file), "scaled", lambda x: (x.size,)))
    x = np.arange(4, dtype="float32")
    for factor in (3, 5):
        (tmp_path / "own.h").write_text(f"#define FACTOR {factor}\n")
        (out,), _ = CompiledProgram(program(primitive, x)).run([x])
        np.testing.assert_array_equal(out, factor * x)


def test_only_calls_of_a_users_kernel_are_guarded(tmp_path: Path) -> None:
    file, x = tmp_path / "scaled.c", np.ones((3, 4), np.float32)
    (tmp_path / "own.h").write_text("#define FACTOR 3\n")
    file.write_text(C)
    plain, primitive = stage(lambda x: ops.softmax(x @ x.T)).program(array(x)), scaled()
    register(primitive.name, "cpu", CKernel(str(file), "scaled", lambda x: (x.size,)))
    texts = [_lower(p).generated.text for p in (plain, program(primitive, x))]
    assert ["own_call.h" in text for text in texts] == [False, True]
    assert [text.count("own_begin(") for text in texts] == [0, 1]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("statement", "code"), [("*(volatile char *)16 = 1;", 16), ("raise(SIGSEGV);", 0)])
def test_a_handler_that_another_library_installed_gets_the_signal_with_its_address(
    tmp_path: Path, statement: str, code: int
) -> None:
    (tmp_path / "main.c").write_text(
        f"""
#include <stdint.h>
#include <string.h>
#include <signal.h>
#include <unistd.h>
static void handler(int number, siginfo_t *info, void *context) {{
    _exit(info->si_code > 0 ? (int)(intptr_t)info->si_addr : 0);
}}
static __attribute__((constructor(101))) void install(void) {{
    struct sigaction action = {{.sa_sigaction = handler, .sa_flags = SA_SIGINFO}};
    sigaction(SIGSEGV, &action, NULL);
}}
#include "own_call.h"
int main(void) {{
    own_begin("found ");
    {statement}
    own_end();
    return 1;
}}
"""
    )
    include, output = Path(__file__).parents[1] / "kernels/cpu", tmp_path / "main"
    subprocess.run(["cc", "-std=gnu11", f"-I{include}", tmp_path / "main.c", "-o", output], check=True)
    done = subprocess.run([output], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code
    assert done.stderr.startswith("found SIGSEGV; ")


def test_a_cuda_kernel_at_an_absolute_path_is_planned_and_compiled(tmp_path: Path) -> None:
    file, primitive = tmp_path / "scaled.cu", scaled()
    file.write_text(CUDA)
    register(
        primitive.name,
        "cuda",
        lambda target, x: [CudaKernel((CudaLaunch(str(file), "scaled", (x.size,), (x.dtype,), elements=x.size),))],
    )
    (equation,) = program(primitive, np.ones((3, 4), np.float32)).equations
    (plan,) = Lowering(H200).launches(equation)
    assert isinstance(plan, LaunchPlan)
    assert (plan.name, plan.operands, plan.numbers, plan.size.elements) == ("scaled", (0, 1), (12,), 12)
    assert CUDA in plan.source.text
    try:
        assert b"scaled" in compiler.compile_source(plan.source, "90a").cubin
    except CudaCompilerError as error:
        if "cannot be loaded" not in str(error):
            raise
        pytest.skip(str(error))


def test_the_example_computes_sums_of_squares_and_their_gradient() -> None:
    """In a process of its own, because the operation stays registered."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / "own_kernel.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "30.0 [[2.0, 4.0], [6.0, 8.0]]\n", "")
