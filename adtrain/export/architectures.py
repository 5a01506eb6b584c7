"""A trained network for other programs: its weights as safetensors, and folders of transformers and torchvision.

`encode_weights` writes the arrays by the names that the run's model file has, which are those of torch.nn.Sequential.
`training.init_from` reads the file, and so does `load_state_dict` of the same network in PyTorch. A layer's name is its
position in the list of layers. A `residual` adds `body.` or `shortcut.`, a `concat` or `add` the position of the
branch. Each of these contains a Sequential: `3.body.0.weight`, `4.1.0.bias`.

`read` gives the layers that a config.json describes. `encode` writes the folder of a trained network. It describes the
network as a config.json, reads that again, and refuses a network whose layers are others than those read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import config, nn
from adtrain.config.specs import LAYERS
from adtrain.core.errors import AdtrainError
from adtrain.data import tokenizer
from adtrain.files import read_file
from adtrain.training import TrainedModel, names, tensor_file
from adtrain.training.tasks import Regression
from adtrain.version import __version__

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu",
               "silu": "silu", "swish": "silu", "relu2": "squared_relu"}  # fmt: skip
"""Names of adtrain by those of transformers."""
INITIAL = ("dropout", "weight_init", "init_gain", "out_init_gain", "depth", "embed_dim", "d_model", "in_features")
"""Options that do not change what a trained network computes."""


@dataclass(frozen=True)
class Architecture:
    """The layers of a network of another program.

    Attributes:
        names: the value of `training.names` for its weights.
        layers: as in a config.
        input: the shape of an image; () for tokens.
        length: the largest number of tokens; 0 for images.
    """

    names: str
    layers: list[Any]
    input: nn.Shape = ()
    length: int = 0

    def with_outputs(self, count: int) -> Architecture:
        """The same with a last layer of `count` outputs."""
        return replace(self, layers=[*self.layers[:-1], {"linear": count}])

    def model(self) -> nn.Sequential:
        return nn.Sequential(*map(_module, self.layers))


WORDS: dict[Any, str] = {
    int: "an integer in [1, 2^31)", float: "a number", bool: "true or false", str: "a string", dict: "a mapping"
}  # fmt: skip
"""The types of values in a config.json, in words."""
MOST_LAYERS = 10_000


class Settings:
    """The values of a config.json, which is not trusted."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def get(self, name: str, kind: type, default: Any = ...) -> Any:
        """The value of this type. Raises AdtrainError where it is missing or of another type."""
        value: Any = self.values.get(name, default)
        if value is ...:
            raise AdtrainError(f"{self.place}: found no {name}")
        if value is None and default is None:
            return None
        fits = isinstance(value, (kind, int) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fits or (kind is int and not 1 <= int(value) < 2**31):
            raise AdtrainError(f"{self.place}: {name} is {value!r:.60}, expected {WORDS[kind]}")
        return value

    def repeated(self, layer: Any, name: str, default: int) -> list[Any]:
        """A layer as often as the setting says."""
        if (count := self.get(name, int, default)) > MOST_LAYERS:
            raise AdtrainError(f"{self.place}: {name} is {count}, expected at most {MOST_LAYERS}")
        return [layer] * int(count)

    def require(self, **expected: Any) -> None:
        """Raise AdtrainError for a value that adtrain's layers do not have."""
        for name, value in expected.items():
            if self.values.get(name, value) not in (value, None):
                raise AdtrainError(f"{self.place}: {name} is {self.values[name]!r:.60}, expected {value!r}")

    def activation(self, name: str, default: str) -> str:
        found = self.get(name, str, default)
        if found not in ACTIVATIONS:
            raise AdtrainError(f"{self.place}: {name} is {found!r:.60}, expected one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[found]


def _gpt2(s: Settings) -> Architecture:
    s.require(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width, dropout = s.get("n_embd", int, 768), s.get("embd_pdrop", float, 0.1)
    layer = {
        "num_heads": s.get("n_head", int, 12),
        "dim_feedforward": s.get("n_inner", int, None) or 4 * width,
        "activation": s.activation("activation_function", "gelu_new"),
        "norm_eps": s.get("layer_norm_epsilon", float, 1e-5),
        "dropout": s.get("resid_pdrop", float, 0.1),
    }
    layers = ["positional_embedding", *([{"dropout": dropout}] if dropout else [])]
    layers += s.repeated({"decoder_layer": layer}, "n_layer", 12)
    layers.append({"layer_norm": {"eps": layer["norm_eps"]}})
    vocabulary = s.get("vocab_size", int, 50257)
    return Architecture("gpt2", _tokens(s, vocabulary, width, layers, True), length=s.get("n_positions", int, 1024))


def _tokens(s: Settings, vocabulary: int, width: int, layers: list[Any], tied: bool) -> list[Any]:
    """The layers between an embedding and the linear layer that gives the logits."""
    embedding = {"num_embeddings": vocabulary, "embedding_dim": width, "weight_init": "normal", "init_gain": 0.02}
    shared = {"tied": True} if s.get("tie_word_embeddings", bool, tied) else {}
    return [{"embedding": embedding}, *layers, {"linear": {"out_features": vocabulary, "bias": False, **shared}}]


def _llama(s: Settings) -> Architecture:
    """Also Mistral, whose attention has a window, and Qwen 3, which normalises queries and keys."""
    kind = s.get("model_type", str)
    width, heads = s.get("hidden_size", int, 4096), s.get("num_attention_heads", int, 32)
    rotary = s.get("rope_parameters", dict, None) or {"rope_theta": s.get("rope_theta", float, 10_000.0)}
    Settings(rotary, f"{s.place}: rope_parameters").require(rope_type="default")
    s.require(
        hidden_act="silu", rope_scaling=None, head_dim=width // heads, use_sliding_window=False,
        mlp_bias=s.get("attention_bias", bool, False),
    )  # fmt: skip
    layer = {
        "num_heads": heads,
        "dim_feedforward": s.get("intermediate_size", int, 11008),
        "activation": "swiglu",
        "norm": "rms_norm",
        "norm_eps": s.get("rms_norm_eps", float, 1e-6),
        "bias": s.get("attention_bias", bool, False),
        "rotary_base": float(Settings(rotary, s.place).get("rope_theta", float, 10_000.0)),
    }
    if (shared := s.get("num_key_value_heads", int, None)) not in (None, heads):
        layer["num_key_value_heads"] = shared
    if kind == "mistral" and (window := s.get("sliding_window", int, None)):
        layer["window"] = window
    if kind == "qwen3":
        layer["qk_norm"] = True
        s.require(rms_norm_eps=nn.QK_NORM_EPS)
    layers = s.repeated({"decoder_layer": layer}, "num_hidden_layers", 32)
    layers.append({"rms_norm": {"eps": layer["norm_eps"]}})
    length = s.get("max_position_embeddings", int, 2048)
    return Architecture("llama", _tokens(s, s.get("vocab_size", int, 32_000), width, layers, False), length=length)


def _vit(s: Settings) -> Architecture:
    s.require(qkv_bias=True)
    width, size, patch = s.get("hidden_size", int, 768), s.get("image_size", int, 224), s.get("patch_size", int, 16)
    layer = {
        "nhead": s.get("num_attention_heads", int, 12),
        "dim_feedforward": s.get("intermediate_size", int, 3072),
        "dropout": s.get("hidden_dropout_prob", float, 0.0),
        "activation": s.activation("hidden_act", "gelu"),
        "layer_norm_eps": s.get("layer_norm_eps", float, 1e-12),
        "norm_first": True,
    }
    layers = [{"patches": patch}, {"linear": width}, "class_token", "positional_embedding"]
    layers += s.repeated({"transformer_encoder_layer": layer}, "num_hidden_layers", 12)
    layers += [{"layer_norm": {"eps": layer["layer_norm_eps"]}}, {"select": [0]}, "flatten", {"linear": _classes(s)}]
    return Architecture(s.get("model_type", str), layers, (s.get("num_channels", int, 3), size, size))


def _classes(s: Settings) -> int:
    return len(s.get("id2label", dict, {})) or s.get("num_labels", int, 2)


def _resnet(s: Settings) -> Architecture:
    kind = s.get("model_type", str)
    blocks = (2, 2, 2, 2) if kind == "resnet18" else (3, 4, 6, 3)
    layers: list[Any] = [*_convolution(64, 7, 2), "relu", {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}]
    channels = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            width, stride = 64 * 2**stage, 2 if stage and not block else 1
            if kind == "resnet18":
                out, parts = width, [(width, 3, stride), (width, 3, 1)]
            else:
                out, parts = 4 * width, [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
            body: list[Any] = []
            for part in parts:
                body += [*(["relu"] if body else []), *_convolution(*part)]
            shortcut = {} if (out, stride) == (channels, 1) else {"shortcut": _convolution(out, 1, stride)}
            layers += [{"residual": {"body": body, **shortcut}}, "relu"]
            channels = out
    layers += [{"adaptive_avg_pool2d": 1}, "flatten", {"linear": _classes(s)}]
    size = s.get("image_size", int, 224)
    return Architecture(kind, layers, (s.get("num_channels", int, 3), size, size))


def _convolution(channels: int, size: int, stride: int) -> list[Any]:
    options = {"out_channels": channels, "kernel_size": size, "stride": stride, "padding": size // 2, "bias": False}
    return [{"conv2d": options}, "batch_norm2d"]


READERS: dict[str, Callable[[Settings], Architecture]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "qwen3": _llama, "vit": _vit, "vit_torchvision": _vit,
    "resnet18": _resnet, "resnet50": _resnet,
}  # fmt: skip
"""By `model_type`, which torchvision's networks have in the folders that adtrain writes."""


def read(folder: Path) -> Architecture:
    """The network that the config.json in a folder describes. Raises AdtrainError where adtrain has no such network."""
    path = folder / CONFIG if folder.is_dir() else folder
    try:
        values = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise AdtrainError(f"{path}: cannot be read as JSON ({' '.join(str(error).split()):.100})") from None
    if not isinstance(values, dict):
        raise AdtrainError(f'{path}: found no mapping, expected one such as {{"model_type": "gpt2"}}')
    return _read(Settings(values, str(path)))


def _read(settings: Settings) -> Architecture:
    kind = settings.get("model_type", str)
    if kind not in READERS:
        raise AdtrainError(f"{settings.place}: model_type is {kind!r:.60}, expected one of {', '.join(READERS)}")
    return READERS[kind](settings)


def encode_weights(trained: TrainedModel) -> bytes:
    """The content of a safetensors file: the same bytes for the same run.

    Its metadata, JSON under one key, are the classes, the targets, the config, and the input's normalisation: division
    by `scale`, then `mean` and `std` per channel; for rows of a table also the encoder of their columns, and for
    tokens the content of `tokenizer.json`. With `data.normalize_targets` a predicted number is
    output * `target_std` + `target_mean`.
    """
    about: dict[str, Any] = {
        "version": __version__,
        "config": config.dump(trained.config),
        "classes": trained.classes,
        "scale": trained.network.scale,
        "mean": trained.network.mean,
        "std": trained.network.std,
        "encoder": trained.encoder,
        "targets": trained.targets,
    }
    if isinstance(trained.network.task, Regression) and trained.network.task.normalized:
        about |= {"target_mean": trained.network.task.mean, "target_std": trained.network.task.std}
    if trained.tokenizer is not None:
        about["tokenizer"] = trained.tokenizer.content
    return tensor_file.encode(named_arrays(trained), about)


def named_arrays(trained: TrainedModel) -> dict[str, np.ndarray]:
    """Parameters and running statistics by name, in the run's precision."""
    return {name: x.numpy() for name, x in tensor_file.named(trained.params, trained.statistics).items()}


def encode(trained: TrainedModel, program: str) -> dict[str, Sequence[bytes | memoryview]]:
    """The files of a folder that transformers or torchvision (`program`) loads, by name, each in parts.

    Raises AdtrainError where the program has no network of these layers.
    """
    model, shape = trained.network.model, trained.network.input_shape
    settings = _transformers(trained) if program == "huggingface" else _torchvision(trained)
    architecture = _read(Settings(settings, settings["model_type"]))
    _require_equal(model, shape, architecture, program)
    arrays = {name: x.astype(np.float32) for name, x in named_arrays(trained).items()}
    tensors = names.written(names.TABLES[architecture.names], model, shape, arrays, _shapes(settings))
    files: dict[str, Any] = {CONFIG: settings}
    if program == "huggingface" and architecture.input and trained.network.scale > 1:
        files[PREPROCESSOR] = _preprocessor(trained)
    found: dict[str, Sequence[bytes | memoryview]]
    found = {name: [json.dumps(values, indent=2).encode() + b"\n"] for name, values in files.items()}
    if program == "huggingface" and trained.tokenizer is not None:
        found[tokenizer.FILE] = [trained.tokenizer.content.encode()]
    return {**found, tensor_file.MODEL: tensor_file.parts_with(tensors, {"format": "pt"})}


def _shapes(settings: Mapping[str, Any]) -> dict[str, nn.Shape]:
    """The shapes of the arrays that a table reshapes."""
    table = names.TABLES[settings["model_type"]].rows if "patch_size" in settings else {}
    if not table:
        return {}
    width, patch = settings["hidden_size"], settings["patch_size"]
    shapes = {
        "class_token0.weight": (1, 1, width),
        "positional_embedding0.weight": (1, (settings["image_size"] // patch) ** 2 + 1, width),
        "linear0.weight": (width, settings["num_channels"], patch, patch),
    }
    return {str(table[at]).removesuffix(" reshaped"): size for at, size in shapes.items()}


def _first(model: nn.Sequential, kind: type[Any], program: str) -> Any:
    """The first layer of this class. Raises AdtrainError where there is none."""
    for layer in model.layers:
        if isinstance(layer, kind):
            return layer
    raise AdtrainError(f"{program} has no network of these layers: found no {kind.kind()}")


def _transformers(trained: TrainedModel) -> dict[str, Any]:
    """The config.json of the network, if its layers are those of one of transformers."""
    model, shape = trained.network.model, trained.network.input_shape
    if any(isinstance(layer, nn.Patches) for layer in model.layers):
        return _vit_settings(trained)
    embedding, layer = (_first(model, kind, "transformers") for kind in (nn.Embedding, nn.DecoderLayer))
    count = sum(isinstance(each, nn.DecoderLayer) for each in model.layers)
    tied = any(isinstance(each, nn.Linear) and each.tied for each in model.layers)
    hidden = layer.dim_feedforward or 4 * embedding.embedding_dim
    common = {"vocab_size": embedding.num_embeddings, "tie_word_embeddings": tied, **_about()}
    if any(isinstance(each, nn.PositionalEmbedding) for each in model.layers):
        dropout = next((each.p for each in model.layers if isinstance(each, nn.Dropout)), 0.0)
        activations = {own: other for other, own in reversed(ACTIVATIONS.items())}
        return {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": embedding.embedding_dim,
            "n_layer": count, "n_head": layer.num_heads, "n_inner": hidden, "n_positions": shape[0],
            "activation_function": activations.get(layer.activation, layer.activation),
            "layer_norm_epsilon": layer.norm_eps, "embd_pdrop": dropout, "resid_pdrop": layer.dropout,
            "attn_pdrop": layer.dropout, "bos_token_id": None, "eos_token_id": None, **common,
        }  # fmt: skip
    if layer.rotary_base is None:
        raise AdtrainError("transformers has no network of these layers: found neither positions nor rotary_base")
    kind, architecture = "llama", "LlamaForCausalLM"
    if layer.qk_norm:
        kind, architecture = "qwen3", "Qwen3ForCausalLM"
    elif layer.window is not None:
        kind, architecture = "mistral", "MistralForCausalLM"
    biases = {"attention_bias": layer.bias, "mlp_bias": layer.bias} if kind == "llama" else {}
    return {
        "model_type": kind, "architectures": [architecture], "hidden_size": embedding.embedding_dim,
        "intermediate_size": hidden, "num_hidden_layers": count, "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_key_value_heads or layer.num_heads,
        "head_dim": embedding.embedding_dim // layer.num_heads, "hidden_act": "silu", "rms_norm_eps": layer.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": layer.rotary_base},
        "rope_theta": layer.rotary_base, "max_position_embeddings": shape[0], "attention_dropout": layer.dropout,
        "sliding_window": layer.window, "bos_token_id": None, "eos_token_id": None, **biases, **common,
    }  # fmt: skip


def _vit_settings(trained: TrainedModel) -> dict[str, Any]:
    model, shape = trained.network.model, trained.network.input_shape
    wanted = nn.Patches, nn.Linear, nn.TransformerEncoderLayer
    patches, linear, layer = (_first(model, kind, "transformers") for kind in wanted)
    if len(shape) != 3 or shape[1] != shape[2] or not isinstance(patches.patch_size, int):
        raise AdtrainError(f"transformers: found images of {shape}, expected square images and patches")
    return {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": linear.out_features,
        "num_hidden_layers": sum(isinstance(each, nn.TransformerEncoderLayer) for each in model.layers),
        "num_attention_heads": layer.nhead, "intermediate_size": layer.dim_feedforward, "hidden_act": layer.activation,
        "hidden_dropout_prob": layer.dropout, "attention_probs_dropout_prob": layer.dropout,
        "layer_norm_eps": layer.layer_norm_eps, "image_size": shape[1], "patch_size": patches.patch_size,
        "num_channels": shape[0], "qkv_bias": True, **_labels(trained), **_about(),
    }  # fmt: skip


def _torchvision(trained: TrainedModel) -> dict[str, Any]:
    """The kind of ResNet that has as many blocks as the network."""
    model, shape = trained.network.model, trained.network.input_shape
    if any(isinstance(layer, nn.Patches) for layer in model.layers):
        return {**_vit_settings(trained), **_normalization(trained), "model_type": "vit_torchvision"}
    blocks = sum(isinstance(layer, nn.Residual) for layer in model.layers)
    kinds = {8: "resnet18", 16: "resnet50"}
    if blocks not in kinds or len(shape) != 3:
        raise AdtrainError(
            f"torchvision has no network of these layers: found {blocks} residual layers, expected 8 or 16"
        )
    size = {"num_channels": shape[0], "image_size": shape[1]}
    return {"model_type": kinds[blocks], **size, **_labels(trained), **_normalization(trained), **_about()}


def _labels(trained: TrainedModel) -> dict[str, Any]:
    labels = trained.classes or trained.targets
    return {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}


def _about() -> dict[str, Any]:
    return {"dtype": "float32", "adtrain_version": __version__}


def _normalization(trained: TrainedModel) -> dict[str, Any]:
    """The network takes (data * rescale_factor - image_mean) / image_std, channel by channel."""
    network = trained.network
    return {"rescale_factor": 1 / network.scale, "image_mean": network.mean, "image_std": network.std}


def _preprocessor(trained: TrainedModel) -> dict[str, Any]:
    """How transformers prepares images (0 to 255) for the network."""
    _, height, width = trained.network.input_shape
    return {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": height, "width": width},
        "do_rescale": True, "do_normalize": True, **_normalization(trained),
    }  # fmt: skip


def _require_equal(model: nn.Sequential, shape: nn.Shape, architecture: Architecture, program: str) -> None:
    """Raise AdtrainError where the network differs from the program's: the first layer or option that does."""
    mine = [child for child in model.children(shape) if not isinstance(child[1], nn.Dropout)]
    theirs = [layer for layer in architecture.model().layers if not isinstance(layer, nn.Dropout)]
    others = [layer.kind() for layer in theirs]
    if [layer.kind() for _, layer, _ in mine] != others:
        raise AdtrainError(
            f"{program}: found layers other than those of {architecture.names}, which are {', '.join(others)}"
        )
    for (name, layer, size), other in zip(mine, theirs, strict=True):
        _require_equal_layer(layer, other, size, f"{program}: layer {name}")


def _require_equal_layer(layer: nn.Module, other: nn.Module, shape: nn.Shape, place: str) -> None:
    if type(layer) is not type(other):
        raise AdtrainError(f"{place}: found {layer.kind()}, expected {other.kind()}")
    if isinstance(layer, nn.Container) and isinstance(other, nn.Container):
        children, others = ({name: child for name, child, _ in each.children(shape)} for each in (layer, other))
        if children.keys() != others.keys():
            found, expected = (", ".join(each) for each in (children, others))
            raise AdtrainError(f"{place}: {layer.kind()}: found {found}, expected {expected}")
        for name, child, inner in layer.children(shape):
            _require_equal_layer(child, others[name], inner, f"{place}.{name}")
        if not isinstance(layer, nn.TransformerLayer):
            return
    # the sizes of a transformer layer are those of its children
    names = ("activation",) if isinstance(layer, nn.TransformerLayer) else [x.name for x in fields(layer)]  # type: ignore[arg-type]
    for name in names:
        value, expected = (_size(getattr(each, name)) for each in (layer, other))
        if name == "num_key_value_heads":
            value, expected = (each.key_value_heads for each in (layer, other))  # type: ignore[attr-defined]
        if name not in INITIAL and value != expected:
            raise AdtrainError(f"{place}: {layer.kind()}: {name} is {value!r}, expected {expected!r}")


def _size(value: Any) -> Any:
    """Sizes (3, 3) and 3 are the same."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _module(value: Any) -> nn.Module:
    """The layer of a value in a list of layers."""
    if isinstance(value, dict) and "residual" in value:
        parts = {name: nn.Sequential(*map(_module, layers)) for name, layers in value["residual"].items()}
        return nn.Residual(**parts)
    kind = value if isinstance(value, str) else next(iter(value))
    spec = LAYERS[kind].model_validate(value)
    made: nn.Module = type(spec).target(**spec.options())
    return made
