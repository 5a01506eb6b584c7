"""DLPack: arrays share memory with NumPy and PyTorch, in both directions."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core import dlpack
from adtrain.core.types import DTYPES

EXAMPLES = [np.ones((2, 3), dtype) for dtype in sorted(DTYPES, key=str)]
EXAMPLES += [np.array(1.5), np.zeros((0, 4), np.float32)]


def address(x: Any) -> int:
    return int(x.__array_interface__["data"][0])


@pytest.mark.parametrize("elements", EXAMPLES, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_numpy_and_an_array_share_memory(elements: np.ndarray) -> None:
    x = ad.array(elements)
    seen = np.from_dlpack(x)
    np.testing.assert_array_equal(seen, elements)
    assert not seen.flags.writeable
    back = ad.from_dlpack(elements)
    assert (back.shape, back.dtype, back.device) == (elements.shape, elements.dtype, "cpu")
    np.testing.assert_array_equal(back.numpy(), elements)
    if elements.size:
        assert address(seen) == address(x.numpy())
        assert address(back.numpy()) == address(elements)
        with pytest.raises(ValueError, match="read-only"):
            back.numpy()[...] = 0


@pytest.mark.needs_torch
@pytest.mark.parametrize("elements", EXAMPLES, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_pytorch_and_an_array_share_memory(elements: np.ndarray) -> None:
    import torch
    from torch.utils.dlpack import from_dlpack

    x = ad.array(elements)
    for tensor in (torch.from_dlpack(x), from_dlpack(x.__dlpack__())):
        np.testing.assert_array_equal(tensor.numpy(), elements, strict=True)
        assert not elements.size or tensor.data_ptr() == address(x.numpy())
    owned = torch.from_numpy(elements.copy())
    back = ad.from_dlpack(owned)
    np.testing.assert_array_equal(back.numpy(), elements, strict=True)
    assert not elements.size or address(back.numpy()) == owned.data_ptr()


def test_memory_outlives_the_array_that_made_it() -> None:
    seen = np.from_dlpack(ad.array(np.arange(1000)))
    back = ad.from_dlpack(np.arange(1000))
    for _ in range(10):
        ad.array(np.zeros(1000, np.int64))
    assert seen.sum() == back.numpy().sum() == 499500


def test_elements_that_are_not_contiguous_are_copied() -> None:
    elements = np.arange(6.0).reshape(2, 3)
    assert ad.from_dlpack(elements.T).numpy().tolist() == elements.T.tolist()
    repeated: Any = ops.broadcast_to(ad.array([1.0]), (2, 2))
    assert np.from_dlpack(repeated).tolist() == [[1, 1], [1, 1]]


def test_a_donated_array_that_is_shared_is_not_overwritten() -> None:
    step = ad.jit(lambda x: x + 1.0, donate_argnums=0)
    x = step(ad.array(np.zeros(1000, np.float32)))  # memory of adtrain, which may be overwritten
    seen = np.from_dlpack(x)
    step(x)
    assert seen.sum() == 1000
    elements = np.zeros(1000, np.float32)
    step(ad.from_dlpack(elements))
    assert elements.sum() == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [1.0], "from_dlpack: found a list, expected an array with __dlpack__"),
        (lambda: np.ones(2, np.float16), "from_dlpack: found elements of type float16, expected one of "),
        (lambda: np.array([None]), "from_dlpack: "),
    ],
)
def test_the_error_of_something_that_cannot_be_shared(make: Any, message: str) -> None:
    with pytest.raises(ad.DTypeError) as caught:
        ad.from_dlpack(make())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_array_on_another_device_is_refused() -> None:
    class OnRocm:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 10, 0

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError

    with pytest.raises(
        ad.DeviceError, match=r"^from_dlpack: found an array on DLPack's device 10, expected the CPU or an NVIDIA"
    ):
        ad.from_dlpack(OnRocm())


# The capsules that a GPU exports and takes, here of the host's memory.


class Exporter:
    """An array with the capsules of `dlpack.capsule`."""

    def __init__(self, elements: np.ndarray, versioned: bool, owner: object) -> None:
        self.elements, self.versioned, self.owner = elements, versioned, owner

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        x = self.elements
        place = dlpack.CPU, 0
        return dlpack.capsule(x.ctypes.data, x.shape, x.dtype, place, (x, self.owner), self.versioned)


class Owner:
    pass


@pytest.mark.parametrize("versioned", [False, True], ids=["plain", "versioned"])
@pytest.mark.parametrize("elements", EXAMPLES, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_numpy_reads_our_capsules_and_we_read_them_back(elements: np.ndarray, versioned: bool) -> None:
    owner = Owner()
    kept = weakref.ref(owner)
    exporter = Exporter(elements, versioned, owner)
    del owner
    seen = np.from_dlpack(exporter)
    np.testing.assert_array_equal(seen, elements, strict=True)
    assert not seen.flags.writeable
    assert not elements.size or address(seen) == address(elements)
    again = exporter.__dlpack__()
    tensor = dlpack.taken(again)
    assert (tensor.shape, tensor.dtype, tensor.in_c_order) == (elements.shape, elements.dtype, True)
    assert tensor.address == elements.ctypes.data
    with pytest.raises(ad.DTypeError, match="each one can be taken once"):
        dlpack.taken(again)
    exporter.__dlpack__()  # a capsule that nobody takes
    exporter.owner = None
    del again, seen
    assert kept() is not None
    del tensor
    assert kept() is None
    assert not dlpack._lent


@pytest.mark.needs_torch
@pytest.mark.parametrize("elements", EXAMPLES, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_we_read_the_capsules_of_pytorch(elements: np.ndarray) -> None:
    import torch

    tensor = torch.from_numpy(elements.copy())
    for capsule in (tensor.__dlpack__(), tensor.__dlpack__(max_version=dlpack.VERSION)):
        found = dlpack.taken(capsule)
        assert (found.shape, found.dtype, found.in_c_order) == (elements.shape, elements.dtype, True)
        assert not elements.size or found.address == tensor.data_ptr()


@pytest.mark.needs_torch
def test_the_order_of_elements_is_known_from_strides() -> None:
    import torch

    x = torch.zeros(4, 1, 6)
    given = {x: True, x[1:2]: True, x[:, :, :1]: False, x.transpose(0, 2): False, x[:0, :, ::2]: True, x[::2]: False}
    assert [dlpack.taken(each.__dlpack__()).in_c_order for each in given] == list(given.values())


def test_capsules_may_outlive_the_modules_when_the_interpreter_ends() -> None:
    code = """
import numpy as np
from adtrain.core import dlpack
x = np.ones(3)
capsules = [dlpack.capsule(x.ctypes.data, x.shape, x.dtype, (1, 0), x, True) for _ in range(2)]
tensor, borrowed = dlpack.taken(capsules[0]), dlpack.taken(np.ones(3).__dlpack__())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
