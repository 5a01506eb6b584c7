"""On a GPU, arrays share memory with PyTorch and CuPy in both directions, and streams wait for one another."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu, poisoned

import adtrain as ad
from adtrain import ops
from adtrain.core.types import DTYPES

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

LARGE = (2048, 2048)
"""A shape whose products take long enough that a missing wait gives wrong numbers."""

TYPES = sorted(DTYPES - {np.dtype("uint32")}, key=str)  # PyTorch computes little with uint32


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch", reason="needs PyTorch")
    if not found.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")
    return found


def ones(*shape: int) -> Any:
    return ad.array(np.ones(shape, np.float32), device="gpu")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (64, 33)], ids=str)
def test_pytorch_and_an_array_share_memory(torch: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    elements = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    x = ad.array(elements, device="gpu")
    seen = torch.from_dlpack(x)
    assert seen.device.type == "cuda"
    np.testing.assert_array_equal(seen.cpu().numpy(), elements, strict=True)
    assert not elements.size or seen.data_ptr() == x.buffer.address
    theirs = torch.from_numpy(elements.copy()).cuda()
    back = ad.from_dlpack(theirs)
    assert back.device == "gpu"
    np.testing.assert_array_equal(back.numpy(), elements, strict=True)
    assert not elements.size or back.buffer.address == theirs.data_ptr()


def test_cupy_and_an_array_share_memory(gpu: Any) -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    theirs = cupy.arange(12, dtype="float32").reshape(3, 4)
    back = ad.from_dlpack(theirs)
    assert back.buffer.address == theirs.data.ptr
    seen = cupy.from_dlpack(ops.add(back, 1.0))
    np.testing.assert_array_equal(cupy.asnumpy(seen), np.arange(12.0).reshape(3, 4) + 1)


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_pytorch_waits_for_the_work_on_an_array(torch: Any, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            x = ones(*LARGE)
            for _ in range(5):
                x = ops.matmul(x, x) * (1 / LARGE[0])
            assert float(torch.from_dlpack(x).sum()) == x.size


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_an_array_waits_for_the_work_of_pytorch(torch: Any, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            x = torch.ones(LARGE, device="cuda")
            for _ in range(5):
                x = x @ x * (1 / LARGE[0])
            assert float(ops.sum(ad.from_dlpack(x))) == x.numel()


def test_memory_outlives_the_object_that_made_it(torch: Any) -> None:
    seen = torch.from_dlpack(ones(1000))
    back = ad.from_dlpack(torch.ones(1000, device="cuda"))
    gc.collect()
    others = [ones(1000) * 2.0 for _ in range(10)], [torch.full((1000,), 2.0, device="cuda") for _ in range(10)]
    assert float(seen.sum()) == float(ops.sum(back)) == 1000
    del others


def test_memory_is_not_reused_before_the_other_library_has_read_it(torch: Any) -> None:
    for _ in range(5):
        x = ones(*LARGE)
        seen = torch.from_dlpack(x)
        for _ in range(5):
            seen_sum = (seen @ seen)[0, 0]
        del x, seen
        overwritten = [ones(*LARGE) * 3.0 for _ in range(3)]
        assert float(seen_sum) == LARGE[0]
        del overwritten


def test_memory_of_pytorch_is_kept_until_the_work_on_it_is_done(torch: Any) -> None:
    for _ in range(5):
        x = ad.from_dlpack(torch.ones(LARGE, device="cuda"))
        product = ops.matmul(x, x)
        del x
        overwritten = [torch.full(LARGE, 3.0, device="cuda") for _ in range(3)]
        assert float(ops.max(product)) == float(ops.min(product)) == LARGE[0]
        del overwritten


def test_borrowed_memory_is_given_back(torch: Any) -> None:
    x = torch.ones(2**22, device="cuda")
    before = torch.cuda.memory_allocated()
    back = ad.from_dlpack(x)
    del x, back
    ad.array(1.0, device="gpu").numpy()
    for _ in range(2):
        ad.array(1.0, device="gpu").numpy()
    assert torch.cuda.memory_allocated() < before


@pytest.mark.parametrize("shape", [(1000,), (512, 1024)], ids=["small", "large"])
def test_a_donated_array_that_is_shared_is_not_overwritten(torch: Any, shape: tuple[int, ...]) -> None:
    step = ad.jit(lambda x: x + 1.0, donate_argnums=0)
    x = step(ad.array(np.zeros(shape, np.float32), device="gpu"))
    seen = torch.from_dlpack(x)
    step(x)
    assert float(seen.sum()) == np.prod(shape)
    theirs = torch.zeros(shape, device="cuda")
    step(ad.from_dlpack(theirs))
    step(ops.reshape(ad.from_dlpack(theirs), (-1,)))
    torch.cuda.synchronize()
    assert float(theirs.sum()) == 0


def test_a_result_that_is_shared_survives_later_runs(torch: Any) -> None:
    step = ad.jit(lambda x: x + 1.0)
    held = [torch.from_dlpack(step(ad.array(np.full((512, 1024), i, np.float32), device="gpu"))) for i in range(6)]
    assert [float(x.max()) for x in held] == [i + 1.0 for i in range(6)]


def test_unaligned_memory_is_copied(torch: Any) -> None:
    theirs = torch.arange(1000, device="cuda", dtype=torch.float32)[1:]
    back = ad.from_dlpack(theirs)
    assert back.buffer.address != theirs.data_ptr()
    np.testing.assert_array_equal(back.numpy(), np.arange(1.0, 1000))


def test_what_cannot_be_shared_is_one_line(torch: Any) -> None:
    x = torch.ones(4, 6, device="cuda")
    with pytest.raises(
        ad.ShapeError, match=r"^from_dlpack: found strides \(1, 6\) of shape \(6, 4\), expected C order"
    ):
        ad.from_dlpack(x.T)
    with pytest.raises(ad.DTypeError, match=r"^from_dlpack: found elements of type float16, expected one of"):
        ad.from_dlpack(x.half())
    with pytest.raises(ad.DTypeError, match=r"^from_dlpack: found elements of type code 4, 16 bits, 1 lanes"):
        ad.from_dlpack(x.bfloat16())
    with pytest.raises(ad.DTypeError, match=r"^from_dlpack: "):
        ad.from_dlpack(x.requires_grad_())
    with pytest.raises(BufferError, match="found stream 0"):
        ones(2).__dlpack__(stream=0)


def test_a_copy_to_the_host_can_be_asked_for(gpu: Any) -> None:
    x = ad.array(np.arange(6.0), device="gpu")
    np.testing.assert_array_equal(np.from_dlpack(x, device="cpu"), np.arange(6.0))
    with pytest.raises(BufferError, match="found copy=False"):
        np.from_dlpack(x, device="cpu", copy=False)
