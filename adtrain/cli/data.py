"""`adtrain data`: the data sets that travel with the package."""

from __future__ import annotations

import click

from adtrain.cli.options import json_option, print_json
from adtrain.data import catalogue


@click.group(short_help="List the data sets and verify their files.")
def command() -> None:
    """List the data sets that a config can name, and verify their files."""


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
                }
                for entry in entries
            ]
        )
        return
    for entry in entries:
        shape = " x ".join(str(size) for size in entry.shape)
        click.echo(f"{entry.name}  {entry.title}")
        click.echo(f"  {entry.train_images:,} training and {entry.test_images:,} test images of {shape}")
        click.echo(f"  {len(entry.classes)} classes, licence {entry.licence}")
        click.echo(f"  {entry.folder}")


@command.command("verify")
@click.argument("name", required=False)
@json_option
def verify(name: str | None, as_json: bool) -> None:
    """Compare the files of data set NAME (default: of all) with their checksums; exit code 1 on a mismatch."""
    entries = [catalogue.find(name)] if name is not None else list(catalogue.CATALOGUE.values())
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
            click.echo(f"{entry.name}/{check.path.name}: {verdict}")
    if not passed:
        raise SystemExit(1)
