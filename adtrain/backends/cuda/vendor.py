"""Calls of NVIDIA's libraries as candidates beside kernels, where they are installed (`pip install 'adtrain[vendor]'`):
matrix products by cuBLASLt, through the bindings of nvmath-python; convolutions and their gradients by cuDNN, through
its Python front end.

A library is imported only to measure its candidates, or to run one that was measured to be the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from adtrain.backends.cuda.runtime import libraries
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.core.precision import FULL
from adtrain.core.program import Equation
from adtrain.passes.plan_memory import ALIGNMENT

CHOICES = 3
"""Candidates of a library for one problem: the algorithms that it ranks first."""

WORKSPACE = 32 << 20
"""Bytes of workspace that a call may need, in addition to a copy of each operand."""

WORKSPACE_ALIGNMENT = 256
"""Bytes that a workspace's address is a multiple of."""


class NotOffered(DeviceError):
    """The library offers fewer algorithms for the problem."""


class Plan(NamedTuple):
    """One algorithm for a problem, ready to run.

    Attributes:
        workspace: bytes of device memory that it needs.
        enqueue: puts the work on a stream, which may be captured. Arguments: the addresses of the equation's inputs and
            outputs, the address of the workspace, and the stream's handle.
    """

    workspace: int
    enqueue: Callable[[Sequence[int], int, int], object]


class Library(Protocol):
    """A library that computes some equations."""

    name: str
    """Name and version, for which measured times are valid."""

    def problem(self, equation: Equation) -> Hashable | None:
        """A key of the problem; None where the library does not compute the equation in the requested precision."""
        ...

    def plan(self, equation: Equation, choice: int) -> Plan:
        """The algorithm at position ``choice`` of the library's ranking. A problem's plans are made once.

        Raises:
            NotOffered: the ranking is shorter.
            DeviceError: the library cannot be loaded, or fails.
        """
        ...


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """A candidate for an equation: a plan of a library. See `CudaKernel` for the other kind."""

    library: Library
    equation: Equation
    choice: int

    @property
    def label(self) -> str:
        return f"{self.library.name} choice={self.choice}"

    @property
    def scratch(self) -> int:
        """Bytes of the equation's scratch: the workspace, and what it takes to align it, as scratch is aligned less."""
        workspace = self.library.plan(self.equation, self.choice).workspace
        return workspace + WORKSPACE_ALIGNMENT - ALIGNMENT if workspace else 0

    def prepare(self) -> None:
        """Make the library's plan.

        Raises:
            NotOffered: see `Library.plan`.
            DeviceError: the library cannot be loaded, or fails.
        """
        self.library.plan(self.equation, self.choice)

    def enqueue(self, addresses: Sequence[int], scratch: int, stream: int) -> None:
        """Put the work on a stream.

        Raises:
            DeviceError: the library fails.
        """
        with translated(self.library):
            workspace = -(-scratch // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
            self.library.plan(self.equation, self.choice).enqueue(addresses, workspace, stream)


def calls(equation: Equation, libraries: Sequence[Library]) -> list[LibraryCall]:
    """The candidates of the libraries for an equation."""
    if not all(v.size for v in (*equation.inputs, *equation.outputs)):
        return []
    able = [library for library in libraries if library.problem(equation) is not None]
    return [LibraryCall(library, equation, choice) for library in able for choice in range(CHOICES)]


def workspace_limit(equation: Equation) -> int:
    """The most bytes of workspace: a call may convert the layout of each operand."""
    return WORKSPACE + sum(v.nbytes for v in (*equation.inputs, *equation.outputs))


@contextmanager
def translated(library: Library) -> Iterator[None]:
    """Translates what a library's package raises to DeviceError, in one line."""
    try:
        yield
    except AdtrainError:
        raise
    except Exception as error:  # each package has errors of its own, without a common base
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"device gpu: {library.name}: {first}") from None


COMPUTE = {
    ("float32", "full"): "COMPUTE_32F",
    ("float32", "tf32"): "COMPUTE_32F_FAST_TF32",
    ("float32", "bfloat16"): "COMPUTE_32F_FAST_16BF",
    ("float64", "full"): "COMPUTE_64F",
}
"""cublasComputeType_t by element type and precision. COMPUTE_32F rounds no operand; the FAST types permit rounding."""

KINDS = {"float32": "CUDA_R_32F", "float64": "CUDA_R_64F"}
NOT_SUPPORTED = "NOT_SUPPORTED"
"""In the message of cuBLAS's error where it has no algorithm for a problem."""


class Matrices(NamedTuple):
    """Column-major matrices, as cuBLAS takes them. A row-major matrix is the transpose of one."""

    rows: int
    columns: int
    batch: int


class Gemm(NamedTuple):
    """D = op(X) op(Y), column-major. With X = B and Y = A it is C = op(A) op(B), row-major."""

    dtype: str
    compute: str
    transposed: tuple[bool, bool]
    x: Matrices
    y: Matrices
    d: Matrices


def matrices(shape: Sequence[int]) -> Matrices:
    """A row-major array of this shape, (..., m, n), as column-major matrices."""
    *batch, columns, rows = shape
    return Matrices(rows, columns, math.prod(batch))


class Cublas:
    """cuBLASLt as a source of candidates; see `Library`. Its handle, layouts and preferences are never freed."""

    def __init__(self, version: str) -> None:
        self.name = f"cublasLt {version}"
        self.plans: dict[Gemm, list[Plan]] = {}

    def problem(self, equation: Equation) -> Gemm | None:
        if equation.primitive.name != "matmul":
            return None
        (a, b), (c,), params = equation.inputs, equation.outputs, equation.params
        dtype = a.type.dtype.name
        compute = COMPUTE.get((dtype, params.get("precision", FULL)))
        if compute is None:
            return None
        transposed = (params["transpose_b"], params["transpose_a"])
        return Gemm(dtype, compute, transposed, *(matrices(v.type.shape) for v in (b, a, c)))

    def plan(self, equation: Equation, choice: int) -> Plan:
        gemm = self.problem(equation)
        assert gemm is not None
        found = self.plans.get(gemm)
        if found is None:
            with translated(self):
                found = self.plans[gemm] = self._plans(gemm, workspace_limit(equation))
        if choice >= len(found):
            raise NotOffered(f"{self.name} has {len(found)} algorithms for it")
        return found[choice]

    @cached_property
    def _bindings(self) -> tuple[Any, Any, Any]:
        from nvmath import CudaDataType
        from nvmath.bindings import cublas, cublasLt

        return cublasLt, cublas.ComputeType, CudaDataType

    @cached_property
    def _handle(self) -> int:
        return int(self._bindings[0].create())

    def _plans(self, gemm: Gemm, workspace: int) -> list[Plan]:
        lt, compute_types, kinds = self._bindings
        kind = kinds[KINDS[gemm.dtype]]
        description = lt.matmul_desc_create(compute_types[gemm.compute], kind)
        for name, transposed in zip(("TRANSA", "TRANSB"), gemm.transposed, strict=True):
            _set(lt.matmul_desc_set_attribute, description, lt.MatmulDescAttribute[name], np.int32(transposed))
        x, y, d = (self._layout(kind, each) for each in (gemm.x, gemm.y, gemm.d))
        preference = lt.matmul_preference_create()
        limits: dict[str, np.generic] = {"MAX_WORKSPACE_BYTES": np.uint64(workspace)}
        limits |= {f"MIN_ALIGNMENT_{operand}_BYTES": np.uint32(ALIGNMENT) for operand in "ABCD"}
        for name, limit in limits.items():
            _set(lt.matmul_preference_set_attribute, preference, lt.MatmulPreferenceAttribute[name], limit)
        results = np.zeros(CHOICES, lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, description, x, y, d, d, preference, CHOICES, results.ctypes.data, count.ctypes.data
            )
        except lt.cuBLASLtError as error:
            if NOT_SUPPORTED not in str(error):
                raise
        one, zero = np.ones(1, gemm.dtype), np.zeros(1, gemm.dtype)

        def plan(result: np.ndarray) -> Plan:
            size = int(result["workspace_size"][0])

            def enqueue(addresses: Sequence[int], workspace: int, stream: int) -> None:
                a, b, c = addresses
                lt.matmul(
                    self._handle, description, one.ctypes.data, b, x, a, y, zero.ctypes.data, c, d, c, d,
                    result["algo"].ctypes.data, workspace, size, stream,
                )  # fmt: skip

            return Plan(size, enqueue)

        return [plan(results[i : i + 1]) for i in range(int(count[0])) if not results["state"][i]]

    def _layout(self, kind: int, each: Matrices) -> int:
        lt, _, _ = self._bindings
        layout = int(lt.matrix_layout_create(kind, each.rows, each.columns, each.rows))  # from column to column
        _set(lt.matrix_layout_set_attribute, layout, lt.MatrixLayoutAttribute.BATCH_COUNT, np.int32(each.batch))
        stride = lt.MatrixLayoutAttribute.STRIDED_BATCH_OFFSET
        _set(lt.matrix_layout_set_attribute, layout, stride, np.int64(each.rows * each.columns))
        return layout


def _set(setter: Callable[..., object], of: int, attribute: int, value: np.generic) -> None:
    content = np.array([value])
    setter(of, attribute, content.ctypes.data, content.nbytes)


OPERATIONS = {
    "conv2d": ("conv_fprop", "image", "weight"),
    "conv2d_input_grad": ("conv_dgrad", "loss", "filter"),
    "conv2d_weight_grad": ("conv_wgrad", "image", "loss"),
}
"""By primitive: cuDNN's operation, and its names of the two inputs."""

LESS_EXACT = ("conv2d_weight_grad",)
"""Primitives that cuDNN does not compute in float32: all permitted engines had three times the error of sequential
float32 FMA sums."""

ALWAYS = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC")
REFUSED = {"full": (*ALWAYS, "TENSOR_CORE", "WINOGRAD", "FFT"), "tf32": ALWAYS}
"""By precision: the numerical notes of engines that are not used. float32 on tensor cores is tf32, no engine rounds
float32 to bfloat16, and Winograd and FFT are less exact than FMA sums."""

UIDS = (1, 2, 3)
"""The unique ids of the inputs and the output in a graph."""


class Convolution(NamedTuple):
    """A problem: the primitive, the shapes of its inputs and output, the window, and the precision."""

    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    window: Any
    precision: str


class Cudnn:
    """cuDNN as a source of candidates; see `Library`. Its handle and graphs are never freed."""

    def __init__(self, version: str) -> None:
        self.name = f"cudnn {version}"
        self.graphs: dict[Convolution, _Graph] = {}

    def problem(self, equation: Equation) -> Convolution | None:
        name, params = equation.primitive.name, equation.params
        precision = params.get("precision", FULL)
        types = [v.type for v in (*equation.inputs, *equation.outputs)]
        if name not in OPERATIONS or precision not in REFUSED or types[0].dtype.name != "float32":
            return None
        if precision == FULL and name in LESS_EXACT:
            return None
        return Convolution(name, tuple(t.shape for t in types), params["window"], precision)

    def plan(self, equation: Equation, choice: int) -> Plan:
        convolution = self.problem(equation)
        assert convolution is not None
        with translated(self):
            graph = self.graphs.get(convolution)
            if graph is None:
                graph = _Graph(self._package, self._handle, convolution, workspace_limit(equation))
                self.graphs[convolution] = graph
            found = graph.plan(choice)
        if found is None:
            raise NotOffered(f"{self.name} has {len(graph.plans)} algorithms for it")
        return found

    @cached_property
    def _package(self) -> Any:
        import cudnn

        return cudnn

    @cached_property
    def _handle(self) -> Any:
        return self._package.create_handle()


class _Graph:
    """A convolution as a cuDNN graph, and its execution plans that have been built."""

    def __init__(self, cudnn: Any, handle: Any, convolution: Convolution, workspace: int) -> None:
        self.cudnn, self.handle = cudnn, handle
        self.workspace = workspace
        self.plans: list[Plan] = []
        self.next = 0
        kind = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=kind, compute_data_type=kind, handle=handle
        )
        operation, *names = OPERATIONS[convolution.primitive]
        *inputs, output = convolution.shapes
        operands = {
            name: self.graph.tensor(name=name, dim=list(shape), stride=strides(shape), data_type=kind, uid=uid)
            for name, shape, uid in zip(names, inputs, UIDS, strict=False)
        }
        window = convolution.window
        result = getattr(self.graph, operation)(
            **operands,
            pre_padding=list(window.padding),
            post_padding=list(window.padding),
            stride=list(window.stride),
            dilation=list(window.dilation),
        )
        result.set_output(True).set_uid(UIDS[-1]).set_data_type(kind)
        result.set_dim(list(output)).set_stride(strides(output))
        try:
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([cudnn.heur_mode.A])
            self.graph.deselect_numeric_notes([cudnn.numerical_note[note] for note in REFUSED[convolution.precision]])
            self.graph.check_support()
            self.count = int(self.graph.get_execution_plan_count())
        except cudnn.cudnnGraphNotSupportedError:
            self.count = 0

    def plan(self, choice: int) -> Plan | None:
        """The plan at position ``choice`` of the usable ones; None if there are fewer."""
        while len(self.plans) <= choice and self.next < self.count:
            index, self.next = self.next, self.next + 1
            try:
                self.graph.build_plan_at_index(index)
                size = int(self.graph.get_workspace_size_plan_at_index(index))
            except (self.cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
                continue  # deselected above, or not supported by this device
            if size <= self.workspace:
                self.plans.append(Plan(size, partial(self._enqueue, index)))
        return self.plans[choice] if choice < len(self.plans) else None

    def _enqueue(self, index: int, addresses: Sequence[int], workspace: int, stream: int) -> None:
        self.cudnn.set_stream(handle=self.handle, stream=stream)
        operands = dict(zip(UIDS, addresses, strict=True))
        self.graph.execute_plan_at_index(operands, workspace, index, self.handle)


def strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous array, in elements."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


BINDINGS: dict[str, tuple[str, Callable[[str], Library]]] = {"cublasLt": ("nvmath", Cublas), "cudnn": ("cudnn", Cudnn)}
"""By library: the Python package that calls it, and the source of candidates."""


def installed() -> list[Library]:
    """The libraries that are installed together with their Python packages."""
    found: list[Library] = []
    for name, (package, library) in BINDINGS.items():
        version = libraries.version(name) if find_spec(package) else None
        if version is not None:
            found.append(library(version))
    return found
