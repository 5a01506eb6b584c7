"""Safetensors files with adtrain's metadata, and the start of a training from the weights in one.

The format is that of https://github.com/huggingface/safetensors: the length of the header in 8 bytes, the header in
JSON, the bytes of the arrays without gaps. Reading treats a file's content as untrusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from adtrain import nn
from adtrain.config import records
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.core.types import ArrayType
from adtrain.data.table_encoder import TableEncoder
from adtrain.files import read_file

T = TypeVar("T")

METADATA_KEY = "adtrain"
MAX_NAMED = 4
OPTIMIZER = "optimizer."
"""The prefix of the names of an optimizer's arrays."""

DTYPES = {
    "F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64", "U8": "uint8", "U32": "uint32", "BOOL": "bool"
}  # fmt: skip
"""NumPy names of the supported dtypes, by their safetensors names."""
NAMES = {name: code for code, name in DTYPES.items()}
FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
"""Types of floating point that NumPy has, by their safetensors names."""
BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1), **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4), **dict.fromkeys(("U64", "I64", "F64"), 8),
}  # fmt: skip
"""Bytes of a number, by the safetensors names of all dtypes that a file may hold."""
MAX_HEADER = 100_000_000
"""Bytes of the longest header that is read."""
_KNOWN = f"one of {', '.join(DTYPES)}"
_ORDER = ("int64", "float64", "float32", "uint32", "int32", "uint8", "bool")


def encode(tensors: Mapping[str, np.ndarray], about: object) -> bytes:
    """The file's content: the same bytes for the same arrays and metadata `about`, a dataclass."""
    return b"".join(parts(tensors, about))


def parts(tensors: Mapping[str, np.ndarray], about: object) -> list[bytes | memoryview]:
    """The file's content as consecutive parts: arrays and metadata `about`, a dataclass."""
    return parts_with(tensors, {METADATA_KEY: json.dumps(records.plain(about), allow_nan=False)})


def parts_with(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """A file's content as consecutive parts, without a copy of arrays that are contiguous.

    Arrays are sorted by dtype, the largest first, then by name, as the package safetensors sorts them. The header is
    padded to 8 bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end, arrays = 0, []
    for name, x in sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype.name), item[0])):
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype.name], "shape": list(x.shape), "data_offsets": [begin, end]}
        arrays.append(np.ascontiguousarray(x).data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *arrays]


def named(*trees: object, prefix: str = "") -> dict[str, Any]:
    """The leaves of trees by their names from `tree.paths`. A model's names are those of torch.nn.Sequential."""
    return {prefix + path: leaf for x in trees for path, leaf in zip(tree.paths(x), tree.leaves(x), strict=True)}


@dataclass(frozen=True)
class _Stored:
    """An array in a file: the safetensors name of its dtype, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def _decode(content: bytes) -> tuple[dict[str, str], dict[str, _Stored]]:
    """The metadata and the arrays of a file, whose bytes are not copied.

    Raises ValueError where the header is damaged, or the arrays do not fill the rest of the file without gaps.
    """
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(len(content) - 8, MAX_HEADER):
        raise ValueError("the file ends within its header, or the header is too long")
    header = json.loads(str(content[8 : 8 + size], "utf-8"), object_pairs_hook=_distinct)
    if not isinstance(header, dict):
        raise ValueError("the header is not a mapping")
    metadata = header.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())):
        raise ValueError("the metadata is not a mapping of texts")
    "".join((*header, *metadata, *metadata.values())).encode()  # no surrogates
    data, found = memoryview(content)[8 + size :], {}
    for name, entry in header.items():
        if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
            raise ValueError(f"{_quoted(name)} lacks a dtype, a shape or offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not (isinstance(dtype, str) and dtype in BYTES and _sizes(shape) and _sizes(offsets) and len(offsets) == 2):
            raise ValueError(f"{_quoted(name)} has an unknown dtype, or a shape or offsets that are no sizes")
        if offsets[1] - offsets[0] != math.prod(shape) * BYTES[dtype]:
            raise ValueError(f"{_quoted(name)} has offsets that do not fit its shape")
        found[name] = (offsets, _Stored(dtype, tuple(shape), data[slice(*offsets)]))
    end = 0
    for begin, after in sorted(offsets for offsets, _ in found.values()):
        if begin != end:
            raise ValueError("arrays overlap, or leave a gap")
        end = after
    if end != len(data):
        raise ValueError(f"found {len(data)} bytes of arrays, expected {end}")
    return metadata, {name: stored for name, (_, stored) in found.items()}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def _numbers(tensor: _Stored, dtype: Any) -> np.ndarray:
    """The numbers in one row. Copied only where the file does not align them."""
    return np.require(np.frombuffer(tensor.data, dtype), requirements="A")


class TensorFile:
    """An open file: its metadata, and its arrays after a check of their names, shapes and dtypes.

    The constructor raises AdtrainError where the file cannot be read or is damaged; with `of_adtrain` also where it was
    not written by adtrain.
    """

    def __init__(self, path: Path, of_adtrain: bool = True) -> None:
        self.path = path
        content = read_file(path)  # not memory-mapped: a file that is truncated meanwhile would end the process
        try:
            metadata, self._tensors = _decode(content)
        except (ValueError, RecursionError) as error:
            raise AdtrainError(f"{path}: cannot be read as safetensors ({' '.join(str(error).split())})") from None
        if not of_adtrain:
            return
        try:
            self._metadata = metadata[METADATA_KEY]
        except KeyError:
            raise AdtrainError(f"{path}: found no adtrain metadata, expected a file that adtrain wrote") from None

    def metadata(self, kind: type[T]) -> T:
        """The metadata as a dataclass. Raises AdtrainError where a value is missing or wrong."""
        found: T = records.parse(kind, self._metadata, f"{self.path}: metadata")
        return found

    def types(self) -> dict[str, str]:
        """The type of each array according to the header, such as `float32[3, 32]`."""
        found = {}
        for name, tensor in self._tensors.items():
            found[name] = f"{DTYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}"
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array according to the header."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def floats(self, name: str) -> np.ndarray:
        """Read an array of floating point; numbers of 16 bits become float32.

        Raises AdtrainError where it has another dtype, or holds NaN or infinity.
        """
        tensor = self._tensors[name]
        if tensor.dtype == "BF16":  # the upper half of a float32
            x = (_numbers(tensor, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif tensor.dtype in FLOATS:
            x = _numbers(tensor, FLOATS[tensor.dtype])
        else:
            expected = f"one of {', '.join(FLOATS)}, BF16"
            raise AdtrainError(f"{self.path}: {_quoted(name)} has the dtype {tensor.dtype}, expected {expected}")
        if not np.isfinite(x).all():
            raise AdtrainError(f"{self.path}: {_quoted(name)} holds numbers that are not finite")
        return np.asarray(x, np.float32 if tensor.dtype == "F16" else x.dtype).reshape(tensor.shape)

    def read(
        self, expected: Mapping[str, Any], what: str, others: str | None = None, finite: bool = True
    ) -> dict[str, np.ndarray]:
        """Read the arrays named in `expected`, whose values give the required shapes and dtypes.

        No array is read before all types are checked. Raises AdtrainError, which lists the arrays that are missing,
        different or unexpected for `what`. Further arrays are allowed if their names begin with `others`.
        """
        found = self.types()
        wrong = differences(found, {name: str(ArrayType(x.shape, x.dtype)) for name, x in expected.items()}, others)
        if wrong:
            raise AdtrainError(f"{self.path}: does not fit {what}: {'; '.join(wrong)}")
        return self.arrays(expected, finite)

    def arrays(self, names: Mapping[str, Any] | Sequence[str], finite: bool = True) -> dict[str, np.ndarray]:
        """Read the arrays with these names. Raises AdtrainError where one has a dtype that adtrain does not have, or,
        with `finite`, holds NaN or infinity."""
        arrays = {}
        for name in names:
            tensor = self._tensors[name]
            if tensor.dtype not in DTYPES:
                raise AdtrainError(f"{self.path}: {_quoted(name)} has the dtype {tensor.dtype}, expected {_KNOWN}")
            arrays[name] = _numbers(tensor, DTYPES[tensor.dtype]).reshape(tensor.shape)
        for name, x in arrays.items():
            if finite and not np.isfinite(x).all():
                raise AdtrainError(f"{self.path}: {name} holds numbers that are not finite")
        return arrays


def differences(found: Mapping[str, str], expected: Mapping[str, str], others: str | None = None) -> list[str]:
    """The differences between two sets of array types by name, as text: `missing 0.weight, 0.bias`, and so on."""
    missing = [name for name in expected if name not in found]
    extra = sorted(x for x in found if x not in expected and not (others is not None and x.startswith(others)))
    unlike = [f"{x} is {found[x]}, expected {kind}" for x, kind in expected.items() if found.get(x, kind) != kind]
    return in_words(missing, extra, unlike)


def in_words(missing: Sequence[str], extra: Sequence[str], unlike: Sequence[str]) -> list[str]:
    """Names of arrays that are missing, are not expected, and descriptions of others, as texts."""
    wrong = {"missing ": missing, "unexpected ": [_quoted(name) for name in extra], "": unlike}
    return [f"{word}{_listed(names)}" for word, names in wrong.items() if names]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _quoted(name: str) -> str:
    """An untrusted name from a file, shortened and escaped to fit on one line."""
    short = name if len(name) <= 60 else f"{name[:57]}..."
    return short if short.isprintable() and short else repr(short)


MODEL = "model.safetensors"


@dataclass(frozen=True)
class Names:
    """What the outputs and the inputs of a network mean, in the metadata of a model file or checkpoint."""

    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    encoder: TableEncoder | None = None

    @property
    def outputs(self) -> Sequence[str]:
        return self.classes or self.targets

    @property
    def inputs(self) -> Sequence[str]:
        return () if self.encoder is None else self.encoder.features


def names_of(path: Path) -> Names:
    """The names in `path`, as `weights` takes it; empty ones where it has none. Raises AdtrainError as `weights`."""
    return _file(path).metadata(Names)


def _file(path: Path) -> TensorFile:
    return TensorFile(path / MODEL if path.is_dir() else path)


def initial_weights(path: Path, params: nn.Params, statistics: nn.State, partial: bool) -> tuple[nn.Params, nn.State]:
    """Replace `params` and `statistics` by the arrays in `path`: a run's folder, a model file or a checkpoint.

    With `partial`, an array stays as it is if the file has none of its name, shape and dtype. So do the arrays that
    `nn.LowRankSequential` adds, if the file has none of them.

    Raises AdtrainError where the file cannot be read, or does not fit (with `partial`: no array fits); lists the
    differences.
    """
    file = _file(path)
    types = file.types()
    expected = {x: y for x, y in named(params, statistics).items() if x in types or not nn.is_low_rank(x)}
    wanted = expected
    if partial:
        wanted = {name: x for name, x in expected.items() if types.get(name) == str(ArrayType(x.shape, x.dtype))}
    if not wanted:
        raise AdtrainError(f"{file.path}: found no array with the name, shape and dtype of one in the config's network")
    arrays = file.read(wanted, "the config's network", others="" if partial else OPTIMIZER)
    return replaced(params, statistics, arrays)


def replaced(params: nn.Params, statistics: nn.State, arrays: Mapping[str, np.ndarray]) -> tuple[nn.Params, nn.State]:
    """`params` and `statistics` with some arrays replaced, by name."""
    found = {**named(params, statistics), **{name: array(x) for name, x in arrays.items()}}
    trees: tuple[nn.Params, nn.State] = tree.unflatten(tree.flatten((params, statistics))[1], list(found.values()))
    return trees
