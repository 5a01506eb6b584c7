"""`adtrain sample`: text that a run trained on text writes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

import click

from adtrain.cli.options import Number, RunPath, Whole, device_option, json_option, trust_options
from adtrain.cli.output import note_precision, print_json, show, stream
from adtrain.core.errors import AdtrainError
from adtrain.training import Trust, model_file, sampling


def _piped() -> str:
    """The text of standard input without a line feed at its end; empty if it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")  # as Python decodes arguments


@click.command()
@click.argument("run", type=RunPath())
@click.option("--length", type=Whole(min=1), default=500, help="How many characters, bytes or tokens to write.")
@click.option(
    "--temperature",
    type=Number(min=0, min_open=True, advice="--top-k 1 takes the most probable one each time"),
    metavar="T",
    default=1.0,
    help="Divides the logarithms of the probabilities: below 1 the text is more predictable, above 1 more varied.",
)
@click.option(
    "--top-k", type=Whole(min=1), metavar="K", help="Draw from the K most probable characters, bytes or tokens only."
)
@click.option(
    "--top-p",
    type=Number(min=0, max=1, min_open=True),
    metavar="P",
    help="Draw from the most probable ones only: the fewest that have at least the probability P together.",
)
@click.option(
    "--prompt",
    "prompts",
    metavar="TEXT",
    multiple=True,
    help="The text to continue. By default it is read from standard input, if that is no terminal. Without a text a "
    "new line begins. Several prompts are continued together.",
)
@click.option("--seed", type=Whole(0, 2**64 - 1), default=0, help="Another seed writes another text.")
@device_option
@trust_options
@json_option
def command(
    run: Path,
    length: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    prompts: tuple[str, ...],
    seed: int,
    device: str,
    trust: Trust,
    as_json: bool,
) -> None:
    """Print the prompt and further characters. Each is drawn from the probabilities that the network of the run in the
    folder RUN gives after the characters before it. The same seed gives the same text. A run on tokens writes tokens,
    up to the end of a text.

    Lines `---` separate the texts of several prompts. Control characters other than line feeds are printed as escapes.
    With --json the text is unchanged.
    """
    trained = model_file.load(run, device, trust)
    if not trained.config.data.is_text:
        raise AdtrainError(
            f"{run}: the run was trained on {trained.config.data.examples}, expected one trained on text"
        )
    prompts = prompts or (_piped(),)
    note_precision(trained.config, device)
    starts = [sampling.prompt_classes(trained, prompt) for prompt in prompts]
    drawing = sampling.Drawing(temperature, top_k, top_p, seed)
    drawn = sampling.until_end(trained, islice(sampling.sample(trained, device, starts, drawing), length))
    if len(prompts) == 1 and not as_json:
        stream(chain(prompts, sampling.decoded(trained, (int(classes[0]) for classes in drawn))))
        return
    texts = sampling.decoded_texts(trained, drawn, len(prompts))
    if as_json:
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        print_json({"run": str(run), **asdict(drawing), "samples": samples})
        return
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        show(*(["---"] if number else []), *(prompt + text).split("\n"))
