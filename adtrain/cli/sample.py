"""`adtrain sample`: text that a run trained on text writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from operator import ne
from pathlib import Path
from typing import Any

import click

from adtrain.cli.options import Number, RunPath, Whole, device_option, json_option, trust_options
from adtrain.cli.output import note_precision, print_json, show
from adtrain.core.errors import AdtrainError
from adtrain.training import Trust, model_file, sampling


@click.command()
@click.argument("run", type=RunPath())
@click.option(
    "--length",
    type=Whole(min=1),
    metavar="N",
    default=500,
    show_default=True,
    help="How many characters, bytes or tokens to write.",
)
@click.option(
    "--temperature",
    type=Number(min=0, min_open=True),
    metavar="T",
    default=1.0,
    show_default=True,
    help="Divides the logarithms of the probabilities: below 1 the text is more predictable, above 1 more varied.",
)
@click.option("--prompt", metavar="TEXT", default="", help="The text to continue; by default a new line begins.")
@click.option(
    "--seed",
    type=Whole(0, 2**64 - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Another seed writes another text.",
)
@device_option
@trust_options
@json_option
def command(
    run: Path, length: int, temperature: float, prompt: str, seed: int, device: str, trust: Trust, as_json: bool
) -> None:
    """Print the prompt and further characters. Each is drawn from the probabilities that the network of the run in the
    folder RUN gives after the characters before it. The same seed gives the same text. A run on tokens writes tokens,
    up to the end of a text.

    Control characters other than line feeds are printed as escapes. With --json the text is unchanged.
    """
    trained = model_file.load(run, device, trust)
    if not trained.config.data.is_text:
        raise AdtrainError(
            f"{run}: the run was trained on {trained.config.data.examples}, expected one trained on text"
        )
    note_precision(trained.config, device)
    start = sampling.prompt_classes(trained, prompt)
    drawn: Iterator[int] = islice(sampling.sample(trained, device, start, temperature, seed), length)
    if trained.tokenizer is not None:
        drawn = takewhile(partial(ne, trained.tokenizer.end_of_text), drawn)
    chunks = sampling.decoded(trained, drawn)
    if as_json:
        result: dict[str, Any] = {"run": str(run), "prompt": prompt, "temperature": temperature, "seed": seed}
        print_json({**result, "text": "".join(chunks)})
        return
    line = prompt
    for chunk in chunks:
        *lines, line = (line + chunk).split("\n")
        if lines:
            show(*lines)
    show(line)
