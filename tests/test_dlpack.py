"""DLPack: arrays share memory with NumPy and PyTorch, in both directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
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
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError

    with pytest.raises(ad.DeviceError, match=r"^from_dlpack: found an array on another device, expected the CPU"):
        ad.from_dlpack(OnGpu())
