"""`adtrain new`: proposes a config for data."""

from __future__ import annotations

import click

from adtrain import config, data
from adtrain.cli.options import set_data_option
from adtrain.cli.output import show
from adtrain.training import proposal


@click.command()
@click.argument("source", metavar="PATH|NAME")
@set_data_option
def command(source: str, overrides: tuple[str, ...]) -> None:
    """Print a config that trains on the data at PATH or data set NAME: adtrain new flowers.csv > flowers.yaml.

    In a table, the column to predict is the one named label, class, target or y, otherwise the last one. Texts and
    integers with few different values are classes. Other numbers are targets.
    """
    named = source in data.CATALOGUE
    section = config.load_data({"dataset" if named else "path": source}, overrides)
    show(*proposal.text(section, section.model_dump(mode="json", exclude_unset=True)).splitlines())
