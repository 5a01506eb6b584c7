"""Every option of every command is used by a test: by one here, or by one of the file that the table names."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import click
import pytest
from command_line import command, invoke
from training_runs import write_config

from adtrain.cli import COMMANDS, module_of

pytestmark = pytest.mark.unfused

TESTS = Path(__file__).parent

Use: TypeAlias = "tuple[str, str] | tuple[str, str, int] | str"
"""Arguments, a regular expression for what is printed, and the exit code; or a file of tests with the option."""

TRUST: dict[str, Use] = {
    "plugin": "test_plugin_runs.py",
    "trust-plugins": "test_trust.py",
    "override": "test_plugin_runs.py",
}
NO_GPU: Use = ("--device gpu", "device gpu: ", 2)
NOTHING_TO_CHOOSE: Use = ("--autotune full", "only a GPU has kernels to choose from", 2)

USES: dict[str, dict[str, Use]] = {
    "train tiny.yaml": {
        "resume": "test_cli_train.py",
        "override": "test_cli_train.py",
        "device": NO_GPU,
        "ranks": "test_rank_processes.py",
        "timeout": "test_rank_processes.py",
        "max-time": "test_cli_train.py",
        "autotune": NOTHING_TO_CHOOSE,
        "epochs": ("--epochs 2", r"^epoch 2/2: "),
        "steps": ("--steps 2 -v", r"^steps   2 of 16 images$"),
        "seed": ("--seed 5 --json", r'"seed": 5'),
        "output-dir": ("--output-dir here", r"^run     here$"),
        "set": ("--set training.epochs=2", r"^epoch 2/2: "),
        "plugin": ("--plugin wrong.py", r"wrong.py:1: ValueError: wrong", 2),
        "trust-plugins": "test_trust.py",
        "profile": ("--profile", r"^operations of one step, by time\nop "),
        "tensorboard": "test_train_tensorboard.py",
        "seeds": "test_cli_seeds.py",
        "eager": ("--eager --json", r'"planned_bytes": null'),
        "no-fuse": ("--no-fuse --profile -v", r"^relu +1\.relu +forward"),
        "dry-run": ("--dry-run", r"no mistake found; nothing is trained or written\ndata "),
        "plot": ("--plot", r"\Aloss\n"),
        "quiet": ("--quiet", r"\Aruns/tiny\n\Z"),
        "verbose": ("--verbose", r"^step    median "),
        "json": ("--json", r'\A{\n  "config"'),
    },
    "sweep": {
        **dict.fromkeys(("resume", "by"), "test_cli_sweep.py"),
        **dict.fromkeys(("trust-plugins", "override"), "test_plugin_runs.py"),
        **dict.fromkeys(
            ("halving", "at-once", "output-dir", "device", "autotune", "set", "plugin", "dry-run", "json"),
            "test_cli_seeds.py",
        ),
        "quiet": ("no-such.yaml --quiet", "no-such.yaml", 2),
    },
    "lr-find tiny.yaml": {
        **dict.fromkeys(("from", "to", "rates", "steps", "output", "json"), "test_cli_lr_find.py"),
        "device": NO_GPU,
        "set": ("--set optimizer=nothing", "unknown optimizer 'nothing'", 2),
        "plugin": ("--plugin wrong.py", r"wrong.py:1: ValueError: wrong", 2),
    },
    "eval run": {
        "data": ("--data data", r"^test    loss .* of 30 images$"),
        "text": "test_train_tokens.py",
        "influence": "test_influence.py",
        "top": ("--top 2", "--top is for a sweep, and run is none", 2),
        "set": ("--set data.batch_size=7", r"^test    loss "),
        "device": NO_GPU,
        "autotune": NOTHING_TO_CHOOSE,
        "json": ("--json", r'"model_epoch": 1'),
        **TRUST,
    },
    "predict run data/t10k-images-idx3-ubyte": {
        "top-k": ("--top-k 2", r"^data/t10k-images-idx3-ubyte\[0\] +2 "),
        "invert": "test_data_digit_image.py",
        "center": "test_data_digit_image.py",
        "device": NO_GPU,
        "json": ("--json", r'"probability": '),
        "csv": "test_train_tables.py",
        **TRUST,
    },
    "sample run": {
        **dict.fromkeys(("length", "temperature", "top-k", "top-p", "prompt", "seed", "json"), "test_train_text.py"),
        "device": NO_GPU,
        **TRUST,
    },
    "report run": {
        "output": ("--output page.html", r"^page.html$"),
        "device": NO_GPU,
        **TRUST,
    },
    "compare run": {"sort": ("--sort loss", r"^run +accuracy"), "json": ("--json", r'"differences"')},
    "export": {
        "member": "test_plugin_runs.py",
        "format": "test_cli_streams.py",
        **dict.fromkeys(
            ("weights", "simd", "int8", "max-loss", "training", "batch-size", "json"), "test_cli_export_c.py"
        ),
        **TRUST,
    },
    "summary tiny.yaml": {
        "set": ("--set model.layers.0.linear=8", r"^0 +linear"),
        "plugin": ("--plugin wrong.py", r"wrong.py:1: ValueError: wrong", 2),
        "json": ("--json", r'"parameters": 643'),
    },
    "explain tiny.yaml": {
        **dict.fromkeys(("try", "eager", "json", "html", "json-file", "also"), "test_explain.py"),
        "set": ("--set training.epochs=x", "training.epochs: found 'x'", 2),
        "plugin": ("--plugin wrong.py", r"wrong.py:1: ValueError: wrong", 2),
        "device": NO_GPU,
        "autotune": NOTHING_TO_CHOOSE,
    },
    "graph tiny.yaml": {
        "output": ("--output net.txt", "wrote net.txt"),
        "format": ("--output net --format txt", "wrote net"),
        **dict.fromkeys(("horizontal", "program", "after", "detail", "values"), "test_cli_graph.py"),
        "device": ("-o net.txt --device gpu", "--device needs --program", 2),
        "arch": ("-o net.txt --program --arch sm_90", "--arch needs --device gpu", 2),
        "set": ("-o net.txt --set model.layers.0.linear=8", "wrote net.txt"),
        "plugin": ("-o net.txt --plugin wrong.py", r"wrong.py:1: ValueError: wrong", 2),
    },
    "new data": {
        "from": "test_weights_of_others.py",
        "tokens": "test_train_tokens.py",
        "set": ("--set validation=0.1", r"^ *validation: 0.1"),
    },
    "schema": {},
    "data inspect": {
        "set": ("table.csv --set target=length", r"^target +mean"),
        "contact-sheet": ("data --contact-sheet sheet.png", r"^class "),
        "json": ("data --json", r'"train": 90'),
    },
    "data tokenize": dict.fromkeys(
        ("output-dir", "vocabulary", "tokenizer", "shard-tokens", "json"), "test_data_tokens.py"
    ),
    "data fetch": {"mirror": "test_data_fetch.py"},
    "data list": {"json": ("--json", r'"name": "mnist"')},
    "data verify": {"json": ("--json", r'"passed": true')},
    "devices": {"measure": "test_bench_roofline.py", "json": ("--json", r'"roofline"')},
    "gradcheck --op relu": {
        "op": ("", r"^relu "),
        "order": ("--order 1", r"^relu .* 1 "),
        "plugin": ("--plugin wrong.py", r"wrong.py:1: ValueError: wrong", 2),
        "device": NO_GPU,
        "json": ("--json", r'"passed": true'),
    },
    "bench race tiny.yaml": {
        **dict.fromkeys(("target", "seeds", "set", "device", "json-file", "json"), "test_bench_race.py"),
        **dict.fromkeys(("against", "autotune"), "test_bench_errors.py"),
        "html": ("--target 0.9 --html no/folder.html", "no/folder.html", 2),
    },
    "bench ops": {
        **dict.fromkeys(("op", "sizes", "dtype", "candidates", "device", "html", "json-file"), "test_cli_bench.py"),
        "plugin": "test_custom_op.py",
        "autotune": NOTHING_TO_CHOOSE,
        "json": "test_cli_bench.py",
    },
    "bench step tiny.yaml": {
        **dict.fromkeys(("batch-sizes", "trace", "html", "json-file", "json"), "test_cli_bench.py"),
        "set": ("--set training.epochs=x", "training.epochs: found 'x'", 2),
        "plugin": ("--plugin wrong.py", r"wrong.py:1: ValueError: wrong", 2),
        "device": NO_GPU,
        "autotune": NOTHING_TO_CHOOSE,
    },
    "bench scaling tiny.yaml": {
        "ranks": "test_bench_errors.py",
        "batch-size": ("--batch-size 0", "Invalid value for '--batch-size': found '0'", 2),
        "against": ("--against nobody", "nobody", 2),
        "set": ("--set training.epochs=x", "training.epochs: found 'x'", 2),
        "device": NO_GPU,
        "html": ("--html no/folder.html", "no/folder.html", 2),
        "json-file": ("--json-file no/folder.json", "no/folder.json", 2),
        "json": ("--json --html -", "only one result fits on standard output", 2),
    },
    "bench startup tiny.yaml": {
        **dict.fromkeys(("against", "samples", "device", "json"), "test_bench_startup.py"),
        "html": ("--html no/folder.html", "no/folder.html", 2),
        "set": ("--set training.epochs=x", "training.epochs: found 'x'", 2),
        "json-file": ("--json-file no/folder.json", "no/folder.json", 2),
    },
    "bench against": {
        **dict.fromkeys(("op", "members", "set", "html", "json-file", "json", "device"), "test_cli_bench_against.py"),
        "autotune": ("torch --autotune full", "only a GPU has kernels to choose from", 2),
    },
    "bench devices": {
        **dict.fromkeys(("op", "json", "json-file", "html"), "test_cli_bench.py"),
        "set": "test_cli_bench.py",
        "autotune": "test_cli_bench.py",
    },
    "bench compare": dict.fromkeys(("html", "json-file", "json"), "test_cli_bench.py"),
}
"""Each command, with arguments, and its options, without dashes. --debug is in `test_cli_main.py`."""


def commands(path: tuple[str, ...], found: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(found, click.Group):
        yield " ".join(path), found
        return
    for name, inner in found.commands.items():
        yield from commands((*path, name), inner)


ALL = [found for name in COMMANDS for found in commands((name,), importlib.import_module(module_of(name)).command)]
ROWS = [(given, option, use) for given, uses in USES.items() for option, use in uses.items()]


@pytest.mark.parametrize(("path", "found"), ALL, ids=[path for path, _ in ALL])
def test_the_table_has_every_option_of_a_command(path: str, found: click.Command) -> None:
    (uses,) = (uses for given, uses in USES.items() if f"{given} ".startswith(f"{path} "))
    options = {param.opts[-1].lstrip("-") for param in found.params if isinstance(param, click.Option)}
    assert set(uses) == options - {"debug"}


@pytest.mark.parametrize(("path", "found"), ALL, ids=[path for path, _ in ALL])
def test_o_is_the_file_or_the_folder_that_a_command_writes(path: str, found: click.Command) -> None:
    spellings = [["-o", "--output"], ["-o", "--output-dir"]]
    for option in found.params:
        if {"-o", "--output", "--output-dir"}.intersection(option.opts):
            assert option.opts in spellings


@pytest.mark.parametrize(("given", "option", "use"), [row for row in ROWS if isinstance(row[2], str)])
def test_the_named_test_file_uses_the_option(given: str, option: str, use: str) -> None:
    text = (TESTS / use).read_text()
    assert (
        re.search(rf"--{option}\b", text)
        or {"quiet": "-q", "output": "-o", "output-dir": "-o"}.get(option, "--") in text
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config tiny.yaml, its data, a run of it, and a plug-in that fails."""
    folder = tmp_path_factory.mktemp("options")
    write_config(folder)
    (folder / "table.csv").write_text("length,kind\n" + "1.5,short\n2.5,long\n" * 9)
    (folder / "wrong.py").write_text("raise ValueError('wrong')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command("train", "tiny.yaml", "--epochs", 1, "--output-dir", "run", "--device", "cpu")
    return folder


@pytest.mark.parametrize(("given", "option", "use"), [row for row in ROWS if not isinstance(row[2], str)])
def test_an_option_has_its_effect(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_gpu: None, given: str, option: str, use: Use
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    arguments, pattern, code = (*use, 0)[:3]
    result = invoke(*f"{given} {arguments}".split())
    assert result.exit_code == code, result.output
    assert re.search(pattern, result.output, re.MULTILINE), result.output
