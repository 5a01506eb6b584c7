"""The layers of docs/design.md, held by reading every import statement: arrows go down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import adtrain

PACKAGE = Path(adtrain.__file__).parent

# What each part may import besides itself. "adtrain" is the face, adtrain/__init__.py.
NN_LEVEL = {"core", "ops"}
CONFIG_LEVEL = NN_LEVEL | {"nn", "augment", "optim", "assets", "files"}
TRAINING_LEVEL = CONFIG_LEVEL | {"config", "data", "passes", "adtrain"}
MAY_IMPORT = {
    "core": set[str](),
    "codegen": {"core"},
    "lowering": {"core"},
    "backends": {"core", "lowering", "codegen", "assets", "cache", "files", "passes", "documents"},
    "ops": {"core"},
    "assets": {"core"},
    "cache": {"files"},
    "documents": {"cache"},
    "files": {"core"},
    "nn": NN_LEVEL,
    "augment": NN_LEVEL,
    "optim": NN_LEVEL,
    "cases": NN_LEVEL | {"nn"},
    "adtrain": NN_LEVEL | {"nn", "optim", "backends"},
    "config": CONFIG_LEVEL,
    "data": CONFIG_LEVEL | {"cache"},
    "passes": {"core"},
    "training": TRAINING_LEVEL,
    "gradcheck": NN_LEVEL | {"nn", "cases", "config"},
    "graph": TRAINING_LEVEL | {"training"},
    "export": TRAINING_LEVEL | {"training"},
    "report": TRAINING_LEVEL | {"training"},
    "bench": TRAINING_LEVEL | {"training", "cases", "cache", "documents", "report", "backends"},
    "cli": TRAINING_LEVEL | {"cases", "training", "gradcheck", "bench", "graph", "export", "report", "backends"},
}
# Third-party packages that only one part may import: the part, as a path within the package.
ONLY_IN = {
    "pycuda": "backends/cuda",
    "cuda": "backends/cuda",
    "nvmath": "backends/cuda/vendor",
    "cudnn": "backends/cuda/vendor",
    "click": "cli",
    "tqdm": "cli",
    "PIL": "data",
    "onnx": "export",
    "onnxruntime": "export",
    "pydantic": "config",
    "matplotlib": "report",
    "tensorboard": "training",
    "torch": "bench/peers",
    "jax": "bench/peers",
}
# Those that are imported where they are needed only, never with the module.
ONLY_IN_FUNCTIONS = ("torch", "jax")


def imported_modules(source: str, package: str) -> set[str]:
    """Dotted names of all that the source imports, at any depth; relative ones start from `package`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def part_of(module: str) -> str:
    """The part of this package that a module's dotted name lies in; names that are none are attributes of the face."""
    name = module.split(".")[1] if "." in module else "adtrain"
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else "adtrain"


def modules() -> dict[str, set[str]]:
    """Path within the package -> the modules it imports."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = ".".join(["adtrain", *path.relative_to(PACKAGE).parent.parts])
        found[path.relative_to(PACKAGE).as_posix()] = imported_modules(path.read_text(encoding="utf-8"), package)
    return found


def own_part(path: str) -> str:
    return path.split("/")[0].removesuffix(".py").replace("__init__", "adtrain")


def test_every_part_has_a_rule() -> None:
    assert {own_part(path) for path in modules()} <= set(MAY_IMPORT)


def test_arrows_go_down_only() -> None:
    wrong = [
        f"adtrain/{path} imports {module}"
        for path, imports in modules().items()
        for module in sorted(imports)
        if module.split(".")[0] == "adtrain" and part_of(module) not in MAY_IMPORT[own_part(path)] | {own_part(path)}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rules_themselves_have_no_cycle() -> None:
    below: dict[str, set[str]] = dict(MAY_IMPORT)
    while below:
        lowest = {part for part, imports in below.items() if not imports & set(below)}
        assert lowest, f"a cycle among {sorted(below)}"
        below = {part: imports for part, imports in below.items() if part not in lowest}


def test_a_library_that_belongs_to_one_part_is_imported_there_only() -> None:
    wrong = [
        f"adtrain/{path} imports {module}, which only adtrain/{home}/ may"
        for path, imports in modules().items()
        for module in sorted(imports)
        if (home := ONLY_IN.get(module.split(".")[0])) and not path.startswith(f"{home}/")
    ]
    assert not wrong, "\n".join(wrong)


def test_peers_are_imported_by_the_functions_that_need_them() -> None:
    for path in PACKAGE.rglob("*.py"):
        at_once = ast.parse(path.read_text(encoding="utf-8")).body
        source = "\n".join(ast.unparse(node) for node in at_once if isinstance(node, (ast.Import, ast.ImportFrom)))
        assert {name.split(".")[0] for name in imported_modules(source, "adtrain")}.isdisjoint(ONLY_IN_FUNCTIONS), path


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("import adtrain.training.loop", "training"),
        ("from adtrain.training import loop", "training"),
        ("from adtrain import training", "training"),
        ("from ..training import loop", "training"),
        ("from .. import training", "training"),
        ("def later():\n    from ..training.loop import run", "training"),
        ("from . import array", "core"),
        ("import adtrain as ad", "adtrain"),
        ("from adtrain import grad", "adtrain"),
    ],
)
def test_no_way_of_importing_escapes_the_reader(source: str, part: str) -> None:
    (module,) = imported_modules(source, "adtrain.core")
    assert part_of(module) == part or module.split(".")[1:2] == [part]
