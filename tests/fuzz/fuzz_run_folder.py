"""Fuzz the files of runs and sweeps, and results of `adtrain bench`: every command ends with its result or one line.

    python tests/fuzz/fuzz_run_folder.py -max_total_time=600

Needs `pip install atheris`; the options are libFuzzer's. Each input changes one value of a small real run or sweep. The
commands that read the file then run in this process. Exit codes other than 0 and 2, and warnings, stop the run.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(
    include=["adtrain.config.records", "adtrain.training", "adtrain.report", "adtrain.sweeps"]
):
    from click.testing import CliRunner
    from tampered_runs import FILES, STATE, SWEEP_FILES, make, make_sweep, tamper

    from adtrain.cli import main as command_line

RUN, SWEEP, RESULT, PAGE = "run", "sweep", "run/result.json", "page.html"
SHOW = [["compare", RUN], ["report", RUN, "-o", PAGE]]
RESUME = [["train", "--resume", RUN, "--epochs", "3", "--eager"]]
COMMANDS = {
    "summary.json": SHOW,
    "metrics.jsonl": SHOW + RESUME,
    "model.safetensors": [
        ["report", RUN, "-o", PAGE],
        ["eval", RUN],
        ["predict", RUN, "data/t10k-images-idx3-ubyte"],
        ["export", RUN, "x.safetensors"],
        ["export", RUN, "x.onnx"],
    ],
    "last.safetensors": RESUME,
    "best.safetensors": RESUME,
    "result.json": [
        ["bench", "compare", RESULT, "original.json", "--html", PAGE],
        ["bench", "compare", "original.json", RESULT, "--json"],
    ],
}
SHOW_SWEEP = [["compare", SWEEP], ["report", SWEEP, "-o", PAGE]]
USE_SWEEP = [["eval", SWEEP], ["export", SWEEP, "x.safetensors", "--member", "1"]]
RESUME_SWEEP = [["sweep", "--resume", SWEEP]]
SWEEP_COMMANDS = {
    "options.json": USE_SWEEP + RESUME_SWEEP,
    "metrics.jsonl": SHOW_SWEEP + USE_SWEEP + RESUME_SWEEP,
    "results.json": SHOW_SWEEP + USE_SWEEP + RESUME_SWEEP,
    STATE: USE_SWEEP + RESUME_SWEEP,
}
CASES = [(RUN, name, COMMANDS[name]) for name in FILES]
CASES += [(SWEEP, name, SWEEP_COMMANDS[name]) for name in SWEEP_FILES]
LIMITS = ["-max_len=128", "-len_control=0", "-timeout=60", "-rss_limit_mb=4096"]


def main() -> None:
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        made = {RUN: make(Path(folder)).rename("made"), SWEEP: make_sweep(Path(folder)).rename("made-sweep")}
        shutil.copy(made[RUN] / "result.json", "original.json")
        Path("corpus").mkdir()
        for seed in range(100):
            (Path("corpus") / str(seed)).write_bytes(random.Random(seed).randbytes(64))

        def run_commands(content: bytes) -> None:
            provider = atheris.FuzzedDataProvider(content)
            where, name, commands = CASES[provider.ConsumeIntInRange(0, len(CASES) - 1)]
            original = (made[where] / name).read_bytes()
            tampered = tamper(name, original, lambda count: provider.ConsumeIntInRange(0, count - 1))
            for arguments in commands:
                shutil.rmtree(where, ignore_errors=True)
                shutil.copytree(made[where], where)
                (Path(where) / name).write_bytes(tampered)
                if arguments[0] == "sweep" and name != "results.json":
                    Path(where, "results.json").unlink()  # so that the sweep is not finished
                result = CliRunner().invoke(command_line.cli, arguments)
                if result.exit_code not in (0, 2):
                    raise AssertionError(f"{arguments}: exit code {result.exit_code}\n{result.stderr}")
                errors = [line for line in result.stderr.splitlines() if line.startswith("adtrain: error: ")]
                if len(errors) != (result.exit_code == 2) or "Traceback" in result.stderr or "Warning" in result.stderr:
                    raise AssertionError(f"{arguments}: {result.stderr}")

        atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:], "corpus"], run_commands)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
