"""A page that runs a trained network, as WebAssembly within it, on what is drawn or dropped."""

from __future__ import annotations

import base64
import json

from markupsafe import Markup

from adtrain.core.errors import AdtrainError
from adtrain.data.digit_image import DARK
from adtrain.export.c.wasm import Module
from adtrain.export.evaluation import size_text
from adtrain.templates import environment
from adtrain.training import TrainedModel
from adtrain.training.inputs import is_of_mnist


def encode(trained: TrainedModel, module: Module) -> bytes:
    """The page with the network's `module`: one file, which loads nothing else.

    Raises AdtrainError for a network whose input is not a grey image of bytes, or whose output is not a class.
    """
    about = module.interface
    channels, height, width = about.image
    is_image = about.c_type == "uint8_t" and channels == 1 and min(height, width) > 1
    if not is_image or not about.chooses or len(about.outputs) != 1:
        found = f"{size_text(about.image)} {'bytes' if about.c_type == 'uint8_t' else 'numbers'}"
        raise AdtrainError(f"a page draws grey images and shows classes; this run takes {found}; write a .wasm file")
    centred = is_of_mnist(trained)
    described = {
        "height": height,
        "width": width,
        "labels": about.labels,
        "first": module.first,
        "centred": centred,
        "dark": trained.network.mean[0] < DARK,
    }
    text = (
        environment()
        .get_template("demo.html.j2")
        .render(
            title=trained.config.name,
            note=f"The network runs in this page: {short_size(module)}. It sends nothing.",
            height=height,
            width=width,
            centred=centred,
            first=size_text(module.first),
            about=Markup(script_text(described)),
            program=base64.b64encode(module.content).decode(),
        )
    )
    return text.encode()


def script_text(value: object) -> str:
    """A value as JSON that can stand in a script: no character ends it or begins a comment."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def short_size(module: Module) -> str:
    return f"{len(module.content) / 1000:,.0f} kB of WebAssembly, {module.memory / 1000:,.0f} kB of memory"
