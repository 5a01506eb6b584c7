"""The text of the kernels that compute the equations of a Program after all passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from adtrain.backends.cpu.codegen.program import generate, supported, workspace
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.kernel import Target
from adtrain.core.program import Equation, Program
from adtrain.passes.plan_memory import plan_memory

FUNCTION = re.compile(r"^static (?:__attribute__\(\(noinline\)\) )?void (\w+)\([^\n]*\{\n.*?^\}\n", re.M | re.S)
"""A function of generated C, and its name."""


@dataclass(frozen=True)
class Kernel:
    """The kernel of an equation, or one of its launches on a GPU."""

    title: str
    text: str


def kernels(program: Program, target: Target | None) -> dict[Equation, list[Kernel]]:
    """The kernels by equation, on the CPU without a target. An equation without one, such as a view, is left out."""
    if target is not None:
        lowering = Lowering(target)
        return {e: list(_launches(lowering, e)) for e in program.equations if not e.is_view}
    if not all(map(supported, program.equations)):
        return {}
    generated = generate(program, plan_memory(program, workspace, 0, None))
    functions = {found[1]: found[0] for found in FUNCTION.finditer(generated.text)}
    found: dict[Equation, list[Kernel]] = {}
    for number, (e, called) in enumerate(zip(program.equations, generated.kernels, strict=True)):
        name = next((name for name in functions if name.startswith(f"equation_{number}_")), None)
        if name is not None:
            others = [x for x in called if x != "loops"]
            title = f"{e.name}: C" + (f", with {', '.join(others)} of kernels/cpu" if others else "")
            found[e] = [Kernel(title, "\n".join(_with_helpers(name, functions)))]
    return found


def _with_helpers(name: str, functions: dict[str, str]) -> list[str]:
    """The functions that a function names, and the function itself."""
    text = functions[name]
    helpers = [
        x for x in dict.fromkeys(re.findall(r"\w+", text)) if x in functions and x not in (name, "fail", "fetch")
    ]
    return [*(functions[x] for x in helpers), text]


def _launches(lowering: Lowering, e: Equation) -> Iterator[Kernel]:
    for launch in lowering.launches(e):
        if not isinstance(launch, LaunchPlan):
            yield Kernel(f"{e.name}: {launch.label}", "")
            continue
        source = launch.source
        macros = [f"// {option}\n" for option in source.options if option.startswith("-D")]
        yield Kernel(f"{e.name}: {launch.name} of {source.name}", "".join(macros) + source.text)
