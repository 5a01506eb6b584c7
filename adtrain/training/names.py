"""Weights of other programs: the names of their arrays, as patterns, in both directions.

A row of a table maps arrays of the network to arrays of a file:

    "decoder_layer{i}.linear1.weight": "transformer.h.{i}.mlp.c_fc.weight transposed"

Left are paths of the network, with positions ("2.linear1.weight") or with kinds that are counted from 0
("decoder_layer0.linear1.weight"). {i} is a number and {i+2} a number that is larger by 2; * is any text. Right is a
name, or a list of names of arrays that are joined along the first axis; "transposed" and "reshaped" follow a name,
and change nothing of a bias.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import nn
from adtrain.core.errors import AdtrainError
from adtrain.training.tensor_file import MODEL, TensorFile, in_words

INDEX = "model.safetensors.index.json"
CHANGES = ("transposed", "reshaped", "first rows")
NUMBER = re.compile(r"\{([a-z])([+-]\d+)?\}")

Rows = Mapping[str, str | Sequence[str]]
"""From patterns of the network's paths to names, or lists of names, in a file."""


@dataclass(frozen=True)
class Table:
    """The names of a kind of network.

    Attributes:
        prefix: the beginning of names that some files leave out.
        ignored: a regular expression of names that are no weights.
    """

    rows: Rows
    prefix: str = ""
    ignored: str = ""


@dataclass(frozen=True)
class Source:
    """The arrays of a file that make one of the network: joined along the first axis, or one array that is changed."""

    names: tuple[str, ...]
    change: str = ""

    def shape(self, shapes: Sequence[nn.Shape], wanted: nn.Shape) -> nn.Shape | None:
        """The shape that arrays of these shapes make; None where they cannot be joined."""
        first = shapes[0]
        if self.change == "transposed":
            return first[::-1]
        if self.change == "reshaped":
            return wanted if prod(first) == prod(wanted) else first
        if self.change == "first rows":
            return (min(first[0], wanted[0]), *first[1:]) if first and wanted else first
        if any(not shape or shape[1:] != first[1:] for shape in shapes) and len(shapes) > 1:
            return None
        return first if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *first[1:])

    def read(self, arrays: Sequence[np.ndarray], wanted: nn.Shape) -> np.ndarray:
        """The network's array."""
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if self.change == "transposed":
            return np.ascontiguousarray(joined.T)
        return joined[: wanted[0]] if self.change == "first rows" else joined.reshape(wanted)

    def written(self, x: np.ndarray, rows: Sequence[int], shapes: Mapping[str, nn.Shape]) -> dict[str, np.ndarray]:
        """The file's arrays: the reverse of `read`. `rows` are those of each, `shapes` those of reshaped arrays."""
        if len(self.names) > 1:
            return dict(zip(self.names, np.split(x, np.cumsum(rows)[:-1]), strict=True))
        (name,) = self.names
        if self.change == "transposed":
            return {name: np.ascontiguousarray(x.T)}
        return {name: x.reshape(shapes.get(name, x.shape))}


def sources(rows: Rows, model: nn.Sequential, paths: Sequence[str]) -> dict[str, Source]:
    """The source of each path of a network for which a row has one.

    Raises AdtrainError for a pattern or a name that cannot be read.
    """
    patterns = [(_pattern(key), _names(value)) for key, value in rows.items()]
    kinds = [layer.kind() for layer in model.layers]
    aliases = [f"{kind}{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]  # "linear0", "relu0", "linear1"
    found: dict[str, Source] = {}
    for path in paths:
        position, _, rest = path.partition(".")
        for (pattern, numbers), (names, change) in patterns:
            match = pattern.fullmatch(path) or pattern.fullmatch(f"{aliases[int(position)]}.{rest}")
            if match is not None:
                values = {letter: int(match[letter]) - offset for letter, offset in numbers.items()}
                texts = [text for group, text in match.groupdict().items() if group.startswith("any")]
                found[path] = Source(tuple(_filled(name, values, texts) for name in names), change)
                break
    return found


def _pattern(key: str) -> tuple[re.Pattern[str], dict[str, int]]:
    """A pattern of paths as a regular expression, and what is added to each of its numbers."""
    numbers: dict[str, int] = {}
    text, end = "", 0
    for match in re.finditer(rf"\*|{NUMBER.pattern}", key):
        text += re.escape(key[end : match.start()])
        end = match.end()
        if match[0] == "*":
            text += f"(?P<any{end}>.+)"
            continue
        if match[1] in numbers:
            raise AdtrainError(f"training.names: found {match[1]} twice in {key!r}, expected once")
        numbers[match[1]] = int(match[2] or 0)
        text += rf"(?P<{match[1]}>\d+)"
    text += re.escape(key[end:])
    if "{" in NUMBER.sub("", key):
        raise AdtrainError(f"training.names: found {key!r}, expected numbers such as {{i}} or {{i+2}}")
    return re.compile(text), numbers


def _names(value: str | Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The names of a row, and the change of the array."""
    if not isinstance(value, str):
        return tuple(value), ""
    for change in CHANGES:
        if value.endswith(f" {change}"):
            return (value.removesuffix(f" {change}"),), change
    return (value,), ""


def _filled(name: str, numbers: Mapping[str, int], texts: Sequence[str]) -> str:
    """A name with its numbers and texts."""
    for text in texts:
        name = name.replace("*", text, 1)

    def number(match: re.Match[str]) -> str:
        if match[1] not in numbers:
            expected = " or ".join(f"{{{letter}}}" for letter in numbers) or "no number: its path has none"
            raise AdtrainError(f"training.names: found {match[0]} in {name!r}, expected {expected}")
        return str(numbers[match[1]] + int(match[2] or 0))

    return NUMBER.sub(number, name)


def read(
    path: Path, table: Table, model: nn.Sequential, expected: Mapping[str, Any], partial: bool
) -> dict[str, np.ndarray]:
    """The arrays of a network, whose shapes `expected` has by path, from a file of another program or its folder.

    Numbers of 16 bits become float32. With `partial` an array is left out if the file has none for it that fits.

    Raises AdtrainError where a file cannot be read or does not fit, with all names that are missing, unexpected or of
    another shape.
    """
    files = _files(path)
    shapes = {name: shape for file in files for name, shape in file.shapes().items()}
    without = table.prefix and not any(name.startswith(table.prefix) for name in shapes)
    found = sources(table.rows, model, list(expected))
    if without:
        found = {
            at: Source(tuple(name.removeprefix(table.prefix) for name in source.names), source.change)
            for at, source in found.items()
        }
    missing, unlike, fitting = [], [], {}
    for at, x in expected.items():
        source = found.get(at)
        absent = [] if source is None else [name for name in source.names if name not in shapes]
        if source is None or absent:
            missing.append(f"{at} (no row of training.names has it)" if source is None else absent[0])
            continue
        joined = source.shape([shapes[name] for name in source.names], x.shape)
        if joined != x.shape:
            given = " and ".join(str(shapes[name]) for name in source.names)
            makes = f" {source.change}" if source.change else ""
            unlike.append(f"{', '.join(source.names)} is {given}{makes}, expected {x.shape} for {at}")
        else:
            fitting[at] = source
    used = {name for source in found.values() for name in source.names}
    extra = [name for name in shapes if name not in used and not re.fullmatch(table.ignored, name)]
    if partial and not fitting:
        raise AdtrainError(f"{path}: found no array with the name and shape of one in the config's network")
    if not partial and (missing or unlike or extra):
        raise AdtrainError(f"{path}: does not fit the config's network: {'; '.join(in_words(missing, extra, unlike))}")
    holders = {name: file for file in files for name in file.shapes()}
    arrays: dict[str, np.ndarray] = {}
    for at, source in fitting.items():
        parts = [holders[name].floats(name) for name in source.names]
        arrays[at] = source.read(parts, expected[at].shape).astype(expected[at].dtype)
    return arrays


def _files(path: Path) -> list[TensorFile]:
    """The safetensors files at `path`: a file, or those in a folder. Others, such as pickles, are never read."""
    if not path.is_dir():
        return [TensorFile(path, of_adtrain=False)]
    parts = sorted(path.glob("model-*-of-*.safetensors")) if (path / INDEX).is_file() else []
    if not parts and not (path / MODEL).is_file():
        raise AdtrainError(f"{path}: found no {MODEL}, expected one; other formats, such as pickles, are never read")
    return [TensorFile(part, of_adtrain=False) for part in parts or [path / MODEL]]


def written(
    table: Table, model: nn.Sequential, shape: nn.Shape, arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, nn.Shape] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The arrays of a network for input samples of `shape` by the names of another program.

    `shapes` has those of arrays that are reshaped. Raises AdtrainError for an array that no row has.
    """
    layers = {name: (layer, size) for name, layer, size in nn.layers(model, shape)}
    found = sources(table.rows, model, list(arrays))
    result: dict[str, np.ndarray] = {}
    for at, x in arrays.items():
        if at not in found:
            raise AdtrainError(f"the array {at} has no name in this format")
        rows: Sequence[int] = ()
        if len(found[at].names) > 1:
            layer, size = layers[at.rpartition(".")[0]]
            assert isinstance(layer, nn.MultiheadAttention)
            rows = layer.projected_rows(size[-1])
        result |= found[at].written(x, rows, shapes or {})
    return result


def _projections(layer: str, place: str, names: Sequence[str]) -> Rows:
    """The rows of a layer's projections to queries, keys and values, which the network has in one array."""
    return {
        f"{layer}.self_attn.in_proj_{kind}": [f"{place}{name}.{kind}" for name in names] for kind in ("weight", "bias")
    }


def _resnet(blocks: Sequence[int], convolutions: int) -> Table:
    """torchvision's ResNet: `blocks` has the number of blocks of each stage. A block has 2 or 3 `convolutions`."""
    rows: dict[str, str] = {"conv2d0.weight": "conv1.weight", "batch_norm2d0.*": "bn1.*", "linear0.*": "fc.*"}
    places = [(stage, block) for stage, count in enumerate(blocks, start=1) for block in range(count)]
    for i, (stage, block) in enumerate(places):
        inside = f"layer{stage}.{block}"
        for n in range(convolutions):
            rows[f"residual{i}.body.{3 * n}.weight"] = f"{inside}.conv{n + 1}.weight"
            rows[f"residual{i}.body.{3 * n + 1}.*"] = f"{inside}.bn{n + 1}.*"
        rows[f"residual{i}.shortcut.0.weight"] = f"{inside}.downsample.0.weight"
        rows[f"residual{i}.shortcut.1.*"] = f"{inside}.downsample.1.*"
    return Table(rows, ignored=r".*num_batches_tracked")


_GPT2, _LLAMA, _VIT = "transformer.h.{i}.", "model.layers.{i}.", "vit.encoder.layer.{i}."
_TORCHVISION = "encoder.layers.encoder_layer_{i}."

TABLES: dict[str, Table] = {
    "gpt2": Table(
        {
            "embedding0.weight": "transformer.wte.weight",
            "positional_embedding0.weight": "transformer.wpe.weight first rows",
            "decoder_layer{i}.norm1.*": f"{_GPT2}ln_1.*",
            "decoder_layer{i}.self_attn.in_proj_*": f"{_GPT2}attn.c_attn.* transposed",
            "decoder_layer{i}.self_attn.out_proj.*": f"{_GPT2}attn.c_proj.* transposed",
            "decoder_layer{i}.norm2.*": f"{_GPT2}ln_2.*",
            "decoder_layer{i}.linear1.*": f"{_GPT2}mlp.c_fc.* transposed",
            "decoder_layer{i}.linear2.*": f"{_GPT2}mlp.c_proj.* transposed",
            "layer_norm0.*": "transformer.ln_f.*",
            "linear0.weight": "lm_head.weight",
        },
        prefix="transformer.",
        ignored=r".*attn\.(masked_)?bias",
    ),
    "llama": Table(
        {
            "embedding0.weight": "model.embed_tokens.weight",
            "decoder_layer{i}.norm1.weight": f"{_LLAMA}input_layernorm.weight",
            **_projections("decoder_layer{i}", f"{_LLAMA}self_attn.", ("q_proj", "k_proj", "v_proj")),
            "decoder_layer{i}.self_attn.out_proj.*": f"{_LLAMA}self_attn.o_proj.*",
            "decoder_layer{i}.self_attn.*_norm.weight": f"{_LLAMA}self_attn.*_norm.weight",
            "decoder_layer{i}.norm2.weight": f"{_LLAMA}post_attention_layernorm.weight",
            "decoder_layer{i}.gate.*": f"{_LLAMA}mlp.gate_proj.*",
            "decoder_layer{i}.linear1.*": f"{_LLAMA}mlp.up_proj.*",
            "decoder_layer{i}.linear2.*": f"{_LLAMA}mlp.down_proj.*",
            "rms_norm0.weight": "model.norm.weight",
            "linear0.weight": "lm_head.weight",
        },
        prefix="model.",
        ignored=r".*rotary_emb\.inv_freq",
    ),
    "vit": Table(
        {
            "linear0.weight": "vit.embeddings.patch_embeddings.projection.weight reshaped",
            "linear0.bias": "vit.embeddings.patch_embeddings.projection.bias",
            "class_token0.weight": "vit.embeddings.cls_token reshaped",
            "positional_embedding0.weight": "vit.embeddings.position_embeddings reshaped",
            "transformer_encoder_layer{i}.norm1.*": f"{_VIT}layernorm_before.*",
            **_projections("transformer_encoder_layer{i}", f"{_VIT}attention.attention.", ("query", "key", "value")),
            "transformer_encoder_layer{i}.self_attn.out_proj.*": f"{_VIT}attention.output.dense.*",
            "transformer_encoder_layer{i}.norm2.*": f"{_VIT}layernorm_after.*",
            "transformer_encoder_layer{i}.linear1.*": f"{_VIT}intermediate.dense.*",
            "transformer_encoder_layer{i}.linear2.*": f"{_VIT}output.dense.*",
            "layer_norm0.*": "vit.layernorm.*",
            "linear1.*": "classifier.*",
        },
        prefix="vit.",
        ignored=r"(vit\.)?pooler\..*",
    ),
    "vit_torchvision": Table(
        {
            "linear0.weight": "conv_proj.weight reshaped",
            "linear0.bias": "conv_proj.bias",
            "class_token0.weight": "class_token reshaped",
            "positional_embedding0.weight": "encoder.pos_embedding reshaped",
            "transformer_encoder_layer{i}.norm1.*": f"{_TORCHVISION}ln_1.*",
            "transformer_encoder_layer{i}.self_attn.*": f"{_TORCHVISION}self_attention.*",
            "transformer_encoder_layer{i}.norm2.*": f"{_TORCHVISION}ln_2.*",
            "transformer_encoder_layer{i}.linear1.*": f"{_TORCHVISION}mlp.0.*",
            "transformer_encoder_layer{i}.linear2.*": f"{_TORCHVISION}mlp.3.*",
            "layer_norm0.*": "encoder.ln.*",
            "linear1.*": "heads.head.*",
        }
    ),
    "resnet18": _resnet((2, 2, 2, 2), 2),
    "resnet50": _resnet((3, 4, 6, 3), 3),
}
"""By the value of `training.names`: names of the packages transformers (gpt2, llama, vit) and torchvision (others)."""


def table_of(given: str | Rows) -> Table:
    """The table of a value of `training.names`: the name of one, or its rows."""
    return TABLES[given] if isinstance(given, str) else Table(given)
