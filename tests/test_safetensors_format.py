"""The reader of safetensors files against the package safetensors."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from adtrain.core.errors import AdtrainError
from adtrain.training import tensor_file

DTYPES = st.sampled_from(sorted(tensor_file.BYTES))
SIZES = st.lists(st.integers(0, 3), max_size=3)
WRONG: st.SearchStrategy[Any] = st.sampled_from(
    [None, -1, 1.5, True, "F32", [], [0], [0, 4, 8], [4, 0], [8, 12], [2**64, 2**64 + 4], {}]
)
PATHS = st.sampled_from(["dtype", "shape", "data_offsets", "other"])


def file_of(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """The header of arrays that follow each other, and their bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(st.text(max_size=3), max_size=3, unique=True)):
        dtype, shape = draw(DTYPES), draw(SIZES)
        begin, end = end, end + math.prod(shape) * tensor_file.BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return header, end


def read_by_both(path: Path, content: bytes) -> tuple[Any, Any]:
    """The arrays by the package and by adtrain: names with dtype, shape and bytes. None where the file is refused."""
    theirs: Any = None
    ours: Any = None
    with contextlib.suppress(SafetensorError):
        theirs = {name: (x["dtype"], tuple(x["shape"]), bytes(x["data"])) for name, x in deserialize(content)}
    path.write_bytes(content)
    with contextlib.suppress(AdtrainError):
        file = tensor_file.TensorFile(path, of_adtrain=False)
        ours = {name: (x.dtype, x.shape, bytes(x.data)) for name, x in file._tensors.items()}
    return theirs, ours


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "x.safetensors"


@given(headers(), st.binary(min_size=0, max_size=64))
def test_a_file_is_read_as_by_the_package(path: Path, given: tuple[dict[str, Any], int], noise: bytes) -> None:
    header, size = given
    data = (noise * size)[:size].ljust(size, b"\0")
    theirs, ours = read_by_both(path, file_of(header, data))
    assert theirs == ours
    assert ours is not None


@given(headers(), st.data())
def test_what_the_package_refuses_is_refused(
    path: Path, given: tuple[dict[str, Any], int], data: st.DataObject
) -> None:
    header, size = given
    change = data.draw(st.sampled_from(["value", "size", "cut", "length", "metadata", "twice"]))
    content = file_of(header, bytes(size))
    if change == "value" and header:
        header[data.draw(st.sampled_from(sorted(header)))][data.draw(PATHS)] = data.draw(WRONG)
        content = file_of(header, bytes(size))
    elif change == "size":
        content = file_of(header, bytes(data.draw(st.integers(0, 64))))
    elif change == "cut":
        content = content[: data.draw(st.integers(0, len(content)))]
    elif change == "length":
        content = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + content[8:]
    elif change == "metadata":
        content = file_of({"__metadata__": data.draw(WRONG | st.just({"a": 1})), **header}, bytes(size))
    elif change == "twice" and header:
        text = json.dumps(header).encode()
        content = file_of(text[:-1] + b", " + text[1:], bytes(size))
    theirs, ours = read_by_both(path, content)
    assert ours is None or ours == theirs


def test_numbers_that_are_not_aligned_are_read(path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = {"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    path.write_bytes(file_of(json.dumps(header).encode().ljust(81), x.tobytes()))
    found = tensor_file.TensorFile(path, of_adtrain=False).arrays(["x"])["x"]
    assert found.flags.aligned
    np.testing.assert_array_equal(found, x)
