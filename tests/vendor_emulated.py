"""Emulations of cuBLASLt and cuDNN's front end on host memory, as far as candidates use them."""

from __future__ import annotations

import ctypes
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from adtrain.backends.cuda.vendor import OPERATIONS, Cublas, Cudnn
from adtrain.core.primitive import PRIMITIVES
from adtrain.ops.conv import Window

Compute = Enum("Compute", "COMPUTE_32F COMPUTE_32F_FAST_TF32 COMPUTE_32F_FAST_16BF COMPUTE_64F")
Kind = IntEnum("Kind", "CUDA_R_32F CUDA_R_64F")
FLOATS: dict[Any, np.dtype] = {Kind.CUDA_R_32F: np.dtype("float32"), Kind.CUDA_R_64F: np.dtype("float64")}


def array_at(address: int, dtype: Any, count: int) -> np.ndarray:
    """The elements at an address, as a view of memory."""
    content = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(content, dtype)


class Lt:
    """cuBLASLt as nvmath-python binds it. Handles are numbers, and `objects` has the attributes of each.

    Attributes:
        states: of the heuristic's results, 0 where one may be used.
        refusal: what the heuristic raises.
        limits: the preferences of the last question.
        computed: descriptions of the products computed.
    """

    MatmulDescAttribute = IntEnum("MatmulDescAttribute", "TRANSA TRANSB")
    MatrixLayoutAttribute = IntEnum("MatrixLayoutAttribute", "BATCH_COUNT STRIDED_BATCH_OFFSET")
    MatmulPreferenceAttribute = IntEnum(
        "MatmulPreferenceAttribute",
        "MAX_WORKSPACE_BYTES MIN_ALIGNMENT_A_BYTES MIN_ALIGNMENT_B_BYTES MIN_ALIGNMENT_C_BYTES MIN_ALIGNMENT_D_BYTES",
    )
    matmul_heuristic_result_dtype = np.dtype(
        [("algo", [("data_", "u8", (8,))]), ("workspace_size", "u8"), ("state", "i4")]
    )

    class cuBLASLtError(Exception):
        pass

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.states = [0, 0, 0]
        self.refusal: str | None = None
        self.questions = 0
        self.limits: dict[str, int] = {}
        self.computed: list[tuple[dict[str, Any], int, int]] = []

    def create(self) -> int:
        return self._made()

    def matmul_desc_create(self, compute: Compute, scale: Kind) -> int:
        return self._made(compute=compute, scale=scale)

    def matrix_layout_create(self, kind: Kind, rows: int, columns: int, leading: int) -> int:
        return self._made(kind=kind, rows=rows, columns=columns, leading=leading)

    def matmul_preference_create(self) -> int:
        return self._made()

    def matmul_desc_set_attribute(self, of: int, attribute: IntEnum, address: int, size: int) -> None:
        assert size == 4
        self.objects[of][attribute.name] = int(array_at(address, "int32", 1)[0])

    def matrix_layout_set_attribute(self, of: int, attribute: IntEnum, address: int, size: int) -> None:
        assert size == (4 if attribute is self.MatrixLayoutAttribute.BATCH_COUNT else 8)
        self.objects[of][attribute.name] = int(array_at(address, f"int{8 * size}", 1)[0])

    def matmul_preference_set_attribute(self, of: int, attribute: IntEnum, address: int, size: int) -> None:
        assert size == (8 if attribute is self.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES else 4)
        self.objects[of][attribute.name] = int(array_at(address, f"uint{8 * size}", 1)[0])

    def matmul_algo_get_heuristic(
        self, handle: int, description: int, x: int, y: int, c: int, d: int, preference: int, most: int, results: int,
        count: int,
    ) -> None:  # fmt: skip
        self.questions += 1
        self.limits = self.objects[preference]
        if self.refusal is not None:
            raise self.cuBLASLtError(self.refusal)
        found = array_at(results, self.matmul_heuristic_result_dtype, most)
        for i, state in enumerate(self.states[:most]):
            found["algo"]["data_"][i] = i
            found["workspace_size"][i], found["state"][i] = 1000 * i, state
        array_at(count, "int32", 1)[0] = min(len(self.states), most)

    def matmul(
        self, handle: int, description: int, alpha: int, a: int, a_layout: int, b: int, b_layout: int, beta: int,
        c: int, c_layout: int, d: int, d_layout: int, algorithm: int, workspace: int, size: int, stream: int,
    ) -> None:  # fmt: skip
        about = self.objects[description]
        assert (c, c_layout) == (d, d_layout)
        dtype = FLOATS[about["scale"]]
        one, zero = (array_at(x, dtype, 1)[0] for x in (alpha, beta))
        assert (one, zero) == (1, 0)
        assert int(array_at(algorithm, "u8", 1)[0]) * 1000 == size
        left, right = self._matrices(a, a_layout), self._matrices(b, b_layout)
        left = left.swapaxes(1, 2) if about["TRANSA"] else left
        right = right.swapaxes(1, 2) if about["TRANSB"] else right
        self._matrices(d, d_layout)[:] = left @ right
        self.computed.append((about, workspace, stream))

    def _made(self, **content: Any) -> int:
        self.objects.append(content)
        return len(self.objects) - 1

    def _matrices(self, address: int, layout: int) -> np.ndarray:
        """The matrices at an address, as (batch, rows, columns); columns are contiguous."""
        about = self.objects[layout]
        dtype, shape = FLOATS[about["kind"]], tuple(about[name] for name in ("BATCH_COUNT", "rows", "columns"))
        elements = array_at(address, dtype, shape[0] * about["STRIDED_BATCH_OFFSET"])
        strides = (about["STRIDED_BATCH_OFFSET"], 1, about["leading"])
        return np.lib.stride_tricks.as_strided(elements, shape, [s * dtype.itemsize for s in strides])


class Graph:
    """A graph of cuDNN's front end: one convolution, with the plans of the package."""

    def __init__(self, package: Any, **kinds: Any) -> None:
        self.package = package
        self.operands: dict[int, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.built: set[int] = set()

    def tensor(self, uid: int, **about: Any) -> dict[str, Any]:
        self.operands[uid] = about
        return about

    def __getattr__(self, name: str) -> Any:
        primitive = next(p for p, (operation, *_) in OPERATIONS.items() if operation == name)
        return lambda **given: self._convolution(primitive, **given)

    def _convolution(self, primitive: str, **given: Any) -> Any:
        _, *names = OPERATIONS[primitive]
        assert [given[name] for name in names] == [self.operands[uid] for uid in (1, 2)]
        assert given["pre_padding"] == given["post_padding"]
        self.primitive, self.given = primitive, given
        result = SimpleNamespace()
        for name in ("output", "uid", "data_type", "dim", "stride"):
            setattr(result, f"set_{name}", lambda value, name=name: vars(result).update({name: value}) or result)
        self.result = result
        return result

    def validate(self) -> None:
        if self.package.unsupported:
            raise self.package.cudnnGraphNotSupportedError("no engine")

    build_operation_graph = check_support = validate

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A"]

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.notes = notes

    def get_execution_plan_count(self) -> int:
        return len(self.package.plans)

    def build_plan_at_index(self, index: int) -> None:
        notes, _ = self.package.plans[index]
        if set(notes) & set(self.notes):
            raise RuntimeError("deselected")
        self.built.add(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        assert index in self.built
        return int(self.package.plans[index][1])

    def execute_plan_at_index(self, operands: dict[int, int], workspace: int, index: int, handle: Any) -> None:
        assert index in self.built
        self.package.executed.append((index, workspace))
        shapes = [*(self.operands[uid]["dim"] for uid in (1, 2)), self.result.dim]
        x, y, z = (
            array_at(operands[uid], "float32", int(np.prod(shape))).reshape(shape)
            for uid, shape in zip((1, 2, self.result.uid), shapes, strict=True)
        )
        channels = {"conv2d": (x, y), "conv2d_input_grad": (z, y), "conv2d_weight_grad": (x, z)}[self.primitive]
        image, weight = channels
        stride, padding, dilation = (tuple(self.given[name]) for name in ("stride", "pre_padding", "dilation"))
        window = Window(stride, padding, dilation, image.shape[1] // weight.shape[1])
        size = {} if self.primitive == "conv2d" else {"size": z.shape[2:]}
        reference = PRIMITIVES[self.primitive].reference
        z[:] = reference(x, y, window=window, **size, precision="full")


def package(plans: list[tuple[tuple[str, ...], int]], unsupported: bool = False) -> Any:
    """cuDNN's front end, with the numerical notes and the workspace in bytes of each plan."""

    class cudnnGraphNotSupportedError(Exception):
        pass

    class Notes(dict[str, str]):
        def __missing__(self, name: str) -> str:
            return name

    made: Any = SimpleNamespace(
        cudnnGraphNotSupportedError=cudnnGraphNotSupportedError,
        data_type=SimpleNamespace(FLOAT="float"),
        heur_mode=SimpleNamespace(A="A"),
        numerical_note=Notes(),
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: made.streams.append(stream),
        plans=plans,
        unsupported=unsupported,
        streams=[],
        executed=[],
    )
    made.pygraph = lambda **kinds: Graph(made, **kinds)
    return made


def cublas(lt: Lt) -> Cublas:
    """The source of candidates with emulated bindings."""
    made = Cublas("13.1.0")
    vars(made)["_bindings"] = (lt, Compute, Kind)
    return made


def cudnn(front_end: Any) -> Cudnn:
    made = Cudnn("9.19.0")
    vars(made)["_package"] = front_end
    return made
