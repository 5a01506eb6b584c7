"""The documents name only what exists, their programs run, and their samples are what the commands print."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any, get_type_hints

import click
import numpy as np
import pytest
import yaml
from command_line import invoke
from npz_files import write_npz
from pydantic import TypeAdapter

import adtrain
from adtrain import data
from adtrain.cli import COMMANDS, main
from adtrain.config import Config, source, specs
from adtrain.data import DataSet

ROOT = Path(__file__).parent.parent
DOCUMENTS = [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]]
PACKAGED = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
SUCCESSIVE = "docs/how-to/python.md"
"""Each of its snippets continues the one before."""
TESTED_ELSEWHERE = ("docs/how-to/own-layer.md", "docs/how-to/own-kernel.md", "docs/add-a-fusion.md", "docs/engine.md")
"""`test_docs_plugins.py`, `test_fusion.py` and `test_docs_engine.py` run their programs."""
FRAGMENTS = {"docs/add-a-fusion.md": 1, "docs/add-an-op.md": 5, "docs/engine.md": 7}
"""The documents with snippets that are not complete programs, and the number of these snippets."""
MEASURED = ("train", "predict")
"""Commands whose numbers vary. Their lines are compared without numbers, and may come in another order."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(document), re.DOTALL | re.MULTILINE)


def programs(document: str) -> list[str]:
    """The snippets that begin with an import, and all snippets of a document where one continues the other."""
    found = blocks(document, "python")
    return [code for code in found if document == SUCCESSIVE or code.startswith(("import ", "from "))]


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if programs(name) and name not in TESTED_ELSEWHERE])
def test_the_python_programs_of_a_document_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippet"}
    for number, code in enumerate(programs(document), 1):
        if "sklearn" in code and find_spec("sklearn") is None:
            continue  # of an extra
        exec(compile(code, f"{document}, program {number}", "exec"), names)


def test_snippets_that_are_no_programs_are_counted() -> None:
    counts = {name: len(blocks(name, "python")) - len(programs(name)) for name in DOCUMENTS}
    assert {name: count for name, count in counts.items() if count} == FRAGMENTS


def samples(document: str) -> list[tuple[str, list[str]]]:
    """The commands of the blocks of type console, each with the lines that it prints."""
    parts = [part for block in blocks(document, "console") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(command, lines) for command, *lines in map(str.splitlines, parts)]


def shape(line: str) -> str:
    """The line without its numbers and the name of the processor."""
    return " ".join(re.sub(r"cpu, .*", "cpu", re.sub(r"\d[\d,]*(\.\d+)?", "#", line)).split())


def loaded_with_few_tests(*arguments: Any, load: Callable[..., DataSet] = data.load, **options: Any) -> DataSet:
    """A data set with 500 test images, so that accuracies are found in little time."""
    found = load(*arguments, **options)
    return replace(found, test=found.test.take(np.arange(500)))


LONG = ("docs/tutorial.md", "docs/how-to/predict.md", "docs/how-to/equations.md")
"""Documents whose samples compile several configs, or solve equations."""


@pytest.mark.compiled
@pytest.mark.parametrize(
    "document",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LONG)) for name in DOCUMENTS if samples(name)],
)
def test_the_samples_of_a_document_are_what_is_printed(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(ROOT / "docs/pictures/digit.png", tmp_path)
    for name, content in re.findall(r"`(\w+\.yaml)`:\n\n```yaml\n(.*?)```", text_of(document), re.DOTALL):
        Path(name).write_text(content)
    monkeypatch.setattr(data, "load", loaded_with_few_tests)
    for line, expected in samples(document):
        arguments = shlex.split(line)[1:]
        command = arguments[0]
        if command == "train":
            arguments += ["--device", "cpu", "--steps", "3"]
        result = invoke(*arguments)
        printed = (result.stdout if result.exit_code == 0 else result.stderr).splitlines()
        if command in MEASURED and result.exit_code == 0:
            assert {shape(row) for row in expected if row != "..."} - set(map(shape, printed)) == set(), line
        else:
            assert list(map(without_threads, expected)) == list(map(without_threads, printed)), line


CIFAR = "docs/how-to/cifar.md"
SLOW = ("cifar-94", "cifar-96", "resnet18", "lr-find")
"""What computes for seconds on generated images."""
QUICKLY = {
    "train": ("--steps", "1", "--eager"),
    "lr-find": ("--rates", "3", "--steps", "1"),
    "bench": ("--seeds", "1", "--set", "training.steps=1", "--set", "optimizer.muon.rest.sgd.lr=1"),
    "summary": (),
}
"""Commands that read data, and what makes them quick."""


def narrower(value: object, key: str) -> Iterator[str]:
    """Settings that leave an eighth of the channels of wide convolutions: `value` is what a config has at `key`.

    The steps of Muon multiply matrices of so many rows, also where a batch has few images.
    """
    if isinstance(value, (dict, list)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from narrower(part, f"{key}.{name}")
    elif key.endswith(".out_channels") and int(str(value)) >= 64:
        yield f"{key}={int(str(value)) // 8}"


def commands_of_cifar() -> list[Any]:
    """The blocks of commands, with the marks of their tests."""
    found = []
    for block in blocks(CIFAR, "bash"):
        slow = [pytest.mark.exhaustive] * any(map(block.__contains__, SLOW))
        found.append(pytest.param(block, marks=[*slow, *[pytest.mark.needs_torch] * ("--against" in block)]))
    return found


@pytest.mark.compiled
@pytest.mark.parametrize("block", commands_of_cifar(), ids=count())
def test_the_commands_for_cifar_run_on_generated_images(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rng, parts = np.random.default_rng(0), {"train": 10, "test": 4}
    images = {f"x_{part}": rng.integers(0, 256, (size, 3, 32, 32), np.uint8) for part, size in parts.items()}
    write_npz(Path("photos.npz"), images | {f"y_{part}": np.arange(size) % 10 for part, size in parts.items()})
    for line in block.replace(" --device gpu", "").replace("torch-max", "torch-eager").splitlines():
        arguments = shlex.split(line)[1:]
        if arguments[0] in QUICKLY:
            (name,) = PACKAGED.intersection(arguments)
            model = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())["model"]
            settings = ["data.path=photos.npz", "data.batch_size=4", "training.precision=float32"]
            settings += narrower(model, "model")
            arguments += [*QUICKLY[arguments[0]], *(x for setting in settings for x in ("--set", setting))]
        result = invoke(*arguments)
        assert result.exit_code == 0, f"{line}: {result.output}"


def without_threads(line: str) -> str:
    """The line; without its numbers if they depend on the number of threads."""
    return shape(line) if line.startswith(("threads' scratch", "peak")) else line


def test_the_config_in_the_readme_is_the_packaged_one() -> None:
    (block,) = blocks("README.md", "yaml")
    packaged = (ROOT / "configs/mlp.yaml").read_text().splitlines()
    assert block.splitlines() == [line for line in packaged if not line.startswith("#")]


@pytest.mark.parametrize(
    "document", [name for name in DOCUMENTS if blocks(name, "yaml") and name not in TESTED_ELSEWHERE]
)
def test_the_parts_of_configs_in_a_document_are_valid(document: str) -> None:
    hints = get_type_hints(Config, include_extras=True)
    for block in blocks(document, "yaml"):
        if "name: broken" not in block:
            part = source.read(f"part:\n{indent(block, ' ')}".encode(), document)[0].find(("part",))[0].plain()
            sections = part if isinstance(part, dict) else {"layers": part}
            for key, value in sections.items():
                TypeAdapter(hints.get(key, specs.Layers)).validate_python(value)


@pytest.mark.parametrize("tool", ["config_reference", "pass_reference"])
def test_a_reference_page_is_up_to_date(tool: str) -> None:
    path = ROOT / f"docs/tools/{tool}.py"
    spec = importlib.util.spec_from_file_location(tool, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text(), f"run python {path.relative_to(ROOT)}"


def test_the_readme_begins_and_ends_with_a_command_to_paste() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text_of("README.md"), re.MULTILINE | re.DOTALL)
    assert blocks[0] == "pip install . && adtrain train mlp\n"
    assert blocks[-1] == "pip install '.[test]' && pytest\n"
    assert "last_block README.md" in (ROOT / ".ci/run").read_text()


def test_every_command_is_in_the_readme() -> None:
    assert [name for name in COMMANDS if f"adtrain {name}" not in text_of("README.md")] == []


def test_every_public_name_is_in_the_python_reference() -> None:
    named = set(re.findall(r"\b\w+$", text_of("docs/reference/python.md"), re.MULTILINE))
    assert set(adtrain.__all__) - named == set()


def options(command: click.Command) -> set[str]:
    own = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    return own.union(*map(options, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "worklog" not in name])
def test_the_commands_in_a_document_exist_with_their_options(document: str) -> None:
    context = click.Context(main.cli)
    for name, rest in re.findall(r"(?:`|^|\$ |&& )adtrain ([a-z][a-z-]*)([^`\n]*)", text_of(document), re.MULTILINE):
        command = main.cli.get_command(context, name)
        assert command is not None, f"adtrain {name}"
        assert set(re.findall(r"--[a-z][\w-]*", rest)) - options(command) == set(), f"adtrain {name}{rest}"


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "worklog" not in name])
def test_links_and_files_named_in_a_document_exist(document: str) -> None:
    content, folder = text_of(document), (ROOT / document).parent
    links = re.findall(r"\]\(([^)#]+)\)|(?:src|srcset)=\"([^\"]+)\"", content)
    assert [a or b for a, b in links if not (a or b).startswith("http") and not (folder / (a or b)).exists()] == []
    files = re.findall(r"`((?:core|ops|nn|optim|config|data|training|bench|cli|tests|examples)/[\w/]+\.py)`", content)
    assert [f for f in files if not ((ROOT / f).exists() or (ROOT / "adtrain" / f).exists())] == []


def test_the_packaged_configs_are_in_the_readme() -> None:
    assert {name for name in PACKAGED if f"`{name}`" not in text_of("README.md")} == set()
