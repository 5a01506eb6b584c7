"""The catalogue of named data sets: some are part of the package, others are downloaded into the user's cache.

A download is resumed, checked, and visible only when complete.

Members of downloaded archives are read by the names listed here; nothing is extracted under a name from an archive.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from adtrain.cache import cache_home
from adtrain.data import idx
from adtrain.data.errors import DataError
from adtrain.files import asset_path, locked_by, unwritable

SUMS = "SHA256SUMS"
"""The file with the checksums of a fetched data set, in the format of `sha256sum`."""

PARTS = ("train", "t10k")
MNIST_FILES = tuple(f"{part}-{kind}" for part in PARTS for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))

MNIST_MOST = 1 << 26
"""Bytes of a file at most: 60,000 images of 28 x 28 pixels have 45 MiB before compression."""

Arrays = Iterator[tuple[str, np.ndarray]]
"""Pairs of an IDX file's name, as `idx.read_folder` expects it, and its uint8 array."""


@dataclass(frozen=True)
class Download:
    """A file on a server, of at most `most` bytes. `md5` is its published checksum, empty if there is none."""

    url: str
    most: int
    md5: str = ""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """Files on a server, and the function that reads them from a folder; it raises DataError for wrong files."""

    downloads: tuple[Download, ...]
    arrays: Callable[[Path], Arrays]


def mnist_like(server: str, md5: Sequence[str] = ("",) * 4) -> Source:
    """MNIST's four gzip-compressed files."""
    pairs = zip(MNIST_FILES, md5, strict=True)
    downloads = (Download(f"{server}/{name}.gz", MNIST_MOST, digest) for name, digest in pairs)
    return Source(
        tuple(downloads), lambda folder: ((name, np.asarray(idx.read(folder / f"{name}.gz"))) for name in MNIST_FILES)
    )


def _emnist(folder: Path) -> Arrays:
    """The balanced split from the archive of all splits. Its images are stored transposed."""
    import zipfile

    archive, copy = folder / EMNIST.downloads[0].name, folder / "member.gz"
    try:
        with zipfile.ZipFile(archive) as opened:
            for name in MNIST_FILES:
                member = f"gzip/emnist-balanced-{name.replace('t10k', 'test')}.gz"
                with opened.open(member) as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
                array = np.asarray(idx.read(copy))
                yield name, array.swapaxes(1, 2) if array.ndim == 3 else array
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise DataError(f"{archive}: cannot be read ({error})") from error


def cifar(archive: str, md5: str, files: Sequence[Sequence[str]], labels: int) -> Source:
    """The binary version of CIFAR-10 or CIFAR-100; `files` are those of the training part and of the test part.

    A record has `labels` bytes, the last of which is the class, and 3 x 32 x 32 pixels.
    """

    def arrays(folder: Path) -> Arrays:
        import tarfile

        path, wanted, found = folder / archive, {name for names in files for name in names}, dict[str, np.ndarray]()
        try:
            with tarfile.open(path, "r:gz") as opened:
                for member in opened:
                    name = member.name.rpartition("/")[2]
                    if name in wanted and member.isreg() and member.size <= CIFAR_MOST:
                        stream = opened.extractfile(member)
                        assert stream is not None  # as the member is a regular file
                        found[name] = np.frombuffer(stream.read(), np.uint8)
            for part, names in zip(PARTS, files, strict=True):
                records = np.concatenate([found[name] for name in names]).reshape(-1, labels + CIFAR_PIXELS)
                yield f"{part}-images-idx4-ubyte", records[:, labels:].reshape(-1, 3, 32, 32)
                yield f"{part}-labels-idx1-ubyte", records[:, labels - 1]
        except (tarfile.TarError, zlib.error, EOFError, KeyError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error

    return Source((Download(f"https://www.cs.toronto.edu/~kriz/{archive}", CIFAR_MOST, md5),), arrays)


CIFAR_PIXELS = 3 * 32 * 32
CIFAR_MOST = 1 << 28
"""Bytes of an archive, and of a file in it, at most: 50,000 records have 147 MiB."""

EMNIST = Source(
    (Download("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", 1 << 30, "58c8d27c78d21e728a6bc7b3cc06412e"),),
    _emnist,
)
CIFAR10 = cifar(
    "cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]),
    labels=1,
)
CIFAR100 = cifar("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", (["train.bin"], ["test.bin"]), labels=2)
CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
"""The fine labels, in the order of the archive's fine_label_names.txt."""


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue. By default it has the images of MNIST.

    `mean` and `std` are those of the training pixels / 255, per channel; empty if they are computed at each load.
    `sha256` maps file names to checksums of the uncompressed bytes, so that recompressing a file does not change them.
    It is empty if none are published; the checksums in SUMS, taken at the download, are used then. `source` is None if
    the files are part of the package.
    """

    name: str
    title: str
    licence: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int] = (1, 28, 28)
    train_images: int = 60_000
    test_images: int = 10_000
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    sha256: dict[str, str] = field(default_factory=dict)
    source: Source | None = None

    @property
    def folder(self) -> Path:
        """The folder of its files, which may not exist yet; fetched data sets are in the user's cache.

        Raises DataError where the user has no folder for caches.
        """
        if self.source is None:
            return asset_path("datasets") / self.name
        try:
            return cache_home() / "adtrain" / "datasets" / self.name
        except RuntimeError as error:
            raise DataError(f"the folder of fetched data sets: {error}") from None

    @property
    def is_here(self) -> bool:
        """True if it can be loaded without fetching."""
        return self.source is None or self.folder.is_dir()

    def require(self) -> None:
        """Raise DataError that says how to fetch it, unless it is here."""
        if not self.is_here:
            raise DataError(f"the data set {self.name} is not fetched yet; run adtrain data fetch {self.name}")


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in [
        Entry(
            name="mnist",
            title="handwritten digits, the original split",
            licence="CC BY-SA 3.0",
            classes=tuple("0123456789"),
            mean=(0.13066047627384286,),
            std=(0.3081078038564627,),
            sha256={
                "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            },
        ),
        Entry(
            name="fashion-mnist",
            title="pictures of clothes, in the form of MNIST",
            licence="MIT",
            classes=(
                *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
                *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
            ),
            mean=(0.28604059698879547,),
            std=(0.3530242445149226,),
            sha256={
                "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            },
            source=mnist_like("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"),
        ),
        Entry(
            name="kmnist",
            title="handwritten hiragana, in the form of MNIST",
            licence="CC BY-SA 4.0",
            classes=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
            source=mnist_like(
                "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
                md5=(
                    "bdb82020997e1d708af4cf47b453dcf7",
                    "e144d726b3acfaa3e44228e80efcd344",
                    "5c965bf0a639b31b8f53240b1b52f4d7",
                    "7320c461ea6c1c855c0b718fb2a4b134",
                ),
            ),
        ),
        Entry(
            name="emnist",
            title="handwritten digits and letters, the balanced split",
            licence="none stated; of NIST Special Database 19",
            train_images=112_800,
            test_images=18_800,
            classes=tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),
            source=EMNIST,
        ),
        Entry(
            name="cifar-10",
            title="small photographs of animals and vehicles",
            licence="none stated; cite Krizhevsky 2009",
            shape=(3, 32, 32),
            train_images=50_000,
            classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            source=CIFAR10,
        ),
        Entry(
            name="cifar-100",
            title="small photographs of a hundred kinds",
            licence="none stated; cite Krizhevsky 2009",
            shape=(3, 32, 32),
            train_images=50_000,
            classes=tuple(CIFAR100_CLASSES.split()),
            source=CIFAR100,
        ),
    ]
}


@dataclass(frozen=True)
class FileCheck:
    """The result for one file: `found` is its checksum, or the reason why it cannot be read."""

    path: Path
    expected: str
    found: str

    @property
    def passed(self) -> bool:
        return self.found == self.expected


def verify(entry: Entry) -> list[FileCheck]:
    """One check for each file of the data set; a missing or damaged file is a failed check, not an error.

    Raises DataError if the data set is not fetched yet or its checksums cannot be read.
    """
    entry.require()
    paths = {entry.folder / name: expected for name, expected in (entry.sha256 or _read_sums(entry)).items()}
    return [FileCheck(path, expected, raw_sha256(path)) for path, expected in paths.items()]


def raw_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of the file's uncompressed bytes, or the reason why they cannot be read."""
    try:
        with idx.opened(path) as stream:
            return _digest(stream, hashlib.sha256())
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")


def _digest(stream: BinaryIO | idx.Stream, digest: Any) -> str:
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
    return str(digest.hexdigest())


def find(name: str) -> Entry:
    """The entry of that name. Raises DataError that lists the known names."""
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise DataError(f"unknown data set {name!r}; known: {known} (files of your own: give their path)")
    return CATALOGUE[name]


def finder(name: str) -> Callable[[], Entry]:
    """A function without arguments that finds the entry of that name."""

    def entry() -> Entry:
        return find(name)

    entry.__qualname__ = entry.__name__ = name
    entry.__doc__ = CATALOGUE[name].title
    return entry


def _read_sums(entry: Entry) -> dict[str, str]:
    path = entry.folder / SUMS
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); run adtrain data fetch {entry.name}") from error
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


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
        AdtrainError: the cache cannot be written, or another process is fetching the data set.
    """
    if entry.source is None or _is_intact(entry):
        return entry.folder
    home = entry.folder.parent
    downloads = home / f".{entry.name}.downloads"
    try:
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # `cache` requires a private folder
        for folder in (home, downloads):
            folder.mkdir(mode=0o700, exist_ok=True)
        (downloads / "lock").touch()
        with locked_by(downloads / "lock", "fetching this data set; wait until it is done"):
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
        checks = verify(entry)
    except DataError:
        return False
    return bool(checks) and all(check.passed for check in checks)


def _download(download: Download, url: str, folder: Path, report: Report) -> None:
    """Put the complete, checked file into the folder, unless it is there."""
    path, part = folder / download.name, folder / f"{download.name}.part"
    if path.exists():
        return
    _resume(url, part, download.most, lambda done, total: report(download.name, done, total))
    with part.open("rb") as file:
        found = _digest(file, hashlib.md5(usedforsecurity=False))
    if download.md5 and found != download.md5:
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
