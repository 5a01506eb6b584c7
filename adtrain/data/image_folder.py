"""Folders and archives of images, with a subfolder per class; decoded images are kept in the cache."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from adtrain.cache import digest, open_cache
from adtrain.core.options import Expected
from adtrain.data import images
from adtrain.data.errors import DataError, DataOptionError, reading, warn
from adtrain.data.file_array import machine_memory, require_memory
from adtrain.data.idx import file_sha256
from adtrain.data.images import ImageFile, Unreadable, Wanted, decode_all
from adtrain.data.part import NOTHING, Format, Known, Part, Parts
from adtrain.files import open_regular
from adtrain.option_types import Size
from adtrain.text import counted, first_names, visible

VALIDATION_FOLDERS = ("val", "valid", "validation")
"""Possible folders of the validation images, next to train/ and test/; the first that exists is used."""

MOST_NAMES = 5
"""Images that a warning names."""

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tar.xz", ".tgz")

Classes: TypeAlias = dict[str, list[ImageFile]]
"""The files of each class."""


@dataclass(frozen=True)
class ImageOptions:
    """The options of a folder or an archive of images.

    Attributes:
        image_size: [height, width] to resize all images to
        channels: 1 for grey, 3 for colour; default: 3 if any image is in colour
        skip_broken: skip images that cannot be read, with a warning
    """

    image_size: Annotated[tuple[Size, Size], Expected("a list of height and width")] | None = None
    channels: Annotated[Literal[1, 3], Expected("1 or 3")] | None = None
    skip_broken: bool = False


class BrokenImageError(DataError):
    """An image cannot be read, and `skip_broken` is false."""


class SizesError(DataOptionError):
    """The images differ in size, and there is no `image_size`; `median` are the medians of heights and of widths."""

    def __init__(self, examples: str, median: tuple[int, int]) -> None:
        self.median = median
        expected = f"expected [height, width], as the images differ: {examples}; the medians are {list(median)}"
        super().__init__("image_size", f"missing, {expected}")


class Layout(NamedTuple):
    """The names of the folders with the classes of each part; "" is the folder or archive itself."""

    train: str
    validation: str | None
    test: str | None


class Listing(NamedTuple):
    """The parts of a folder or archive, and the files of each class in the parts that there are."""

    parts: Layout
    files: tuple[Classes | None, ...]


def layout(is_folder: Callable[[str], bool], has_folders: Callable[[str], bool]) -> Layout:
    """Which folder is which part; the functions say whether there is a folder, and whether it has subfolders.

    If train/ has subfolders, it is the training part, test/ the test part, and the first of VALIDATION_FOLDERS has the
    validation images; without test/ these are the test part.
    """
    if not (is_folder("train") and has_folders("train")):
        return Layout("", None, None)
    validation = next(filter(is_folder, VALIDATION_FOLDERS), None)
    return Layout("train", validation, "test") if is_folder("test") else Layout("train", None, validation)


def read_folder(folder: Path, options: ImageOptions, known: Known = NOTHING) -> Parts:
    """All images as uint8 (N, C, H, W); the classes are the names of the subfolders, in sorted order.

    The images of a class may be in subfolders of its folder, with a warning, unless all images are in such ones.
    `layout` says which folders are the parts; a warning tells where the validation images are the test part. Hidden
    files and folders (.name) are ignored, and so are files next to the folders of the classes. Files that are no
    images, and have no name of one, are skipped with a warning. Links must stay within the folder. Raises DataError
    for an unreadable image, and DataOptionError if the images differ in size and no size is given.
    """
    parts = layout(
        lambda name: (folder / name).is_dir(),
        lambda name: any(entry.is_dir() for entry in _entries(folder / name)),
    )
    states = list[str]()
    files = tuple(None if part is None else _classes_in_folder(part, folder, states) for part in parts)
    return _read(folder, "\0".join(states), options, lambda: Listing(parts, files))


def read_archive(path: Path, options: ImageOptions, known: Known = NOTHING) -> Parts:
    """The images in an archive of such a folder, which may be within other folders; nothing is extracted to disk.

    Raises DataError and DataOptionError as `read_folder` does, and DataError where the archive cannot be read.
    """
    with _reported(path), open_regular(path) as file:
        state = file_sha256(file.fileno())
    return _read(path, state, options, lambda: _listing_of_archive(path))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The files and folders that are not hidden, in sorted order."""
    with reading(folder), os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _classes_in_folder(part: str, folder: Path, states: list[str]) -> Classes:
    """The files of each class in a part of `folder`.

    For each file its name and what tells it from an earlier one of that name are appended to `states`.
    """
    classes: Classes = {}
    for entry in _entries(folder / part):
        _require_within(entry, folder)
        if entry.is_dir():
            files = classes[entry.name] = []
            for file in _files(entry.path, folder, entry.name):
                status = file.stat()
                files.append(ImageFile(file.path, status.st_size))
                state = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
                states.append(f"{os.path.relpath(file.path, folder)}\0{state}")
            if not files:
                raise DataError(f"{entry.path}: found an empty folder, expected the images of class {entry.name!r}")
    if not classes:
        raise DataError(f"{folder / part}: found no subfolders, expected one per class")
    return _checked(classes, folder / part)


def _files(place: str, folder: Path, name: str) -> Iterator[os.DirEntry[str]]:
    """The files of the class `name` in the folder `place`, and in its subfolders; links to folders are refused."""
    for entry in _entries(Path(place)):
        _require_within(entry, folder)
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path, folder, name)
        elif entry.is_file():
            yield entry
        else:
            raise DataError(f"{entry.path}: found no regular file, expected an image of class {name!r}")


def _subfolder(classes: Classes) -> tuple[str, str] | None:
    """The name of a class, and a subfolder of its folder with a file of it; None if there is none."""
    pairs = ((name, Path(file.name).parent) for name, files in classes.items() for file in files)
    return next(((name, str(place)) for name, place in pairs if place.name != name), None)


def _checked(classes: Classes, place: Path) -> Classes:
    """The classes. Raises DataError where all files are in subfolders, which then may be the folders of the classes."""
    in_subfolders = all(Path(file.name).parent.name != name for name, files in classes.items() for file in files)
    if in_subfolders and (found := _subfolder(classes)):
        raise DataError(f"{place}: found all files in subfolders such as {found[1]}, expected {place}/CLASS/FILE")
    return classes


def _require_within(entry: os.DirEntry[str], folder: Path) -> None:
    with reading(entry.path):
        target = Path(os.path.realpath(entry.path, strict=True)) if entry.is_symlink() else None
    if target is not None and not target.is_relative_to(os.path.realpath(folder)):
        raise DataError(f"{entry.path}: found a link that leads out of {folder}, expected files in it")


Tree: TypeAlias = "dict[str, Any]"
"""The content of a folder of an archive, by name: the bytes of a file, or a Tree."""


def _listing_of_archive(path: Path) -> Listing:
    tree: Tree = {}
    for name, content in _members(path):
        _insert(tree, name, content)
    place = path
    while len(names := [name for name in tree if _is_folder(tree, name)]) == 1 and _has_folders(tree, names[0]):
        if names == ["train"]:
            break
        place, tree = place / names[0], tree[names[0]]
    parts = layout(partial(_is_folder, tree), partial(_has_folders, tree))
    files = (part if part is None else _classes_in_tree(tree[part] if part else tree, place / part) for part in parts)
    return Listing(parts, tuple(files))


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the regular files in the archive."""
    import tarfile
    import zipfile

    left = machine_memory()
    with _reported(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    if not entry.is_dir():
                        left -= _size(path, entry.file_size, left)
                        yield entry.filename, archive.read(entry)
            return
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isdir():
                    continue
                if not member.isreg():
                    raise DataError(f"{path}: found {visible(member.name)}, a link or device; expected regular files")
                left -= _size(path, member.size, left)
                file = tar.extractfile(member)
                assert file is not None  # as the member is a regular file
                yield member.name, file.read()


def _size(path: Path, size: int, left: int) -> int:
    """The size of a member. Raises DataError if it is more than is left of the memory."""
    if size > left:
        advice = "unpack it, and set data.path to the folder"
        raise DataError(f"{path}: found more than this machine's memory holds; {advice}")
    return size


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Make a DataError of what the libraries for archives raise."""
    import lzma
    import tarfile
    import zipfile
    import zlib

    damaged = tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError
    try:
        yield
    except (OSError, *damaged, RuntimeError, ValueError) as error:  # RuntimeError for an encrypted archive
        cause = getattr(error, "strerror", None) or error
        if isinstance(error, tarfile.ReadError):  # its text has a line for each way of compression
            cause = "it is no zip or tar archive, or it is damaged"
        raise DataError(f"{path}: cannot be read ({cause})") from error


def _insert(tree: Tree, name: str, content: bytes) -> None:
    """Put a file into the tree, unless it or one of its folders is hidden."""
    *folders, file = PurePosixPath(name.lstrip("/")).parts or ("",)
    if any(part.startswith((".", "__MACOSX")) for part in (*folders, file)) or not file:
        return
    for folder in folders:
        inner = tree.setdefault(folder, {})
        if not isinstance(inner, dict):  # a file of that name
            return
        tree = inner
    tree[file] = content


def _is_folder(tree: Tree, name: str) -> bool:
    return isinstance(tree.get(name), dict)


def _has_folders(tree: Tree, name: str) -> bool:
    return any(_is_folder(tree[name], inner) for inner in tree[name])


def _classes_in_tree(tree: Tree, part: Path) -> Classes:
    """The files of each class in a folder of an archive; `part` is its name in messages."""
    classes: Classes = {}
    for name in sorted(name for name in tree if _is_folder(tree, name)):
        classes[name] = list(_files_in_tree(tree[name], part / name))
    if not classes:
        raise DataError(f"{part}: found no folders, expected one per class")
    return _checked(classes, part)


def _files_in_tree(tree: Tree, place: Path) -> Iterator[ImageFile]:
    for name, content in sorted(tree.items()):
        if isinstance(content, dict):
            yield from _files_in_tree(content, place / name)
        else:
            yield ImageFile(str(place / name), len(content), content)


class _Images(NamedTuple):
    """What the cache keeps.

    Attributes:
        pixels: uint8 (N, C, H, W), of all parts one after the other.
        labels: the indices of the classes.
        classes: the names of the classes of all parts, in sorted order.
        parts: the folders of the parts, as in `Layout`.
        sizes: the numbers of images in the parts.
        skipped: of images that are left out the names, relative to the folder or archive, and the reasons.
        others: the names of files of other types.
        subfolder: a class, and a subfolder of its folder that has images; None if there is none.
    """

    pixels: np.ndarray
    labels: Sequence[int]
    classes: Sequence[str]
    parts: Sequence[str | None]
    sizes: Sequence[int]
    skipped: Sequence[tuple[str, str]]
    others: Sequence[str]
    subfolder: Sequence[str] | None


def _read(place: Path, state: str, options: ImageOptions, listing: Callable[[], Listing]) -> Parts:
    """The parts of a folder or archive. The cache has the images of a `place` in its `state`."""
    found = _cached(place, state, options, listing)
    skipped = [f"{place / name}: {reason}" for name, reason in found.skipped]
    if skipped:
        names = first_names([visible(name) for name, _ in found.skipped], MOST_NAMES)
        what = f"skipped {counted(len(skipped), 'images')} that cannot be read: {names}"
        warn(place, f"{what}; adtrain data inspect lists the reasons")
    if found.others:
        first, number = visible(str(place / found.others[0])), counted(len(found.others), "files")
        warn(place, f"skipped {number} of other types than PNG and JPEG, such as {first}")
    if found.subfolder is not None:
        name, where = map(visible, found.subfolder)
        warn(place, f"the images in subfolders are of the class of the folder, such as those in {where} of {name}")
    train, _, test = found.parts
    if test in VALIDATION_FOLDERS:
        warn(place, f"found no folder test; {test}, which has validation images, is the test part")
    labels = np.array(found.classes)[np.array(found.labels, int)]
    count = len(labels) - found.sizes[2]
    assert train is not None
    return Parts(
        Part(found.pixels[:count], labels[:count], str(place / train)),
        None if test is None else Part(found.pixels[count:], labels[count:], str(place / test)),
        tuple(skipped),
        tuple(found.classes),
        validation_rows=found.sizes[1],
    )


def _cached(place: Path, state: str, options: ImageOptions, listing: Callable[[], Listing]) -> _Images:
    """The images of the files in the listing, from the cache where it has them."""
    import PIL

    sources = [os.stat(file) for file in (__file__, images.__file__)]
    versions = PIL.__version__, *(f"{source.st_size} {source.st_mtime_ns}" for source in sources)
    key = digest("images", *versions, repr(dataclasses.astuple(options)), os.path.abspath(place), state)
    cache = open_cache("data")
    if (content := cache.content(key, ".images")) is not None:
        size = int.from_bytes(content[:8], "little")
        shape, *others = json.loads(bytes(content[8 : 8 + size]))
        return _Images(np.frombuffer(content, np.uint8, offset=8 + size).reshape(shape), *others)
    found = _decoded(place, listing(), options)
    header = json.dumps([found.pixels.shape, *found[1:]]).encode()
    cache.store_later(key, ".images", [len(header).to_bytes(8, "little"), header, found.pixels.reshape(-1).data])
    return found


def _decoded(place: Path, listing: Listing, options: ImageOptions) -> _Images:
    """The images of the files, all in one shape."""
    classes = sorted({name for of_part in listing.files for name in of_part or ()})
    numbers = {name: i for i, name in enumerate(classes)}
    rows = [
        (file, numbers[name], i)
        for i, of_part in enumerate(listing.files)
        for name, files in (of_part or {}).items()
        for file in files
    ]
    found, first = np.empty((0, 1, 0, 0), np.uint8), ""
    labels, sizes, skipped, others = list[int](), [0, 0, 0], list[tuple[str, str]](), list[str]()
    decoded = decode_all([file for file, *_ in rows], Wanted(options.channels, options.image_size))
    for (file, label, part), image in zip(rows, decoded, strict=True):
        if isinstance(image, Unreadable):
            if not image.is_image and Path(file.name).suffix.lower() not in images.SUFFIXES:
                others.append(os.path.relpath(file.name, place))
            elif options.skip_broken:
                skipped.append((os.path.relpath(file.name, place), image.problem.removeprefix(f"{file.name}: ")))
            else:
                raise BrokenImageError(f"{image.problem}; data.skip_broken: true skips such images")
            continue
        channels, height, width = image.shape
        if not labels:
            first = file.name
            require_memory(str(place), len(rows) * image.size, "; set data.image_size to a smaller one")
            found = np.empty((len(rows), *image.shape), np.uint8)
        if found.shape[2:] != (height, width):
            sides = f"{file.name} is {height} x {width}, {first} is {found.shape[2]} x {found.shape[3]}"
            raise SizesError(sides, images.median_size([file for file, *_ in rows]))
        if channels > found.shape[1]:  # the images before this one are grey
            found = np.repeat(found, channels, axis=1)
        found[len(labels)] = image
        labels.append(label)
        sizes[part] += 1
    for name, count in (listing.parts.train, sizes[0] + sizes[1]), (listing.parts.test, sizes[2]):
        if name is not None and not count:
            raise DataError(f"{place / name}: found no image that can be read, expected PNG or JPEG files")
    subfolder = next(filter(None, map(_subfolder, filter(None, listing.files))), None)
    return _Images(found[: len(labels)], labels, classes, listing.parts, sizes, skipped, others, subfolder)


FOLDER = Format(
    name="image folder",
    title="a folder of images",
    options=ImageOptions,
    examples="images",
    read=read_folder,
    content="a subfolder for each class",
    is_content=lambda folder: any(entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith(".")),
)
ARCHIVE = Format(
    name="archive",
    title="an archive of images",
    suffixes=ARCHIVES,
    options=ImageOptions,
    examples="images",
    read=read_archive,
)
