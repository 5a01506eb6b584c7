from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from idx_files import idx_bytes

from adtrain import data
from adtrain.core.errors import AdtrainError
from adtrain.data import DataError, catalogue
from adtrain.data.catalogue import Entry

ARRAYS = {
    "train-images-idx3-ubyte": np.arange(60, dtype=np.uint8).reshape(5, 3, 4),
    "train-labels-idx1-ubyte": np.array([0, 1, 0, 1, 0], np.uint8),
    "t10k-images-idx3-ubyte": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "t10k-labels-idx1-ubyte": np.array([1, 0], np.uint8),
}


@dataclass
class Server:
    """Files over HTTP. `cut` is the number of responses to truncate; `ranges` are the Range headers received.

    An `endless` server sends without a size and without an end.
    """

    files: dict[str, bytes]
    cut: int = 0
    resumes: bool = True
    endless: bool = False
    ranges: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    files = {f"{name}.gz": gzip.compress(idx_bytes(array), mtime=0) for name, array in ARRAYS.items()}
    state = Server(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content, requested = state.files.get(self.path[1:]), self.headers.get("Range")
            state.ranges.append(requested)
            if content is None:
                self.send_error(404)
                return
            start = int(requested.removeprefix("bytes=").rstrip("-")) if requested and state.resumes else 0
            if requested and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if state.endless:
                self.end_headers()
                with suppress(ConnectionError):
                    while True:
                        self.wfile.write(bytes(1 << 16))
                return
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if state.cut:
                state.cut -= 1
                content = content[: start + 10]
            with suppress(ConnectionError):
                self.wfile.write(content[start:])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        state.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield state
        running.shutdown()
        thread.join()


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Entry:
    """A small data set of the catalogue with its files on the server."""
    monkeypatch.setattr(catalogue, "cache_home", lambda: tmp_path)
    small = Entry(
        name="small",
        title="",
        licence="",
        shape=(1, 3, 4),
        train_images=5,
        test_images=2,
        classes=("a", "b"),
        sha256={name: hashlib.sha256(idx_bytes(array)).hexdigest() for name, array in ARRAYS.items()},
        source=catalogue.mnist_like(server.url),
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "small", small)
    return small


def test_a_second_fetch_at_the_same_time_is_refused(entry: Entry) -> None:
    refused = []

    def fetch_again(name: str, done: int, total: int | None) -> None:
        with pytest.raises(AdtrainError, match="another process is fetching this data set; wait until it is done"):
            catalogue.fetch(entry)
        refused.append(name)

    catalogue.fetch(entry, report=fetch_again)
    assert len(refused) == len(ARRAYS)
    assert all(check.passed for check in catalogue.verify(entry))


def test_a_data_set_is_fetched_once_and_can_be_loaded(entry: Entry, server: Server) -> None:
    with pytest.raises(
        DataError, match=r"^data.dataset: the data set small is not fetched yet; run adtrain data fetch small$"
    ):
        data.load("small")
    seen: list[tuple[str, int, int | None]] = []
    folder = catalogue.fetch(entry, report=lambda *chunk: seen.append(chunk))
    assert [name for name, done, total in seen if done == total] == list(server.files)
    found = data.load("small")
    np.testing.assert_array_equal(np.asarray(found.train.images)[:, 0], ARRAYS["train-images-idx3-ubyte"])
    assert (found.test.labels.tolist(), found.classes) == ([1, 0], ("a", "b"))
    assert all(check.passed for check in catalogue.verify(entry))
    assert catalogue.fetch(entry) == folder
    assert len(server.ranges) == 4
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


@pytest.mark.parametrize("resumes", [True, False])
def test_an_interrupted_download_is_resumed(entry: Entry, server: Server, resumes: bool) -> None:
    server.cut, server.resumes = 1, resumes
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: the connection ended after 10 of \d+ bytes; "):
        catalogue.fetch(entry)
    assert not entry.is_here
    catalogue.fetch(entry)
    assert server.ranges[:3] == [None, "bytes=10-", None]
    assert all(check.passed for check in catalogue.verify(entry))


@pytest.mark.parametrize("endless", [True, False])
def test_a_download_ends_at_the_most_bytes_expected(entry: Entry, server: Server, endless: bool) -> None:
    """Whether the server sends without end, or states too large a size."""
    assert entry.source is not None
    most = tuple(replace(download, most=1 << 20) for download in entry.source.downloads)
    small = replace(entry, source=replace(entry.source, downloads=most))
    good, server.endless = dict(server.files), endless
    server.files["train-images-idx3-ubyte.gz"] = bytes((1 << 20) + 1)
    with pytest.raises(DataError, match=r"found [\d,]{9,} bytes or more, expected at most 1,048,576; deleted it$"):
        catalogue.fetch(small)
    assert not list(small.folder.parent.rglob("*.part"))
    server.files, server.endless = good, False
    catalogue.fetch(small)
    assert all(check.passed for check in catalogue.verify(small))


def test_a_file_with_a_wrong_checksum_is_deleted(entry: Entry, server: Server) -> None:
    good = dict(server.files)
    server.files["t10k-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(np.array([0, 0], np.uint8)), mtime=0)
    with pytest.raises(DataError, match=r"found t10k-labels-idx1-ubyte with SHA-256 \w+, expected \w+; "):
        catalogue.fetch(entry)
    assert list(entry.folder.parent.iterdir()) == []
    server.files = good
    catalogue.fetch(entry)
    assert entry.is_here


def test_a_published_md5_is_compared_with_the_file(
    entry: Entry, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    md5 = [hashlib.md5(content).hexdigest() for content in server.files.values()]
    plain = replace(entry, sha256={}, source=catalogue.mnist_like(server.url, md5))
    catalogue.fetch(plain)
    assert all(check.passed for check in catalogue.verify(plain))
    (plain.folder / "train-labels-idx1-ubyte").write_bytes(b"damaged")
    assert [check.passed for check in catalogue.verify(plain)] == [True, False, True, True]
    catalogue.fetch(plain)
    assert all(check.passed for check in catalogue.verify(plain))
    (plain.folder / catalogue.SUMS).unlink()
    with pytest.raises(DataError, match=r"SHA256SUMS: cannot be read .*; run adtrain data fetch small"):
        catalogue.verify(plain)
    catalogue.fetch(plain)
    assert all(check.passed for check in catalogue.verify(plain))
    wrong = replace(plain, name="wrong", source=catalogue.mnist_like(server.url, ["0" * 32, *md5[1:]]))
    with pytest.raises(DataError, match=rf"found a file with MD5 {md5[0]}, expected 0{{32}}; deleted it"):
        catalogue.fetch(wrong)


def test_the_fetch_command_reports_progress_and_errors(entry: Entry, server: Server, tmp_path: Path) -> None:
    nowhere = invoke("data", "fetch", "small", "--mirror", "http://127.0.0.1:9/x")
    assert nowhere.exit_code == 2
    assert nowhere.stderr.startswith(
        "adtrain: error: http://127.0.0.1:9/x/train-images-idx3-ubyte.gz: cannot be fetched ("
    )
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in server.files.items():
        (copy / name).write_bytes(content)
    done = invoke("data", "fetch", "small", "--mirror", copy.as_uri())
    assert (done.exit_code, done.stdout) == (0, f"{entry.folder}\n")
    assert done.stderr.count("ubyte.gz: 0.0 MB\n") == 4
    assert not server.ranges


def test_emnist_images_are_transposed(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for name, array in ARRAYS.items():
            member = f"gzip/emnist-balanced-{name.replace('t10k', 'test')}.gz"
            archive.writestr(member, gzip.compress(idx_bytes(array), mtime=0))
        archive.writestr("../escaped", b"x")
    found = dict(catalogue.EMNIST.arrays(tmp_path))
    np.testing.assert_array_equal(found["train-images-idx3-ubyte"][1], ARRAYS["train-images-idx3-ubyte"][1].T)
    np.testing.assert_array_equal(found["t10k-labels-idx1-ubyte"], [1, 0])
    assert not (tmp_path.parent / "escaped").exists()


CIFAR_FOLDERS = {"cifar-10": "cifar-10-batches-bin", "cifar-100": "cifar-100-binary"}


def cifar_archive(name: str, records: dict[str, np.ndarray]) -> bytes:
    """An archive in the form of the original one, with other files beside those of the records."""
    content = io.BytesIO()
    others = {"batches.meta.txt": b"airplane", "../escaped": b"x"}
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for file, stored in {**others, **{file: array.tobytes() for file, array in records.items()}}.items():
            info = tarfile.TarInfo(f"{CIFAR_FOLDERS[name]}/{file}")
            info.size = len(stored)
            archive.addfile(info, io.BytesIO(stored))
    return content.getvalue()


def small_cifar(name: str) -> tuple[Entry, dict[str, np.ndarray]]:
    """The entry of the catalogue for 20 training images and 2 test images, and the records of its files."""
    entry = replace(catalogue.CATALOGUE[name], train_images=20, test_images=2)
    rng, labels = np.random.default_rng(0), 1 if name == "cifar-10" else 2
    counts = {"test_batch.bin": 2, **{f"data_batch_{i}.bin": 4 for i in (5, 4, 3, 2, 1)}}
    records = {}
    for file, count in counts.items() if name == "cifar-10" else {"test.bin": 2, "train.bin": 20}.items():
        records[file] = rng.integers(0, 256, (count, labels + 3 * 32 * 32), dtype=np.uint8)
        records[file][:, labels - 1] = rng.integers(0, len(entry.classes), count)
    return entry, records


@pytest.mark.parametrize("name", CIFAR_FOLDERS)
def test_cifar_is_fetched_from_its_binary_archive(
    name: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "cache_home", lambda: tmp_path)
    entry, records = small_cifar(name)
    server.files = {f"{name}-binary.tar.gz": cifar_archive(name, records)}
    monkeypatch.setitem(catalogue.CATALOGUE, name, entry)
    refused = invoke("data", "fetch", name, "--mirror", server.url)
    assert refused.exit_code == 2
    assert "binary.tar.gz: found a file with MD5" in refused.stderr  # the archive is not the original one

    assert entry.source is not None
    md5 = hashlib.md5(server.files[f"{name}-binary.tar.gz"]).hexdigest()
    source = replace(entry.source, downloads=(replace(entry.source.downloads[0], md5=md5),))
    monkeypatch.setitem(catalogue.CATALOGUE, name, replace(entry, source=source))
    folder = Path(invoke("data", "fetch", name, "--mirror", server.url).stdout.strip())
    assert sorted(path.name for path in folder.parent.iterdir()) == [name]
    labels = 1 if name == "cifar-10" else 2
    train = np.concatenate([records[file] for file in sorted(records) if not file.startswith("test")])
    found = data.load(name)
    np.testing.assert_array_equal(np.asarray(found.train.images), train[:, labels:].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(found.train.labels, train[:, labels - 1])
    assert len(found.test) == 2
    assert invoke("data", "verify", name).stdout.count(": ok\n") == 4
    assert "20 training" in invoke("data", "inspect", name).stdout
    assert f"dataset: {name}\n" in invoke("new", name).stdout


def test_a_damaged_cifar_archive_is_refused(tmp_path: Path) -> None:
    entry, records = small_cifar("cifar-100")
    assert entry.source is not None
    good = cifar_archive("cifar-100", records)
    missing = cifar_archive("cifar-100", {"test.bin": records["test.bin"]})
    for content in (b"no archive", good[: len(good) // 2], missing):
        (tmp_path / "cifar-100-binary.tar.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"cifar-100-binary.tar.gz: cannot be read"):
            dict(entry.source.arrays(tmp_path))
