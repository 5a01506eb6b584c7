"""Download data sets into the user's cache: resumed, checked, and visible only when complete."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from adtrain.data import catalogue, idx
from adtrain.data.catalogue import SUMS, Download, Entry
from adtrain.data.errors import DataError
from adtrain.files import unwritable

TIMEOUT_SECONDS = 30
CHUNK = 1 << 20

Report = Callable[[str, int, int | None], None]
"""Called after each chunk with the file's name, the bytes received so far, and the file's size, None if unknown."""


def fetch(entry: Entry, mirror: str | None = None, report: Report = lambda name, done, total: None) -> Path:
    """Download the data set into its folder and return the folder; an intact data set is not downloaded again.

    `mirror` is the URL of a folder with the same file names as the source. A partial download is kept and resumed by
    the next call; a file with a wrong checksum is deleted.

    Raises:
        DataError: a file cannot be downloaded, or its content is wrong; names the URL.
        AdtrainError: the cache cannot be written.
    """
    if entry.source is None or _is_intact(entry):
        return entry.folder
    home = entry.folder.parent
    downloads = home / f".{entry.name}.downloads"
    try:
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # `cache` requires a private folder
        for folder in (home, downloads):
            folder.mkdir(mode=0o700, exist_ok=True)
        with _locked(downloads):
            for download in entry.source.downloads:
                url = download.url if mirror is None else f"{mirror.rstrip('/')}/{download.name}"
                _download(download, url, downloads, report)
            _install(entry, downloads)
            shutil.rmtree(downloads)
    except OSError as error:
        raise unwritable(Path(error.filename or home), error) from error
    return entry.folder


def _is_intact(entry: Entry) -> bool:
    try:
        checks = catalogue.verify(entry)
    except DataError:
        return False
    return bool(checks) and all(check.passed for check in checks)


def _download(download: Download, url: str, folder: Path, report: Report) -> None:
    """Put the complete, checked file into the folder, unless it is there."""
    path, part = folder / download.name, folder / f"{download.name}.part"
    if path.exists():
        return
    _resume(url, part, download.most, lambda done, total: report(download.name, done, total))
    if download.md5 and (found := _md5(part)) != download.md5:
        part.unlink()
        raise DataError(f"{url}: found a file with MD5 {found}, expected {download.md5}; deleted it")
    os.replace(part, path)


def _resume(url: str, part: Path, most: int, report: Callable[[int, int | None], None]) -> None:
    """Append the missing bytes of the file at `url` to `part`, or start again if the server cannot resume.

    A file of more than `most` bytes is deleted, whatever size the server gives.
    """
    import http.client
    import urllib.error
    import urllib.request

    done = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "adtrain", **({"Range": f"bytes={done}-"} if done else {})}
    advice = "run the command again to resume, or name another server with --mirror (file:///folder for local files)"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS) as response:
            if response.status != http.client.PARTIAL_CONTENT:
                done = 0
            length = response.headers.get("Content-Length")
            total = done + int(length) if length is not None else None
            if total is not None and total > most:
                raise _too_large(url, part, total, most)
            with part.open("ab") as file:
                file.truncate(done)
                while chunk := response.read(CHUNK):
                    done += len(chunk)
                    if done > most:
                        raise _too_large(url, part, done, most)
                    file.write(chunk)
                    report(done, total)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # `part` is complete
            return
        raise DataError(f"{url}: cannot be fetched (HTTP {error.code} {error.reason}); {advice}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException, ValueError) as error:
        raise DataError(f"{url}: cannot be fetched ({getattr(error, 'reason', error)}); {advice}") from error
    if total is not None and done != total:
        raise DataError(f"{url}: the connection ended after {done:,} of {total:,} bytes; {advice}")


def _too_large(url: str, part: Path, found: int, most: int) -> DataError:
    part.unlink(missing_ok=True)
    return DataError(f"{url}: found {found:,} bytes or more, expected at most {most:,}; deleted it")


def _install(entry: Entry, downloads: Path) -> None:
    """Unpack the downloads, check them, and move them to the data set's folder. Wrong downloads are deleted."""
    assert entry.source is not None
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=entry.folder.parent) as temporary:
        folder, sums = Path(temporary) / entry.name, []
        folder.mkdir()
        try:
            for name, array in entry.source.arrays(downloads):
                content = _checked(entry, name, array)
                (folder / name).write_bytes(content)
                sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
        except DataError:
            shutil.rmtree(downloads)
            raise
        (folder / SUMS).write_text("".join(sums), encoding="ascii")
        if entry.folder.exists():
            os.replace(entry.folder, Path(temporary) / "damaged")
        os.replace(folder, entry.folder)


def _checked(entry: Entry, name: str, array: np.ndarray) -> bytes:
    """The content of the IDX file. Raises DataError unless shape, dtype and checksum are those of the catalogue."""
    count = entry.train_images if name.startswith("train") else entry.test_images
    shape = entry.shape if entry.shape[0] > 1 else entry.shape[1:]
    expected = (count, *(shape if "images" in name else ()))
    if array.dtype != np.uint8 or array.shape != expected:
        raise DataError(f"{entry.name}: found {name} of shape {array.shape}, expected {expected}; deleted it")
    content = idx.encode(array)
    if entry.sha256 and (found := hashlib.sha256(content).hexdigest()) != entry.sha256[name]:
        raise DataError(f"{entry.name}: found {name} with SHA-256 {found}, expected {entry.sha256[name]}; deleted it")
    return content


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises DataError if another process is fetching this data set."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DataError(f"{folder}: another process is fetching this data set; wait until it is done") from error
    finally:
        os.close(descriptor)
