"""Fuzz model files and checkpoints: loading must return all arrays of the config's network or raise AdtrainError.

    python tests/fuzz/fuzz_safetensors.py -max_total_time=600

Needs `pip install atheris`; the options are libFuzzer's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adtrain.training"]):
    from adtrain import config, nn, training
    from adtrain.core.errors import AdtrainError
    from adtrain.training import checkpoint, model_file

OPTIONS = ["data.dataset=null", "data.path=none", "model.input=[4]", "model.layers=[{linear: 2}, batch_norm1d]"]
PARAMETERS = (4 + 1) * 2 + 2 * 2
LIMITS = ["-max_len=8192", "-timeout=20", "-rss_limit_mb=1024"]


def main() -> None:
    experiment = training.outline(config.load("smoke", OPTIONS))
    with tempfile.TemporaryDirectory() as folder:
        run, corpus = Path(folder), Path(folder) / "corpus"
        corpus.mkdir()
        (run / "config.yaml").write_text(experiment.config_text)
        state = experiment.initial_state("cpu")
        begun = training.Progress.start(experiment.best_start, experiment.network.task)
        start = checkpoint.Checkpoint(checkpoint.fetch(state)(), begun)
        for name, parts in (
            ("model", model_file.encode(experiment, start.state)),
            ("last", checkpoint.encode(experiment, start)),
        ):
            file = b"".join(parts)
            (corpus / name).write_bytes(file)
            (corpus / f"{name}-header").write_bytes(file[8:])

        def load(content: bytes) -> None:
            for name, read in (
                ("model", lambda path: model_file.load(run).params),
                ("last", lambda path: checkpoint.read(path).load(experiment).state.params),
            ):
                path = run / f"{name}.safetensors"
                path.write_bytes(with_length(content))
                try:
                    params = read(path)
                except AdtrainError as error:
                    if "\n" in str(error):
                        raise AssertionError("a message of several lines") from error
                else:
                    assert nn.count_parameters(params) == PARAMETERS

        atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:], str(corpus)], load)
        atheris.Fuzz()


def with_length(content: bytes) -> bytes:
    """Prepend the header's length to content that begins with a JSON header; mutations would not keep it right."""
    header = content.rpartition(b"}}")[0] + b"}}" if content.startswith(b"{") else b""
    return len(header).to_bytes(8, "little") + content if header else content


if __name__ == "__main__":
    main()
