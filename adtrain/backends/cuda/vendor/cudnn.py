"""Convolutions and their gradients by cuDNN, through its Python front end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

from adtrain.backends.cuda.vendor.call import NotOffered, Plan, translated, workspace_limit
from adtrain.core.precision import FULL
from adtrain.core.program import Equation

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
    """cuDNN as a source of candidates; see `call.Library`. Its handle and graphs are never freed."""

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
