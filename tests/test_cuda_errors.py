"""Every call of the CUDA driver has its errors translated, checked in the source text: no GPU is needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import adtrain.backends.cuda

FOLDER = Path(adtrain.backends.cuda.__file__).parent
FILES = [
    path for path in sorted(FOLDER.rglob("*.py")) if "pycuda" in path.read_text() or "cuda.bindings" in path.read_text()
]
METHODS = {
    "compute_capability", "free_held", "get_attribute", "get_device_pointer", "get_function", "prepared_async_call",
    "query", "retain_primary_context", "time_since", "total_memory",
}  # fmt: skip
"""Methods of PyCUDA's objects that can fail."""
CANNOT_FAIL = {"cuda.get_version", "cuda.get_driver_version"}
AFTER_A_FAILURE = ("driver.cuStreamEndCapture",)
"""Its own error would hide the one that ended the capture."""


def calls(node: ast.AST, translated: bool = False, checked: bool = False) -> Iterator[tuple[str, bool, bool, int]]:
    """Each call in the syntax tree: its name, whether it is in `translated()`, whether in `checked(...)`, its line."""
    if isinstance(node, ast.FunctionDef):
        translated = any(ast.unparse(x) == "translated()" for x in node.decorator_list)
    if isinstance(node, ast.With):
        handled = {"translated()", "suppress(cuda.Error)"}
        translated |= any(ast.unparse(item.context_expr) in handled for item in node.items)
    if isinstance(node, ast.Try):
        translated |= any(x.type is not None and ast.unparse(x.type) == "cuda.Error" for x in node.handlers)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        yield name, translated, checked, node.lineno
        checked = name == "checked"
    for child in ast.iter_child_nodes(node):
        yield from calls(child, translated, checked)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_driver_call_has_its_errors_translated(path: Path) -> None:
    missing = []
    for name, translated, checked, line in calls(ast.parse(path.read_text())):
        of_pycuda = name.startswith("cuda.") or name.rpartition(".")[2] in METHODS
        if name.startswith("driver.cu") and name not in AFTER_A_FAILURE:
            missing += [] if checked else [f"{path.name}:{line}: {name} without checked()"]
        elif of_pycuda and not translated and name not in CANNOT_FAIL:
            missing.append(f"{path.name}:{line}: {name} without translated()")
    assert missing == []
