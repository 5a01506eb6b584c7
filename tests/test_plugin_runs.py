"""Runs and sweeps with plug-ins: what their folders store, and how the copies are trusted."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from plugin_files import LAYER, OPERATION, call, here, no_plugins, train, write_plugged

import adtrain as ad
from adtrain import training
from adtrain.config.specs import FAMILIES
from adtrain.custom_ops import OWN_OPS
from adtrain.data import DataError
from adtrain.training import model_file, run_folder

pytestmark = [pytest.mark.usefixtures("no_plugins"), pytest.mark.unfused]
__all__ = ["here", "no_plugins"]


@pytest.fixture
def run(here: Path) -> Path:
    """A finished run with a plug-in."""
    train(write_plugged(here), "--output-dir", "run")
    return here / "run"


def test_a_run_stores_text_and_hash_of_its_plugins(run: Path) -> None:
    digest = sha256(LAYER.encode()).hexdigest()
    assert (run / "plugins/mine.py").read_text() == LAYER
    assert f"{{file: plugins/mine.py, sha256: {digest}}}" in (run / "config.yaml").read_text()
    named = json.loads((run / "summary.json").read_text())["config"]["plugins"]
    assert named == [{"file": "plugins/mine.py", "sha256": digest}]


COMMANDS = (
    ["eval", "run", "--device", "cpu"],
    ["report", "run", "--device", "cpu"],
    ["predict", "run", "data/t10k-images-idx3-ubyte", "--device", "cpu"],
    ["export", "run", "x.safetensors"],
    ["train", "--resume", "run", "--device", "cpu", "--epochs", "2"],
)


def test_plugins_of_a_run_are_run_only_if_the_command_line_says_so(run: Path, here: Path) -> None:
    (run / "plugins/mine.py").write_text("raise SystemExit('run')")
    for command in COMMANDS:
        assert call(*command, expect=2).replace(f"{here}/", "") == (
            "run/config.yaml:3:3: plugins[0]: found mine.py, which is code from run and is not trusted; expected "
            "--plugin mine.py (the path of your file) to run that, or --trust-plugins to run the copy "
            "run/plugins/mine.py"
        )
    assert "has changed since the training" in call(*COMMANDS[0], "--trust-plugins", expect=2)


def test_every_command_works_on_a_run_with_a_plugin(run: Path) -> None:
    option = ["--plugin", "mine.py"]
    for command in COMMANDS:
        call(*command, *option)
    assert json.loads((run / "summary.json").read_text())["epochs"] == 2


def test_a_run_that_was_stopped_and_resumed_equals_the_uninterrupted_one(run: Path, here: Path) -> None:
    call(*COMMANDS[-1], "--trust-plugins")
    train(here / "tiny.yaml", "--epochs", 2, "--output-dir", "whole")
    trust = training.Trust(copies=True)
    resumed, whole = (model_file.load(here / name, trust=trust) for name in ("run", "whole"))
    for a, b in zip(ad.tree.leaves(resumed.params), ad.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_checkpoint_alone_can_be_resumed_with_the_plugin(run: Path) -> None:
    (run / "config.yaml").unlink()
    assert "--trust-plugins" in call(*COMMANDS[-1], expect=2)
    call(*COMMANDS[-1], "--plugin", "mine.py")


def test_a_changed_plugin_is_shown_and_needs_override(run: Path, here: Path) -> None:
    before, after = (sha256(text.encode()).hexdigest() for text in (LAYER, LAYER + "# changed\n"))
    (here / "mine.py").write_text(LAYER + "# changed\n")
    for command in COMMANDS:
        assert call(*command, "--plugin", "mine.py", expect=2) == (
            f"run/config.yaml:3:3: plugins[0]: {here}/mine.py has changed since the training: its SHA-256 is {after}, "
            f"that of the training {before}; undo the change, or accept it with --override"
        )
        assert (run / "plugins/mine.py").read_text() == LAYER
    for command in COMMANDS:
        call(*command, "--plugin", "mine.py", "--override")
    assert (run / "plugins/mine.py").read_text() == LAYER + "# changed\n"  # the resumed run is trained with it
    call(*COMMANDS[0], "--plugin", "mine.py")


def test_a_plugin_that_the_run_does_not_have_is_refused(run: Path, here: Path) -> None:
    (here / "other.py").write_text("")
    found = call(*COMMANDS[0], "--plugin", "mine.py", "--plugin", "other.py", expect=2)
    assert found == "--plugin other.py: found no plug-in of this name; known: mine.py"


SWEEP_COMMANDS = (
    ["eval", "sweep", "--device", "cpu"],
    ["export", "sweep", "x.safetensors", "--member", "1"],
    ["sweep", "--resume", "sweep", "--device", "cpu"],
)


@pytest.fixture
def sweep(here: Path) -> Path:
    """A finished sweep, whose plug-in was named by the command line. Its folder was moved."""
    cfg = write_plugged(here)
    cfg.write_text(cfg.read_text().replace("plugins: [mine.py]\n", ""))
    values = "sweep={training.seed: [0, 1]}"
    call("sweep", cfg, "--plugin", "mine.py", "--set", values, "--device", "cpu", "--output-dir", "made")
    return (here / "made").rename(here / "sweep")


def test_every_command_works_on_a_sweep_with_a_plugin(sweep: Path) -> None:
    option = ["--trust-plugins"]
    for command in SWEEP_COMMANDS[:-1]:
        assert call(*command, expect=2).startswith(
            "sweep/sweep.yaml:3:3: plugins[0]: found mine.py, which is code from"
        )
        call(*command, *option)
    call("eval", "sweep/members/1", "--device", "cpu", *option)
    assert call(*SWEEP_COMMANDS[-1], *option, expect=2) == "sweep: the sweep is finished"


def test_a_changed_plugin_of_a_sweep_is_shown_and_needs_override(sweep: Path, here: Path) -> None:
    (here / "mine.py").write_text(LAYER + "# changed\n")
    for command in SWEEP_COMMANDS:
        assert "has changed since the training" in call(*command, "--plugin", "mine.py", expect=2)
    call(*SWEEP_COMMANDS[0], "--plugin", "mine.py", "--override")


def test_compare_runs_no_plugin(run: Path, here: Path) -> None:
    train(here / "tiny.yaml", "--output-dir", "other", "--set", "model.layers.1.mish.beta=2")
    for folder in ("run", "other"):
        (here / folder / "plugins/mine.py").write_text("raise SystemExit('run')")
    FAMILIES["layer"].pop("mish")
    assert "model.layers[1].mish.beta" in call("compare", "run", "other")


@pytest.mark.needs_onnx
def test_a_layer_of_a_plugin_is_exported_from_its_operations(run: Path) -> None:
    call("export", "run", "x.onnx", "--trust-plugins")
    call("export", "run", "net.c", "--trust-plugins")
    assert "mish" in Path("net.c").read_text()


def test_a_copy_overwrites_no_file_of_the_user(here: Path) -> None:
    (here / "plugins").mkdir()
    (here / "plugins/mine.py").write_text("other")
    assert train(write_plugged(here), "--output-dir", ".", expect=2) == (
        "plugins/mine.py: already exists; give another --output-dir, or move that file"
    )
    assert (here / "plugins/mine.py").read_text() == "other"
    assert not (here / "config.yaml").exists()


def test_a_stopped_run_says_how_to_continue_with_its_plugins(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> NoReturn:
        raise DataError("the data are gone")

    monkeypatch.setattr(run_folder, "run", stopped)
    assert train(write_plugged(here), "--output-dir", "run", expect=2) == (
        f"the data are gone; continue with: adtrain train --resume run --plugin {here}/mine.py"
    )


KERNEL = """#include "common.h"
#include "factor.h"
void FN(doubled)(const Team *team, const T *x, T *out, int64_t size) {
    int64_t begin, end;
    my_share(team, size, &begin, &end);
    for (int64_t i = begin; i < end; i++) out[i] = FACTOR * x[i];
}
"""


@pytest.fixture
def kernels(here: Path) -> Path:
    """A run whose plug-in has a kernel with a header in a subfolder, which is returned."""
    folder = here / "kernels"
    folder.mkdir()
    (folder / "doubled.c").write_text(KERNEL)
    (folder / "factor.h").write_text("#define FACTOR 2\n")
    text = LAYER + OPERATION.replace("    vjp=", '    c="kernels/doubled.c",\n    vjp=')
    train(write_plugged(here, "doubled", text), "--output-dir", "run")
    return folder


def test_a_run_stores_the_files_of_its_kernels_and_runs_its_copies(kernels: Path, here: Path) -> None:
    plugin = json.loads((here / "run/summary.json").read_text())["config"]["plugins"][0]
    names = ["kernels/doubled.c", "kernels/factor.h"]
    assert plugin["files"] == {name: sha256((here / name).read_bytes()).hexdigest() for name in names}
    for file in (*kernels.iterdir(), here / "mine.py"):
        file.unlink()
    for command in COMMANDS:
        call(*command, "--trust-plugins")
    op = OWN_OPS["doubled"].custom
    assert op is not None
    assert op.files == (here / "run/plugins/kernels/doubled.c",)
    assert (here / "run/plugins/kernels/factor.h").read_text() == "#define FACTOR 2\n"


@pytest.mark.parametrize("name", ["doubled.c", "factor.h"])
def test_a_changed_file_of_a_kernel_is_shown_like_a_changed_plugin(kernels: Path, here: Path, name: str) -> None:
    for file, option in (
        (kernels / name, ["--plugin", "mine.py"]),
        (here / "run/plugins/kernels" / name, ["--trust-plugins"]),
    ):
        before = file.read_bytes()
        file.write_bytes(before + b"// changed\n")
        message = call(*COMMANDS[0], *option, expect=2)
        assert f"{file} has changed since the training: its SHA-256 is " in message
        assert sha256(before).hexdigest() in message
        call(*COMMANDS[0], *option, "--override")


def test_a_file_of_a_kernel_outside_the_folder_of_the_plugin_is_refused(here: Path) -> None:
    (here / "doubled.c").write_text(KERNEL)
    (here / "inside").mkdir()
    text = LAYER + OPERATION.replace("    vjp=", '    c="../doubled.c",\n    vjp=')
    assert f"{here}/doubled.c: expected a file in {here}/inside, the folder of mine.py, as a run stores both" in train(
        write_plugged(here / "inside", "doubled", text), expect=2
    )


def test_two_files_of_kernels_with_one_name_are_refused(here: Path) -> None:
    for folder, name in (("a", "doubled"), ("b", "tripled")):
        (here / folder).mkdir()
        (here / folder / "kernel.c").write_text(f"// {name}\n")
        text = OPERATION.replace("    vjp=", '    c="kernel.c",\n    vjp=').replace("doubled", name)
        (here / folder / f"{name}.py").write_text("import adtrain as ad\n" + text)
    cfg = write_plugged(here)
    cfg.write_text(cfg.read_text().replace("[mine.py]", "[a/doubled.py, b/tripled.py]"))
    assert "plugins[1]: found a second file kernel.c of a kernel, expected another name for one" in train(cfg, expect=2)
