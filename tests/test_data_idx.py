from __future__ import annotations

import gzip
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from idx_files import CODES, idx_bytes, write_idx

from adtrain.cache import STORE_THREAD, open_cache
from adtrain.data import DataError, idx

arrays = st.sampled_from(sorted(CODES)).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx")


@given(array=arrays, compressed=st.booleans())
def test_reading_gives_back_what_was_written(folder: Path, array: np.ndarray, compressed: bool) -> None:
    found = idx.read(write_idx(folder / ("array.gz" if compressed else "array"), array))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert found.dtype.isnative


def test_compression_is_detected_by_content_and_not_by_name(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    (tmp_path / "plain.gz").write_bytes(idx_bytes(array))
    (tmp_path / "compressed").write_bytes(gzip.compress(idx_bytes(array), mtime=0))
    np.testing.assert_array_equal(idx.read(tmp_path / "plain.gz"), array)
    np.testing.assert_array_equal(idx.read(tmp_path / "compressed"), array)


def test_a_large_compressed_file_is_decompressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    decompressed, read_at_most = list[int](), idx._read_at_most

    def read(stream: idx.Stream, count: int) -> bytearray:
        decompressed.append(count)
        return read_at_most(stream, count)

    monkeypatch.setattr(idx, "_read_at_most", read)
    array = np.zeros((2, idx.MIN_CACHED_BYTES // 2), np.uint8)
    for content, times in ((array, 1), (array, 0), (array + 1, 1)):
        path = write_idx(tmp_path / "array.gz", content)
        decompressed.clear()
        np.testing.assert_array_equal(idx.read(path), content)
        assert len(decompressed) == times
        for thread in [thread for thread in threading.enumerate() if thread.name == STORE_THREAD]:
            thread.join()
    for stored in (tmp_path / "cache/adtrain/data").iterdir():
        stored.write_bytes(bytes(len(array.tobytes())))
    np.testing.assert_array_equal(idx.read(path), array + 1)


@pytest.mark.parametrize("length", [0, 5, idx.MIN_CACHED_BYTES - 1, idx.MIN_CACHED_BYTES + 1])
def test_a_cached_file_of_the_wrong_length_is_decompressed_again(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    array = np.ones((2, idx.MIN_CACHED_BYTES // 2), np.uint8)
    path = write_idx(tmp_path / "array.gz", array)

    def read() -> list[Path]:
        np.testing.assert_array_equal(idx.read(path), array)
        for thread in [thread for thread in threading.enumerate() if thread.name == STORE_THREAD]:
            thread.join()
        return list((tmp_path / "cache/adtrain/data").iterdir())

    (stored,) = read()
    stored.unlink()
    open_cache("data").store(stored.name.partition(".")[0], ".bin", bytes(length))
    assert read() == [stored]
    assert "has another length; the file is decompressed again" in caplog.text


@given(array=arrays, compressed=st.booleans(), data=st.data())
def test_every_proper_prefix_of_a_file_is_refused(
    folder: Path, array: np.ndarray, compressed: bool, data: st.DataObject
) -> None:
    whole = gzip.compress(idx_bytes(array), mtime=0) if compressed else idx_bytes(array)
    path = folder / "cut"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError, match=f"^{path}: .*(truncated|found)"):
        idx.read(path)


@given(content=st.binary(max_size=40), compressed=st.booleans())
def test_arbitrary_bytes_are_read_or_raise_data_error(folder: Path, content: bytes, compressed: bool) -> None:
    path = folder / "arbitrary"
    path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)
    try:
        found = idx.read(path)
    except DataError as error:
        refusal = str(error)
    else:
        assert idx_bytes(np.asarray(found)) == content
        return
    assert refusal.startswith(f"{path}: ")
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(np.zeros((2, 3), np.uint8))[:-1], "truncated, found 5 bytes after the header, expected 6 for shape"),
        (idx_bytes(np.zeros((2, 3), np.uint8)) + b"x", "trailing bytes, found more bytes after the header, expected 6"),
        (b"\0\0\x08", "truncated, found 3 bytes, expected a header"),
        (b"\0\0\x08\x03\0\0\0\x01", "truncated in its header, found 8 bytes, expected 16"),
        (b"\x89PNG\r\n", "not an IDX file, found magic number 0x89504e47, expected 0x00000803"),
        (b"\0\0\x07\x01\0\0\0\0", "not an IDX file, found magic number 0x00000701"),
        (b"\0\0\x08\x00", "not an IDX file, found magic number 0x00000800"),
        (b"\0\0\x08\x03" + b"\0\0\x10\0" * 3 + b"1234", "truncated, found 4 bytes after the header"),
        (b"\0\0\x08\x03" + b"\xff" * 12 + b"1234", "found the shape .4294967295, "),
        (b"\0\0\x08\x03" + b"\0" * 4 + b"\xff" * 8, "found the shape .0, 4294967295, 4294967295., expected one below"),
        (
            gzip.compress(b"\0\0\x08\x03" + b"\0\0\x10\0" * 3, mtime=0),
            "truncated, found .. compressed bytes for 68719476736 of",
        ),
    ],
)
def test_errors_name_the_file_and_what_was_found_and_expected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path}: {message}"):
        idx.read(path)


def test_a_gz_file_without_gzip_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="neither gzip nor IDX, found magic number 0x3c68746d"):
        idx.read(path)


def test_a_gzip_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(idx_bytes(np.zeros(1000, np.uint8)), mtime=0))
    content[-5] ^= 1
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="truncated or damaged gzip file"):
        idx.read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path / 'none'}: cannot be read .No such file or directory"):
        idx.read(tmp_path / "none")
    with pytest.raises(DataError, match=f"^{tmp_path}: cannot be read .Is a directory"):
        idx.read(tmp_path)
