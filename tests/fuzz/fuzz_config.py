"""Fuzz `config.load`: it must raise ConfigError, or return a config that is equal after dumping and loading.

    python tests/fuzz/fuzz_config.py -max_total_time=600

Needs `pip install atheris`; the options are libFuzzer's.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["adtrain.config", "yaml"]):
    from adtrain import config

from adtrain.files import asset_path

LIMITS = ["-max_len=4096", "-timeout=20", "-rss_limit_mb=1024"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus, path = Path(folder) / "corpus", Path(folder) / "config.yaml"
        corpus.mkdir()
        for name in config.packaged():
            shutil.copy(asset_path("configs") / f"{name}.yaml", corpus)

        def load(content: bytes) -> None:
            path.write_bytes(content)
            try:
                found = config.load(path)
            except config.ConfigError:
                pass
            else:
                path.write_text(config.dump(found), encoding="utf-8")
                assert config.load(path) == found

        atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:], str(corpus)], load)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
