"""The plug-ins of the documents are complete, short, and run; so does the example's config."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from plugin_files import no_plugins

from adtrain.backends.cuda import compiler

pytestmark = pytest.mark.usefixtures("no_plugins")
__all__ = ["no_plugins"]

ROOT = Path(__file__).parent.parent
TEXT = "".join((ROOT / "docs/how-to" / name).read_text() for name in ("own-layer.md", "own-kernel.md"))
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL))
CONFIG = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[1]  # type: ignore[index]


def call(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def digits(tmp_path: Path) -> str:
    """An override that replaces MNIST by a few random images of its size."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (40, 28, 28), dtype=np.uint8), np.arange(40) % 10
    path = tmp_path / "digits.npz"
    np.savez(path, x_train=images[:20], y_train=labels[:20], x_test=images[20:], y_test=labels[20:])
    return f"data={{path: {path}, batch_size: 10}}"


def train(cfg: Path, *more: object) -> None:
    call("train", cfg, "--device", "cpu", "--steps", 2, "--output-dir", "run", *more)


def test_the_plugins_train_and_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(FILES) == ["gain.py", "focal.py", "spirals.py", "brier.py", "softsign.py", "swish.py"]
    for name, text in FILES.items():
        Path(name).write_text(text)
        assert len(text.splitlines()) < 40, name
    Path("own.yaml").write_text(CONFIG)
    train(Path("own.yaml"))
    assert "brier" in call("eval", "run", "--device", "cpu", "--trust-plugins")


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["softsign", "swish"])
def test_the_operations_pass_their_check(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(FILES[f"{name}.py"])
    assert "checks passed" in call("gradcheck", "--plugin", tmp_path / "mine.py", "--device", "cpu", "--op", name)


@pytest.mark.needs_nvrtc
def test_the_cuda_kernel_compiles(tmp_path: Path) -> None:
    path = tmp_path / "softsign.cu"
    path.write_text(re.search(r'CUDA = """(.*?)"""', FILES["softsign.py"], re.DOTALL)[1])  # type: ignore[index]
    for dtype in ("float32", "float64"):
        assert compiler.compile_source(compiler.file_source(str(path), (np.dtype(dtype),), ()), "90a")


def test_the_config_of_the_trilinear_example_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: str
) -> None:
    monkeypatch.chdir(tmp_path)
    train(ROOT / "examples/trilinear/trilinear.yaml", "--set", digits)
    call("eval", "run", "--device", "cpu", "--plugin", ROOT / "examples/trilinear/trilinear.py")
