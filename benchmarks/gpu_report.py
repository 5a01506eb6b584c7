"""The report of a GPU benchmark: its rows, and the device, versions, commit and date."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adtrain import __version__
from adtrain.bench.machine import commit

PACKAGES = ("torch", "jax", "numpy", "pycuda", "cuda-bindings", "nvidia-cudnn-cu13", "nvidia-cublas")


def provenance() -> dict[str, Any]:
    """Commit, device, driver, versions, date and command; None for what is unknown."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "device": _device(),
        "versions": {"adtrain": __version__, "python": sys.version.split()[0], **dict(_versions())},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _device() -> str | None:
    """Name, driver and clock of the GPU, as nvidia-smi reports them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


class Report:
    """Rows, written to a JSON file, if one is named, after each row."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.about = provenance()
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            self.path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=2) + "\n")

    def line(self) -> str:
        """The provenance in one line."""
        versions = ", ".join(f"{name} {found}" for name, found in self.about["versions"].items())
        return f"{self.about['device']}; commit {self.about['commit']}; {versions}"
