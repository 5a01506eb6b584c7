"""`adtrain data`: lists, fetches, verifies and inspects data sets."""

from __future__ import annotations

import click

from adtrain.cli.data_fetch import fetch
from adtrain.cli.data_inspect import inspect
from adtrain.cli.options import json_option
from adtrain.cli.output import print_json, show
from adtrain.data import catalogue


@click.group(short_help="Inspect, fetch and verify data sets.")
def command() -> None:
    """Inspect data sets, list those that a config can name, and fetch and verify their files."""


command.add_command(inspect)
command.add_command(fetch)


@command.command("list")
@json_option
def list_entries(as_json: bool) -> None:
    """List the data sets that `data: {dataset: NAME}` can name."""
    entries = list(catalogue.CATALOGUE.values())
    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "title": entry.title,
                    "train_images": entry.train_images,
                    "test_images": entry.test_images,
                    "shape": entry.shape,
                    "classes": entry.classes,
                    "licence": entry.licence,
                    "folder": str(entry.folder),
                    "here": entry.is_here,
                }
                for entry in entries
            ]
        )
        return
    for entry in entries:
        shape = " x ".join(str(size) for size in entry.shape)
        show(f"{entry.name}  {entry.title}")
        show(f"  {entry.train_images:,} training and {entry.test_images:,} test images of {shape}")
        show(f"  {len(entry.classes)} classes, licence {entry.licence}")
        show(f"  {entry.folder if entry.is_here else f'not here; fetch it: adtrain data fetch {entry.name}'}")


@command.command("verify", short_help="Verify the checksums of data sets.")
@click.argument("name", required=False)
@json_option
def verify(name: str | None, as_json: bool) -> None:
    """Verify the checksums of data set NAME, or of all local data sets; exit code 1 on a mismatch."""
    entries = [catalogue.find(name)] if name else [entry for entry in catalogue.CATALOGUE.values() if entry.is_here]
    checks = [(entry, check) for entry in entries for check in catalogue.verify(entry)]
    passed = all(check.passed for _, check in checks)
    if as_json:
        rows = [
            {
                "dataset": entry.name,
                "file": check.path.name,
                "expected": check.expected,
                "found": check.found,
                "passed": check.passed,
            }
            for entry, check in checks
        ]
        print_json({"passed": passed, "rows": rows})
    else:
        for entry, check in checks:
            verdict = "ok" if check.passed else f"FAILED: {check.found}, expected SHA-256 {check.expected}"
            show(f"{entry.name}/{check.path.name}: {verdict}")
    if not passed:
        raise SystemExit(1)
