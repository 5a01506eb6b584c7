"""Plug-ins that raise what ends a command, return something else, or close its streams: one line, exit code 2."""

from __future__ import annotations

import re
import signal
from itertools import cycle
from pathlib import Path

import pytest
from command_line import invoke
from forked_commands import Case, Commands
from plugin_files import no_plugins

pytestmark = pytest.mark.usefixtures("no_plugins")
__all__ = ["no_plugins"]

PLUGIN = '''\
import atexit, os, signal, sys, threading
import click
import numpy as np
import adtrain as ad
from adtrain.optim.optimizer import zero_step

class Odd(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise self

class MuteError(ad.OptionError, Mute):
    pass

pass  # import

def shape(x):
    pass  # shape
    return ad.ArrayType(x.shape, x.dtype)

def numpy(x):
    pass  # numpy
    return 2 * x

def vjp(ct, out, x):
    pass  # vjp
    return (2.0 * ct,)

def numbers(x):
    pass  # numbers
    return (x.size,)

C = """#include "common.h"
void FN(doubled)(const Team *team, const T *x, T *out, int64_t size) {
    int64_t begin, end;
    my_share(team, size, &begin, &end);
    for (int64_t i = begin; i < end; i++) out[i] = 2 * x[i];
}"""
doubled = ad.custom_op("doubled", shape=shape, numpy=numpy, vjp=vjp, numbers=numbers, c=C)

@ad.register.layer("gain")
class Gain(ad.nn.Module):
    def __post_init__(self):
        pass  # __post_init__
    def output_shape(self, shape):
        pass  # output_shape
        return shape
    def parameter_shapes(self, shape):
        pass  # parameter_shapes
        return {"weight": shape}
    def new_arrays(self, shape, rng, dtype):
        pass  # new_arrays
        return {"weight": ad.array(np.ones(shape, dtype))}, {"seen": ad.array(np.zeros(3, dtype))}
    def forward(self, params, state, x, mode):
        pass  # forward
        return doubled(x) * params["weight"], {"seen": state["seen"] + 1}

@ad.register.loss("focal")
class Focal:
    def __call__(self, outputs, labels):
        pass  # loss
        return ad.ops.cross_entropy(outputs, labels)

@ad.register.optimizer("signed")
class Signed(ad.optim.Optimizer):
    def init(self, params):
        pass  # init
        return {"step": zero_step(params)}
    def updated(self, params, grads, state, lr):
        pass  # updated
        new = ad.tree.map(lambda p, g: p - ad.ops.astype(lr, p.dtype) * ad.ops.sign(g), params, grads)
        return new, {"step": state["step"] + 1}

@ad.register.schedule("decay")
class Decay(ad.optim.Schedule):
    total_steps: int
    def __call__(self, step):
        pass  # schedule
        return 1.0 - ad.ops.astype(step, np.float64) / self.total_steps

@ad.register.augment("darker")
class Darker(ad.augment.Augmentation):
    def __call__(self, batch, rng):
        pass  # augment
        return batch

@ad.register.metric("brier")
class Brier:
    def __call__(self, predictions):
        pass  # metric
        return 1.0

@ad.register.dataset("rings")
class Rings:
    def load(self):
        pass  # load
        images = np.random.default_rng(0).integers(0, 255, (60, 2, 2), dtype=np.uint8)
        return (images, np.arange(60) % 2), None
'''
HOOKS = re.findall(r"pass  # (\w+)\n", PLUGIN)
IN_COMPILED_CODE = ["numbers"]
"""Hooks that only a compiled Program calls."""
CONFIG = """\
name: rings
plugins: [mine.py]
data: {dataset: rings, batch_size: 16, test: 0.25, augment: [darker]}
model: {input: [4], layers: [{linear: 8}, gain, {linear: 2}]}
loss: focal
optimizer: {signed: 0.01}
schedule: decay
training: {epochs: 1, metrics: [brier]}
"""
TRAIN = "train rings.yaml --device cpu -q --output-dir run"
RAISED = {
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit('bye')": "SystemExit: bye",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise StopIteration": "StopIteration",
    "raise Odd('x')": "Odd: x",
    "raise EOFError": "EOFError",
    "raise BrokenPipeError(32, 'p')": "BrokenPipeError: [Errno 32] p",
    "raise click.exceptions.Exit(0)": "Exit: 0",
    "raise ValueError('a\\x1b[31mb\\nc')": r"ValueError: a\x1b[31mb c",
    "raise Mute": "Mute: its text cannot be shown",
    "raise MuteError": "MuteError: its text cannot be shown",
}
"""Statements, and how the error is shown."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rings.yaml").write_text(CONFIG)
    return tmp_path


def put(hook: str, statement: str) -> int:
    """Write the plug-in with a statement in one of its functions. Returns the statement's line."""
    mark = f"pass  # {hook}\n"
    assert PLUGIN.count(mark) == 1
    Path("mine.py").write_text(PLUGIN.replace(mark, f"{statement}\n"))
    return PLUGIN[: PLUGIN.index(mark)].count("\n") + 1


def error(*options: str) -> str:
    """The one line of a training that ends with exit code 2."""
    done = invoke(*TRAIN.split(), *options)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line.removeprefix("adtrain: error: ")


def test_the_plugin_trains(here: Path) -> None:
    put("import", "pass")
    done = invoke(*TRAIN.split(), "--eager")
    assert (done.exit_code, done.stderr) == (0, "")


EAGER = [hook for hook in HOOKS if hook not in ("import", *IN_COMPILED_CODE)]


@pytest.mark.parametrize(
    ("hook", "statement"),
    [*zip(EAGER, cycle(RAISED)), *(("import", x) for x in RAISED), *(("numpy", x) for x in RAISED)],
)
def test_any_exception_of_a_plugin_is_one_line_that_names_its_line(here: Path, hook: str, statement: str) -> None:
    line = put(hook, statement)
    found = (
        error("--eager").removeprefix("rings.yaml:2:11: plugins[0]: ").replace("RuntimeError: generator raised ", "")
    )
    assert found == f"{here}/mine.py:{line}: {RAISED[statement]}"


@pytest.mark.compiled
@pytest.mark.parametrize("hook", IN_COMPILED_CODE)
def test_an_exception_of_a_plugin_during_compilation_is_one_line_that_names_its_line(here: Path, hook: str) -> None:
    line = put(hook, "sys.exit(0)")
    assert error() == f"{here}/mine.py:{line}: SystemExit: 0"


@pytest.mark.parametrize(
    ("hook", "value", "problem"),
    [
        ("init", "None", "init returned None, expected a dict of arrays for the state"),
        ("init", "{}", "init returned None for the key step, expected 0 as int64[], the number of updates so far"),
        ("init", "{'step': None}", "init returned None for the key step, expected 0 as int64[]"),
        ("init", "{'step': ad.array(0.5)}", "init returned float32[] for the key step, expected 0 as int64[]"),
        ("init", "{'step': zero_step(params), 'x': 1}", "init, in the state, returned an int, expected an array"),
        ("parameter_shapes", "None", "parameter_shapes returned None, expected a dict from the name of each parameter"),
        ("parameter_shapes", "[('weight', shape)]", "parameter_shapes returned [('weight', (8,))], expected a dict"),
        ("parameter_shapes", "{'weight': 8}", "parameter_shapes returned {'weight': 8}, expected a dict"),
        ("parameter_shapes", "{3: shape}", "parameter_shapes returned {3: (8,)}, expected a dict"),
        ("new_arrays", "({'weight': None}, {})", "new_arrays returned {'weight': None}, expected {'weight': (8,)}"),
        ("new_arrays", "({'weight': np.ones(8)}, {})", "new_arrays, in the parameters, returned a NumPy array"),
        ("new_arrays", "(None, {})", "new_arrays returned None, expected a dict of arrays for the parameters"),
        ("forward", "x, x", "expected a dict of arrays for the state"),
        ("vjp", "None", "custom_op doubled: vjp returned None, expected a tuple of 1, one for each argument"),
        ("augment", "batch._replace(images=5)", "darker: for the images, returned an int, expected an array"),
        ("augment", "batch._replace(labels=None)", "darker: for the labels, returned None, expected an array"),
        ("metric", "10**400", "brier: returned an int, expected a finite number, or a ByClass of them"),
        ("metric", "10**5000", "brier: returned an int, expected a finite number, or a ByClass of them"),
        ("metric", "ad.metrics.ByClass(1, None)", "brier: returned a ByClass of None, expected a dict"),
    ],
)
def test_a_wrong_result_of_a_plugin_is_one_line_that_names_it(here: Path, hook: str, value: str, problem: str) -> None:
    put(hook, f"return {value}")
    found = error("--eager")
    assert found.startswith(f"{here}/mine.py:")
    assert problem in found


@pytest.mark.parametrize(
    ("hook", "defined", "what"),
    [
        ("output_shape", '@ad.register.layer("gain")', "gain: output_shape"),
        ("import", "import atexit", "the plug-in"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("__post_init__", '@ad.register.layer("gain")', "gain: Gain()"),
                ("load", '@ad.register.dataset("rings")', "rings: load"),
                ("numpy", "doubled = ad.custom_op(", "custom_op doubled: numpy"),
            )
        ),
    ],
)
def test_a_plugin_that_closes_a_standard_stream_is_an_error(
    commands: Commands, here: Path, hook: str, defined: str, what: str
) -> None:
    line = PLUGIN[: PLUGIN.index(defined)].count("\n") + 1
    for descriptor, name in ((1, "standard output"), (2, "standard error")):
        put(hook, f"os.close({descriptor})")
        assert commands.run(Case(f"{TRAIN}{descriptor} --eager", "out", name)) == 2
        found = Path(name).read_text().replace("rings.yaml:2:11: plugins[0]: ", "")
        what_closed = f"{here}/mine.py:{line}: {what} has closed descriptor {descriptor}, {name}"
        assert found == f"adtrain: error: {what_closed}; keep it open\n"
    assert Path("out").read_text() == ""


def test_a_plugin_cannot_close_the_streams_of_the_command(commands: Commands) -> None:
    put("import", "sys.stdout.close(); sys.stderr.close()")
    assert commands.run(Case(f"{TRAIN} --eager", "out", "err")) == 0
    assert Path("out").read_text() == "run\n"


def test_an_error_at_exit_or_in_a_thread_of_a_plugin_is_one_line(commands: Commands, here: Path) -> None:
    in_thread = "thread = threading.Thread(target=lambda: {}['key']); thread.start(); thread.join()"
    line = put("output_shape", f"atexit.register(lambda: 1 / 0); {in_thread}")
    assert commands.run(Case(f"{TRAIN} --eager", "out", "err")) == 0
    assert Path("err").read_text().splitlines() == [
        f"adtrain: warning: {here}/mine.py:{line}: KeyError: 'key' (ignored)",
        f"adtrain: warning: {here}/mine.py:{line}: ZeroDivisionError: division by zero (ignored)",
    ]


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "\nadtrain: interrupted\n")]
)
@pytest.mark.parametrize("hook", ["import", "output_shape"])
def test_a_signal_that_arrives_while_a_plugin_runs_is_not_its_error(
    commands: Commands, hook: str, number: int, code: int, message: str
) -> None:
    put(hook, f"os.kill(os.getpid(), {number:d})")
    assert commands.run(Case(f"{TRAIN} --eager", "out", "err")) == code
    assert Path("err").read_text() == message


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("statement", "number"),
    [
        ("*(volatile T *)team->thread = 1;", signal.SIGSEGV),
        pytest.param("raise(SIGILL);", signal.SIGILL, marks=pytest.mark.exhaustive),
        pytest.param("abort();", signal.SIGABRT, marks=pytest.mark.exhaustive),
        pytest.param("raise(SIGFPE);", signal.SIGFPE, marks=pytest.mark.exhaustive),
        pytest.param(
            "volatile char big[1l << 30]; for (int64_t i = 0; i < (int64_t)sizeof big; i += 4096) big[i] = 1;",
            signal.SIGSEGV,
            marks=pytest.mark.exhaustive,
            id="stack",
        ),
    ],
)
def test_a_signal_that_a_kernel_causes_ends_the_command_with_a_line_that_names_its_operation(
    commands: Commands, statement: str, number: signal.Signals
) -> None:
    crashing = PLUGIN.replace("int64_t begin, end;", statement, 1).replace("my_share", "int64_t begin, end; my_share")
    crashing = crashing.replace('C = """', 'C = """#include <signal.h>\n#include <stdlib.h>\n', 1)
    Path("mine.py").write_text(crashing.replace("c=C)", "c=C, samples=lambda rng: (rng.normal(size=7),))"))
    for arguments in ("gradcheck --plugin mine.py", TRAIN):
        Path("err").unlink(missing_ok=True)
        assert commands.run(Case(arguments, "out", "err")) == -number
        found = Path("err").read_text()
        assert found.startswith(
            f"adtrain: error: operation doubled: its kernel doubled_float32 ended the process with {number.name};"
        )
        assert found.count("\n") == 1
