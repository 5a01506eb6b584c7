"""CUDA kernels run on the CPU, thread by thread, by a C++ compiler: what they compute, in an order of the threads."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from math import prod
from pathlib import Path

import numpy as np
import pytest

from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.compiler import KERNEL, NOT_COMPILED, Source
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.cache import Cache, digest
from adtrain.core.kernel import CudaKernel, Target, TensorMap
from adtrain.core.program import Equation, Program
from adtrain.files import asset_path
from adtrain.passes.plan_memory import stored_bytes

FLAGS = (
    "-std=c++17", "-nostdinc++", "-Og", "-ffp-contract=off", "-fno-exceptions", "-fno-asynchronous-unwind-tables",
    "-fno-gnu-unique", "-U_FORTIFY_SOURCE", "-w", "-fPIC",
)  # fmt: skip
"""With -Og, g++ takes less time than with -O1 or -O0. Libraries do not share static variables of templates, which may
have other sizes."""
LIBRARIES = ("-nostdlib", "-lgcc", "-lm", "-lc")
"""Without the C++ library, which no kernel needs."""
HERE = Path(__file__).parent / "cuda_host"
THREADS = HERE / "threads.cpp"
SHARED = "extern __shared__ __align__(16) unsigned char shared_bytes[];"
OWN_SHARED = re.compile(r"extern __shared__ __align__\(16\) (\w+) (\w+)\[\];")
"""The same in a kernel, by a name of its own."""
PACKED = "Word word = 0;"
PRODUCT = "__trap(); // no candidate on such a device"
"""In the files PATCHED, and in `gemm/mma.cuh`: what `host.h` has instead."""
PATCHED = (
    *("attention/attention.cuh", "common/block_ops.cuh", "gemm/layer_backward.cuh", "gemm/streamed_layer.cuh"),
    "gemm/row_chain.cuh",
    "gemm/tile.cuh",
    "reduce/column_sum.cuh",
    "common/warp_items.cuh",
)
MAP_BYTES = 128
"""Of a tensor map, and its alignment."""
NUMBERS = {"CONV_NUMBERS": 8}
"""Parameters that a macro of `conv/implicit_gemm.cu` stands for."""


@cache
def version(compiler: str) -> str:
    """What a compiler says of itself."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


class Host:
    """Compiles and runs the kernels that are chosen for a target.

    Args:
        folder: takes the sources.
        compiled: takes compiled code, which later tests reuse.
        flags: of the compiler, after FLAGS.

    Attributes:
        thread_order: the order in which threads take turns. See `host.h`.
        environment: a digest of all that compiled code depends on, except its own source and macros.
    """

    def __init__(self, folder: Path, compiled: Cache, target: Target = H200, flags: Sequence[str] = ()) -> None:
        self.folder, self.compiled, self.flags = folder, compiled, (*FLAGS, *flags)
        self.lowering = Lowering(target)
        self.thread_order = 0
        compiler = shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            pytest.skip("there is no C++ compiler")
        self.compiler = compiler
        root = asset_path("kernels") / "cuda"
        for source in root.rglob("*.cu*"):
            name = source.relative_to(root).as_posix()
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(self._patched(name, source.read_text()))
        shutil.copytree(HERE, folder, dirs_exist_ok=True)
        headers = [path.read_text() for path in sorted(folder.rglob("*.*h"))]
        self.environment = digest(version(compiler), *self.flags, *LIBRARIES, *headers, THREADS.read_text())

    @staticmethod
    def _patched(name: str, text: str) -> str:
        if name == "gemm/mma.cuh":
            assert text.count(PACKED) == text.count(PRODUCT) == 1
            text = text.replace(PRODUCT, "multiply_bfloat16(c0, c1, c2, c3, {a0, a1, a2, a3, b0, b1});")
            return text.replace(PACKED, "Word word = rounded_pair(low, high);")
        return text.replace(SHARED, "") if name in PATCHED else text

    def computed(
        self,
        equation: Equation,
        kernel: CudaKernel | None,
        arrays: Sequence[np.ndarray],
        runs: int = 1,
        overwritten: Mapping[int, int] | None = None,
    ) -> list[np.ndarray]:
        """The outputs of the equation by this candidate, or as a Program runs it, in memory that was NaN before.

        `runs` are those of a launch that computes several. An output whose number is in `overwritten` has the memory of
        the array with the number there.
        """
        sizes = [stored_bytes(v) for v in equation.outputs]
        outputs = [
            np.full(size, 0xFF, np.uint8).view(v.type.dtype).reshape(v.stored.shape)
            for size, v in zip(sizes, equation.outputs, strict=True)
        ]
        for output, argument in (overwritten or {}).items():
            outputs[output] = arrays[argument]
        memory = np.full(max(self.lowering.scratch(equation, kernel), 1), 0xFF, np.uint8)
        launches = [task for task in self.lowering.launches(equation, kernel) if isinstance(task, LaunchPlan)]
        libraries = self._libraries(launches)
        for task in launches:
            self._run(task, libraries[task.source], [*arrays, *outputs], memory, runs)
        return outputs

    def _run(
        self, task: LaunchPlan, library: ctypes.CDLL, operands: Sequence[np.ndarray], memory: np.ndarray, runs: int
    ) -> None:
        pointers = (ctypes.c_void_p * len(task.operands))(*(operands[i].ctypes.data for i in task.operands))
        bits = [np.float64(n).view(np.int64) if isinstance(n, float) else n for n in task.numbers]
        bits += [runs] * task.repeats
        numbers = (ctypes.c_int64 * len(bits))(*map(int, bits))
        grid, threads = (task.size.blocks, task.size.threads) if task.size.threads else ((4, 1, 1), 128)
        ctypes.c_uint.in_dll(library, "thread_order").value = self.thread_order
        maps = b"".join(tensor_map(x, operands[x.operand]) for x in task.maps)
        aligned = np.zeros(len(maps) + MAP_BYTES, np.uint8)
        aligned = aligned[-aligned.ctypes.data % MAP_BYTES :][: len(maps)]
        aligned[:] = np.frombuffer(maps, np.uint8)
        arguments = (aligned.ctypes.data, memory.ctypes.data)
        library[f"go_{task.name}"](*grid, threads, pointers, numbers, *map(ctypes.c_void_p, arguments))

    def _libraries(self, launches: Sequence[LaunchPlan]) -> Mapping[Source, ctypes.CDLL]:
        """That of each source; compiled on two cores.

        Kernels of one file are compiled together, because what they share takes most of the time; but not those whose
        blocks wait for one another.
        """
        files: dict[tuple[Source, str], dict[str, LaunchPlan]] = {}
        for task in launches:
            whole = task.source._replace(text=task.source.text.replace(NOT_COMPILED, "KERNEL"))
            files.setdefault((whole, task.name if task.cooperative else ""), {})[task.name] = task
        with ThreadPoolExecutor(2) as pool:
            paths = pool.map(self._library, [whole for whole, _ in files], files.values())
            libraries: dict[Source, ctypes.CDLL] = {}
            for tasks, path in zip(files.values(), paths, strict=True):
                libraries |= dict.fromkeys((task.source for task in tasks.values()), ctypes.CDLL(str(path)))
            return libraries

    def _library(self, source: Source, kernels: Mapping[str, LaunchPlan]) -> Path:
        """Of a file of which only these kernels are compiled."""
        text = KERNEL.sub(lambda found: "KERNEL" if found[1] in kernels else NOT_COMPILED, source.text)
        together = [prod(task.size.blocks) for task in kernels.values() if task.cooperative]
        return self._compiled(source._replace(text=text), list(map(self._entry, kernels.values())), *together)

    def library(self, source: Source, entries: Sequence[str], together: int) -> ctypes.CDLL:
        """A source with functions that run its kernels. ``together`` blocks run at the same time."""
        return ctypes.CDLL(str(self._compiled(source, entries, together)))

    def _compiled(self, source: Source, entries: Sequence[str], *together: int) -> Path:
        macros = [option for option in source.options if option.startswith("-D")]
        macros += [f"-DTOGETHER={blocks}" for blocks in together]
        kernel_text = OWN_SHARED.sub(r"\1 *const \2 = (\1 *)shared_bytes;", source.text.replace(SHARED, ""))
        text = "\n".join(['#include "host.h"', kernel_text, "static int bad;", *entries])
        key = digest(self.environment, *macros, text)
        if library := self.compiled.find(key, ".so"):
            return library
        path = self.folder / f"{key}.cpp"
        path.write_text(text)
        output = path.with_suffix(".so")
        self._compile([*self.flags, *macros, "-shared", str(path), str(self._threads), *LIBRARIES, "-o", str(output)])
        return self.compiled.store(key, ".so", output.read_bytes())

    @cached_property
    def _threads(self) -> Path:
        """What runs the threads, the same for all kernels."""
        key = digest(self.environment)
        if found := self.compiled.find(key, ".o"):
            return found
        output = self.folder / "threads.o"
        self._compile([*FLAGS, "-O2", "-c", str(THREADS), "-o", str(output)])
        return self.compiled.store(key, ".o", output.read_bytes())

    def _compile(self, arguments: Sequence[str]) -> None:
        made = subprocess.run(
            [self.compiler, f"-I{self.folder}", *arguments], capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr[:2000]

    @staticmethod
    def _entry(task: LaunchPlan) -> str:
        """A function that runs the kernel with arguments from arrays."""
        found = re.search(rf"KERNEL[^{{;]*?\b{task.name}\(([^{{]*?)\)\s*\{{", task.source.text)
        assert found is not None, task.name
        macros = re.findall(r"-D(\w+)=([01])\b", " ".join(task.source.options))
        false = {name if value == "0" else f"!{name}" for name, value in macros}
        conditional = re.compile(r"#if ([^\n]*)\n(.*?)#endif", re.DOTALL)
        present = conditional.sub(lambda part: "" if false & {*part[1].split(" && ")} else part[2], found.group(1))
        present = re.sub(r"\bIF\((\w+),(.*?)\)", lambda part: "" if part[1] in false else part[2], present)
        text = re.sub(r"#\w.*", "", present)
        joined = task.source.text.replace("\\\n", " ")
        for macro, value in re.findall(r"^#define (\w+) +(int64_t .*)", joined, re.MULTILINE):
            text = re.sub(rf"\b{macro}\b", value, text)
        parameters = [p.strip() for p in text.split(",") if p.strip()]
        args, pointers, numbers = [], 0, 0
        for parameter in parameters:
            if "Maps" in parameter:
                args.append("*(Maps *)maps")
            elif "Factors" in parameter:
                args.append(f"*(Factors *)(pointers + {pointers})")
                (products,) = re.findall(r"-DPRODUCTS=(\d+)", " ".join(task.source.options))
                pointers += 2 * int(products)
            elif "Epilogue" in parameter:
                args.append(f"*({parameter.split()[-2]} *)(pointers + {pointers})")
            elif "Shapes" in parameter:
                args.append(f"*(Shapes *)(numbers + {numbers})")
                numbers += len(task.numbers) - 2
            elif parameter.split()[0] == "Argument":
                args.append(f"*(Argument *)(pointers + {pointers})")
                pointers += len(task.operands) - 1
            elif parameter == "const Parts parts":
                args.append(f"*(Parts *)(pointers + {pointers})")
                pointers += len(task.operands) - 1
            elif parameter.startswith("const Terms"):
                args.append(f"*(Terms *)(pointers + {pointers})")
                pointers += sum(int(n) for n in re.findall(r"-DTERMS=(\d)", " ".join(task.source.options)))
            elif parameter.startswith("const Starts"):
                args.append(f"*(Starts *)(numbers + {numbers})")
                numbers += len(task.operands)
            elif "scratch" in parameter:
                args += ["scratch"] * task.scratch
            elif parameter.endswith("bad"):
                args.append("&bad")
            elif "*" in parameter:
                args.append(f"({parameter.rpartition('*')[0]} *)pointers[{pointers}]")
                pointers += 1
            elif parameter.startswith("double"):
                args.append(f"*(double *)(numbers + {numbers})")
                numbers += 1
            else:
                count = NUMBERS.get(parameter, 1)
                args += [f"numbers[{i}]" for i in range(numbers, numbers + count)]
                numbers += count
        given = "int x, int y, int z, int threads, void **pointers, int64_t *numbers, char *maps, char *scratch"
        body = f"run({{(unsigned)x, (unsigned)y, (unsigned)z}}, threads, [=] {{ {task.name}({', '.join(args)}); }});"
        return f'extern "C" void go_{task.name}({given}) {{ {body} }}\n'


def tensor_map(described: TensorMap, array: np.ndarray) -> bytes:
    """The struct TensorMap of `cuda_host/sm90/tma.cuh`."""
    columns, rows, matrices, *images = described.lengths
    across, box_rows, *box_matrices = described.box
    moves = described.im2col or ((0, 0), (0, 0), (0, 0))
    box = box_rows, array.itemsize, *(box_matrices or [1]), across
    numbers = columns, rows, matrices, *box, *(images or [0]), *moves[0], *moves[1], *moves[2]
    return struct.pack("P14i", array.ctypes.data, *numbers).ljust(MAP_BYTES, b"\0")


def assert_same_in_another_order(
    host: Host, results: Callable[[], Sequence[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> Sequence[np.ndarray]:
    """Assert that the bytes of results do not depend on the order of threads. Return the results."""
    expected = results()
    monkeypatch.setattr(host, "thread_order", 1)
    for x, y in zip(results(), expected, strict=True):
        assert x.tobytes() == y.tobytes()
    return expected


def check_kernels(program: Program, arrays: Sequence[np.ndarray], host: Host, form: str, tolerance: float) -> int:
    """Compare each kernel of a form with NumPy on the same arguments. Return their number.

    Args:
        tolerance: of the norm of the difference over the norm.
    """
    known = dict(zip(program.inputs, arrays, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    kernels = 0
    for e in program.equations:
        own = [known[v] for v in e.inputs]
        expected = NumpyProgram(Program(e.inputs, {}, (e,), e.outputs)).run(own)[0]
        known |= dict(zip(e.outputs, map(np.asarray, expected), strict=True))
        if e.form == form:
            kernels += 1
            for v, found in zip(e.outputs, host.computed(e, None, own), strict=True):
                error = np.linalg.norm(np.subtract(found, known[v], dtype=np.float64))
                most = tolerance * np.linalg.norm(known[v].astype(np.float64))
                assert error <= most, f"{e.params['body']}"
    return kernels


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, emulated_code: Cache) -> Host:
    """Emulates the TARGET of the test file, or an H200."""
    return Host(tmp_path_factory.mktemp("host"), emulated_code, getattr(request.module, "TARGET", H200))
