"""The command line interface: the table of commands.

Each command is a module of this package, which is imported when the command is called.
"""

from __future__ import annotations

COMMANDS = {
    "train": "Train the network that a config describes.",
    "sweep": "Train many variants of a config together, and rank them.",
    "lr-find": "Propose a learning rate: try many at once, and draw their losses.",
    "eval": "Measure loss and metrics of a trained run on the test set.",
    "predict": "Apply a trained run to images, rows of tables or texts.",
    "sample": "Write text with a run that was trained on text.",
    "report": "Write an HTML report of a run, or of several.",
    "compare": "Tabulate how runs and their configs differ.",
    "export": "Write a trained run as C, a page, ONNX, or weights for PyTorch.",
    "summary": "Show a config's layers, and the FLOPs, bytes and memory of a step.",
    "explain": "Explain why a training step takes its time, and what would help.",
    "graph": "Draw a config's network, or its training step.",
    "new": "Print a config for data of your own.",
    "schema": "Print the JSON Schema of configs.",
    "data": "Inspect, fetch and verify data sets.",
    "devices": "Show the devices that training can run on.",
    "gradcheck": "Check every derivative against finite differences.",
    "bench": "Time operations and training steps.",
}
"""The commands of `adtrain`, in the order of its help."""

EARLY = ("train", "eval", "sweep", "lr-find")
"""Those that start the GPU, if there is one, while their modules are imported."""


def module_of(name: str) -> str:
    """The name of the module of a command."""
    return f"adtrain.cli.{name.replace('-', '_')}"
