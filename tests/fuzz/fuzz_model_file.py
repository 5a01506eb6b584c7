"""Any bytes as a run's model.safetensors: the arrays of the config's model, all of them, or AdtrainError.

    python tests/fuzz/fuzz_model_file.py -max_total_time=600

Needs `pip install atheris`; options are libFuzzer's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adtrain.training"]):
    from adtrain import config, nn, training
    from adtrain.core.errors import AdtrainError
    from adtrain.training import model_file

OPTIONS = ["data.dataset=null", "data.path=none", "model.input=[4]", "model.layers=[{linear: 2}, batch_norm1d]"]
PARAMETERS = (4 + 1) * 2 + 2 * 2
LIMITS = ["-max_len=4096", "-timeout=20", "-rss_limit_mb=1024"]


def main() -> None:
    experiment = training.outline(config.load("smoke", OPTIONS))
    with tempfile.TemporaryDirectory() as folder:
        run, corpus = Path(folder), Path(folder) / "corpus"
        corpus.mkdir()
        (run / "config.yaml").write_text(experiment.config_text)
        whole = model_file.encode(experiment, experiment.initial_state("cpu"))
        (corpus / "whole").write_bytes(whole)
        (corpus / "header").write_bytes(whole[8:])

        def load(content: bytes) -> None:
            (run / "model.safetensors").write_bytes(with_length(content))
            try:
                trained = model_file.load(run)
            except AdtrainError as error:
                if "\n" in str(error):
                    raise AssertionError("a message of several lines") from error
            else:
                assert nn.count_parameters(trained.params) == PARAMETERS

        atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:], str(corpus)], load)
        atheris.Fuzz()


def with_length(content: bytes) -> bytes:
    """A file that begins with its JSON header gets the header's length before it, which no mutation keeps right."""
    header = content.rpartition(b"}}")[0] + b"}}" if content.startswith(b"{") else b""
    return len(header).to_bytes(8, "little") + content if header else content


if __name__ == "__main__":
    main()
