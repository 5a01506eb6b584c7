"""Tampers with one value of the files of a run or a sweep, or of a result of `adtrain bench`, for property tests and
fuzzing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from command_line import command
from report_runs import train
from training_runs import write_config

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu-step-smoke.json"
JSON_FILES = ("summary.json", "metrics.jsonl", "result.json")
TENSOR_FILES = ("model.safetensors", "last.safetensors", "best.safetensors")
FILES = (*JSON_FILES, *TENSOR_FILES)
STATE = "states/rung2-group0-wave0.safetensors"
SWEEP_FILES = ("options.json", "metrics.jsonl", "results.json", STATE)

VALUES = (
    "null", "true", "false", "0", "-0.0", "1", "-1", "2", "0.5", "1.5", "1e308", "-1e308", "5e-324", "1e300", "1e400",
    "NaN", "Infinity", "-Infinity", "9007199254740992", "9223372036854775808", "1" + "0" * 30, "9" * 5000, '""', '"x"',
    '"epoch"', '"<script>\'&\\""', '"\\u001b[31m\\u0000"', '"\\ud800"', '"' + "y" * 5000 + '"', "[]", "[1, 2]",
    '["x"]', "[[]]", "{}", '{"loss": 1}', "[" * 150 + "]" * 150, "[" * 5000 + "]" * 5000, "\x00", "",
)  # fmt: skip
"""What a value is replaced by, as JSON text; the last ones are not JSON."""

CHANGES = ("replace", "remove", "add", "duplicate", "truncate", "byte")
MARK = "@MARK@"

Choose = Callable[[int], int]
"""Called with n, returns a number in [0, n)."""


def make(folder: Path) -> Path:
    """A small run with all its files, and a result of `adtrain bench` beside them."""
    options = ("--epochs", "2", "--profile", "--set", "data.validation=0.2")
    run = train(write_config(folder), folder / "run", *options)
    (run / "result.json").write_bytes(RESULT.read_bytes())
    return run


def make_sweep(folder: Path) -> Path:
    """The folder of a small finished sweep with halving."""
    values = ("--set", "sweep={training.seed: [0, 1, 2]}", "--set", "data.validation=0.2")
    command("sweep", write_config(folder), "--halving", "--device", "cpu", *values, "--output-dir", folder / "sweep")
    return folder / "sweep"


def tamper(name: str, content: bytes, choose: Choose) -> bytes:
    """The content of the file `name` with one change; in metrics, one in each of some lines."""
    if name in (*TENSOR_FILES, STATE):
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = changed(header["__metadata__"]["adtrain"].encode(), choose)
        header["__metadata__"]["adtrain"] = about.decode(errors="replace")
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :]
    if name == "metrics.jsonl":
        lines = content.splitlines(keepends=True)
        at = choose(len(lines))
        return b"".join(
            changed(line[:-1], choose) + line[-1:] if number == at or choose(3) == 0 else line
            for number, line in enumerate(lines)
        )
    return changed(content, choose)


def changed(content: bytes, choose: Choose) -> bytes:
    """A JSON document with one change."""
    change = CHANGES[choose(len(CHANGES))]
    if change == "truncate":
        return content[: choose(len(content))]
    if change == "byte":
        at = choose(len(content))
        return content[:at] + bytes([choose(256)]) + content[at + 1 :]
    document = json.loads(content)
    parents = list(_parents(document))
    parent, keys = parents[choose(len(parents))]
    key = keys[choose(len(keys))]
    if change == "remove":
        del parent[key]
        return json.dumps(document).encode()
    value = VALUES[choose(len(VALUES))]
    if change == "replace" or isinstance(parent, list):
        parent[key] = MARK
        return json.dumps(document).replace(f'"{MARK}"', value).encode()
    if change == "add":
        parent[MARK] = 0
        return json.dumps(document).replace(f'"{MARK}": 0', f'"extra": {value}').encode()
    parent[MARK] = 0
    return json.dumps(document).replace(f'"{MARK}": 0', f"{json.dumps(key)}: {value}").encode()


def _parents(node: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """All objects and arrays that are not empty, with their keys."""
    if isinstance(node, (dict, list)) and node:
        yield node, list(node) if isinstance(node, dict) else range(len(node))
        for item in node.values() if isinstance(node, dict) else node:
            yield from _parents(item)
