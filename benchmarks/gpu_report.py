"""What the benchmarks on a GPU say beside their numbers: where, when and with what they were measured.

Where there is no repository, the environment variable GIT_COMMIT says which commit is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adtrain import __version__

PACKAGES = ("torch", "jax", "numpy", "pycuda", "cuda-bindings", "nvidia-cudnn-cu13", "nvidia-cublas")


def provenance() -> dict[str, Any]:
    """Commit, device, driver, versions, date and command; None for what cannot be found out."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": os.environ.get("GIT_COMMIT")
        or _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "device": _said("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"),
        "versions": {"adtrain": __version__, "python": sys.version.split()[0], **dict(_versions())},
    }


def _versions() -> Any:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


class Report:
    """Rows in a JSON file, where one is named, that is complete after each of them."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.about = provenance()
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            self.path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=2) + "\n")

    def line(self) -> str:
        """The provenance in short."""
        versions = ", ".join(f"{name} {found}" for name, found in self.about["versions"].items())
        return f"{self.about['device']}; commit {self.about['commit']}; {versions}"
