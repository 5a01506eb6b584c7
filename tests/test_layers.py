"""The layers of docs/design.md, held by reading every import statement: arrows go down only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import adtrain
import adtrain.backends.cuda.lower  # defines the forms
from adtrain.backends.cuda.forms import FORMS
from adtrain.core.program import GATHER, HORIZONTAL, LOOPS, MAP_REDUCE, PRODUCT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(adtrain.__file__).parent
VERSION = "adtrain.__version__"
"""What every part may import from the package's own file."""

# What each part may import besides itself, as docs/design.md draws it. "adtrain" is the package's __init__.py.
HELPERS = {
    "cache",
    "docstrings",
    "files",
    "invocation",
    "lazy",
    "table",
    "templates",
    "text",
}
MODEL = {"core", "option_types", "ops", "nn", "optim", "augment"}
TRAINING = MODEL | HELPERS | {"config", "curvature", "data", "equations", "metrics", "passes", "plugins"}
RULES: list[tuple[str, set[str]]] = [
    ("child_process core invocation lazy text", set()),
    ("metrics", set()),
    ("signals", set()),
    ("table", {"text"}),
    ("templates", {"invocation", "text"}),
    ("lowering option_types passes equations", {"core"}),
    ("files", {"core", "text"}),
    ("extend", {"core", "passes"}),
    ("codegen", {"core", "passes"}),
    ("ops", {"core", "option_types"}),
    ("cache", {"core", "files"}),
    ("docstrings", {"files"}),
    ("backends", {"child_process", "core", "lowering", "passes", "codegen"} | HELPERS),
    ("nn optim augment samplers", {"core", "option_types", "ops"}),
    ("cases", {"core", "ops", "samplers"}),
    ("jitted", {"core", "passes"}),
    ("curvature", {"core", "ops", "jitted", "option_types", "passes"}),
    ("custom_ops", {"core", "ops", "cache", "plugins"}),
    ("plugins", {"core"}),
    ("register", MODEL | {"config", "custom_ops", "metrics", "plugins"}),
    (
        "adtrain",
        {"core", "ops", "nn", "optim", "jitted", "curvature", "custom_ops", "register", "api"} | {"graphs", "lazy"},
    ),
    ("config", MODEL | HELPERS | {"curvature", "custom_ops", "data", "equations", "metrics", "plugins"}),
    ("data", MODEL | HELPERS | {"child_process"}),
    ("gradcheck", MODEL | {"cases", "config", "custom_ops", "passes", "training"}),
    ("training", TRAINING),
    ("distributed", {"core", "signals"}),
    ("sweeps", TRAINING | {"child_process", "training"}),
    ("export", TRAINING | {"training", "backends", "codegen", "lowering"}),
    ("display", TRAINING | {"training"}),
    ("report", TRAINING | {"training", "sweeps"}),
    ("graphs", TRAINING | {"training", "jitted", "backends"}),
    ("api", TRAINING | {"training", "report", "display", "signals"}),
    ("sklearn", {"api"}),
    (
        "bench",
        TRAINING | {"training", "sweeps", "report", "samplers", "custom_ops", "backends", "adtrain", "distributed"},
    ),
    (
        "cli",
        TRAINING
        | {"training", "sweeps", "report", "cases", "backends", "graphs", "export", "bench", "gradcheck", "custom_ops"}
        | {"adtrain", "display", "distributed", "signals"},
    ),
    ("__main__", {"cli", "distributed", "signals"}),
]
MAY_IMPORT = {part: imports for parts, imports in RULES for part in parts.split()}
# Third-party packages that only some parts may import: the parts, as paths within the package.
ONLY_IN = {
    "pycuda": "backends/cuda",
    "cuda": "backends/cuda",
    "mpi4py": "distributed",
    "nccl": "backends/cuda",
    "nvmath": "backends/cuda/vendor.py",
    "cudnn": "backends/cuda/vendor.py",
    "click": "cli",
    "pandas": "api",
    "sklearn": "sklearn.py",
    "tqdm": "cli display.py",
    "PIL": "data report/classes.py",
    "onnx": "export",
    "onnxruntime": "export",
    "pydantic": "config",
    "resvg_py": "graphs",
    "jinja2": "templates",
    "tensorboard": "training",
    "tokenizers": "data/tokenizer.py",
    "torch": "bench/peers",
    "jax": "bench/peers",
}
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Import names of distributions, where they differ.
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "resvg-py": "resvg_py",
    "scikit-learn": "sklearn",
    "cuda-bindings": "cuda",
    "nvmath-python": "nvmath",
    "nvidia-cudnn-frontend": "cudnn",
    "nccl4py": "nccl",
}
EXTRAS = ("gpu", "vendor", "report", "tensorboard", "export", "peers", "pandas", "mpi", "multi-gpu", "sklearn", "text")
# Packages that are imported inside functions only.
ONLY_IN_FUNCTIONS = ("torch", "jax", "tokenizers")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all statements inside it: quicker than `ast.walk`, which also visits expressions."""
    yield node
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, block, ()):
            yield from statements(inner)


def imported_modules(tree: ast.Module, package: str) -> set[str]:
    """Dotted names of all imports, inside functions too; relative ones start from `package`."""
    found: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def imported_at_once(path: Path) -> set[str]:
    """Dotted names of the imports that run when a module is imported."""
    at_once: list[ast.stmt] = [x for x in parsed(path).body if isinstance(x, (ast.Import, ast.ImportFrom))]
    return imported_modules(ast.Module(at_once, []), "adtrain")


def part_of(module: str) -> str:
    """The part that a module's dotted name belongs to; "adtrain" for a name that `adtrain/__init__.py` defines."""
    name = module.split(".")[1] if "." in module else "adtrain"
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else "adtrain"


@cache
def modules() -> dict[str, set[str]]:
    """Path within the package -> the modules it imports."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = ".".join(["adtrain", *path.relative_to(PACKAGE).parent.parts])
        found[path.relative_to(PACKAGE).as_posix()] = imported_modules(parsed(path), package)
    return found


def own_part(path: str) -> str:
    return path.split("/")[0].removesuffix(".py").replace("__init__", "adtrain")


def test_every_part_has_a_rule() -> None:
    assert {own_part(path) for path in modules()} <= set(MAY_IMPORT)


def test_parts_import_only_what_the_rules_allow() -> None:
    wrong = [
        f"adtrain/{path} imports {module}"
        for path, imports in modules().items()
        for module in sorted(imports)
        if module.split(".")[0] == "adtrain"
        and module != VERSION
        and part_of(module) not in MAY_IMPORT[own_part(path)] | {own_part(path)}
    ]
    assert not wrong, "\n".join(wrong)


def cycle(imports: dict[str, set[str]]) -> set[str]:
    """The modules that are on a cycle of imports, or import one that is."""
    rest = set(imports)
    while leaves := {name for name in rest if not imports[name] & (rest - {name})}:
        rest -= leaves
    return rest


def test_the_rules_have_no_cycle() -> None:
    assert not cycle(MAY_IMPORT)


PARTS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"backends"}


@pytest.mark.parametrize("part", sorted(PARTS | {"backends/cpu", "backends/cuda/runtime", "backends/cuda/tuner"}))
def test_modules_of_a_part_import_one_another_without_a_cycle(part: str) -> None:
    """Imports for types count too."""
    files = {path: names for path, names in modules().items() if path.startswith(f"{part}/")}
    dotted = {f"adtrain.{path[:-3].replace('/', '.')}".removesuffix(".__init__"): n for path, n in files.items()}
    # "from adtrain.core import tree" is the module; "from adtrain.core.tree import map" is a name in it.
    inside = {module: {n if n in dotted else n.rpartition(".")[0] for n in names} for module, names in dotted.items()}
    assert not cycle({module: names & set(dotted) for module, names in inside.items()})


def test_modules_of_the_backends_can_be_imported_in_any_order() -> None:
    """No cycle among the imports that run when a module is imported, of which each also runs those of its packages."""
    dotted = {}
    for path in modules():
        if path.startswith("backends/"):
            name = f"adtrain.{path[:-3].replace('/', '.')}".removesuffix(".__init__")
            dotted[name] = imported_at_once(PACKAGE / path)
    imports: dict[str, set[str]] = {}
    for module, names in dotted.items():
        parents = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 2)}
        own = {".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)}
        imports[module] = parents & set(dotted) - own
    assert not cycle(imports)


@pytest.mark.parametrize("part", ["forms", "lower", "runtime", "tuner", "vendor"])
def test_no_part_of_the_cuda_backend_imports_backend_py(part: str) -> None:
    for path, names in modules().items():
        if path.startswith(f"backends/cuda/{part}"):
            assert not any(name.startswith("adtrain.backends.cuda.backend") for name in names), path


def test_core_imports_nothing_for_types_only() -> None:
    assert not any("typing.TYPE_CHECKING" in n for path, n in modules().items() if path.startswith("core/"))


CPU_STEP = """
import sys
import numpy as np
import adtrain as ad
from adtrain import nn, ops

model = nn.Sequential(nn.Conv2d(2, kernel_size=3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3))
params, _ = model.init((1, 6, 6))
optimizer = ad.optim.SGD(0.1)

def step(params, opt_state, x, labels):
    loss = lambda params: ops.cross_entropy(model(params, x), labels)
    return optimizer.update(params, ad.grad(loss)(params), opt_state)

x, labels = np.ones((4, 1, 6, 6), np.float32), np.zeros(4, np.int64)
ad.jit(step)(params, optimizer.init(params), x, labels)
print(*(name for name in sys.modules if name.startswith(("adtrain.lowering.cuda", "pycuda", "cuda."))))
"""


def test_a_training_step_on_the_cpu_does_not_import_the_cuda_kernels() -> None:
    run = subprocess.run([sys.executable, "-c", CPU_STEP], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_core_and_passes_name_no_device_and_no_form_of_one_device() -> None:
    shared = {LOOPS, PRODUCT, GATHER, HORIZONTAL, MAP_REDUCE}
    forms = "|".join(sorted(FORMS.keys() - shared))
    names = re.compile(rf'\b([ABH][12]00|sm_\d+|wgmma|swizzle)\b|"({forms})"', re.IGNORECASE)
    found = [
        f"{path}: {match[0]}"
        for part in ("core", "passes")
        for path in (PACKAGE / part).rglob("*.py")
        if (match := names.search(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_handlers_of_signals_are_installed_in_one_module() -> None:
    installing = re.compile(r"\bsignal\.(signal|set_wakeup_fd)\(|\bsigaction\(")
    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if installing.search(path.read_text())
    }
    assert found == {"signals.py"}


def test_a_third_party_package_is_imported_by_its_part_only() -> None:
    wrong = [
        f"adtrain/{path} imports {module}, which only {homes} may"
        for path, imports in modules().items()
        for module in sorted(imports)
        if (homes := ONLY_IN.get(module.split(".")[0]))
        and not any(f"{path}/".startswith(f"{home}/") for home in homes.split())
    ]
    assert not wrong, "\n".join(wrong)


def import_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_imports_match_the_declared_dependencies() -> None:
    extras = PROJECT["optional-dependencies"]
    base = import_names(PROJECT["dependencies"])
    optional = import_names([name for extra in EXTRAS for name in extras[extra]])
    imported = {module.split(".")[0] for imports in modules().values() for module in imports}
    # Each release of pydantic pins the pydantic_core that it needs.
    others = imported - set(sys.stdlib_module_names) - {"adtrain", "pydantic_core"}
    assert others - optional == base


def test_torch_and_jax_are_imported_inside_functions_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert {name.split(".")[0] for name in imported_at_once(path)}.isdisjoint(ONLY_IN_FUNCTIONS), path


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
def test_every_form_of_import_is_found(source: str, part: str) -> None:
    (module,) = imported_modules(ast.parse(source), "adtrain.core")
    assert part_of(module) == part or module.split(".")[1:2] == [part]
