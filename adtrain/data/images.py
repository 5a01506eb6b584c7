"""Image files: read as arrays, folders of them with a subfolder per class, and contact sheets that show a data set.

Pillow reads them. It is imported when the first image is read. An image is turned as its EXIF orientation says,
so it is upright, as in a browser.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from adtrain.data.errors import DataError, DataOptionError, warn
from adtrain.data.file_array import require_memory
from adtrain.data.part import NOTHING, Format, Known, Part, Parts
from adtrain.data.split import Split
from adtrain.files import open_regular
from adtrain.option_types import Expected, Size
from adtrain.text import counted, visible

if TYPE_CHECKING:
    from PIL import Image

_log = logging.getLogger(__name__)

SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}
ORIENTED = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}
"""The entries of Pillow's `Image.info` that can hold an orientation. Most images have none, which is quick to see."""
GREY_MODES, COLOUR_MODES = {"1", "L", "LA"}, {"P", "PA", "RGB", "RGBA"}


VALIDATION_FOLDERS = ("val", "valid", "validation")
"""Possible folders of the validation images, next to train/ and test/; the first that exists is used."""

# Of a contact sheet: columns and rows; sizes in pixels; colours.
COLUMNS, MOST_CLASSES = 12, 100
GAP, MARGIN, MOST_TEXT_WIDTH, TEXT_HEIGHT = 8, 20, 320, 26
SMALLEST, LARGEST = 112, 224
BACKGROUND, INK = (255, 255, 255), (30, 30, 30)


@dataclass(frozen=True)
class ImageOptions:
    """The options of a folder of images.

    Attributes:
        image_size: [height, width] to resize all images to
        channels: 1 for grey, 3 for colour; default: 3 if any image is in colour
        skip_broken: skip images that cannot be read, with a warning
    """

    image_size: Annotated[tuple[Size, Size], Expected("a list of height and width")] | None = None
    channels: Annotated[Literal[1, 3], Expected("1 or 3")] | None = None
    skip_broken: bool = False


def read_image(path: str | Path, channels: int) -> np.ndarray:
    """The PNG or JPEG file as uint8 (C, H, W), converted to grey (`channels` 1) or colour (`channels` 3).

    Raises DataError if the file is missing, not such an image or transparent.
    """
    if channels not in MODES:
        raise DataError(f"{path}: an image file has 1 or 3 channels, the network takes {channels}; use an IDX file")
    with _opened(path) as image:
        if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
            raise DataError(
                f"{path}: found transparent pixels, expected an opaque image; flatten it on a background first"
            )
        pixels = np.asarray(image.convert(MODES[channels]))
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1))


def read_header(path: str | Path) -> tuple[int, int, int]:
    """(channels, height, width) of the file, with 1 channel for grey and 3 for colour. Raises as `read_image` does."""
    with _opened(path) as image:
        return 1 if image.mode in GREY_MODES else 3, image.height, image.width


@contextmanager
def _opened(path: str | Path) -> Iterator[Image.Image]:
    """The upright image, if its pixels are 8-bit grey or colour; converting 16-bit values would clip them."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_regular(path) as file, Image.open(file, formats=("PNG", "JPEG")) as image:
                if image.mode not in GREY_MODES | COLOUR_MODES:
                    raise DataError(f"{path}: found pixels of kind {image.mode}, expected 8-bit grey or RGB")
                if not ORIENTED.isdisjoint(image.info):
                    ImageOps.exif_transpose(image, in_place=True)
                yield image
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: found neither a PNG nor a JPEG image") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: found too many pixels ({error})") from error
    except (OSError, SyntaxError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({cause})") from error


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The image uint8 (C, H, W) at another size, by Pillow's bilinear filter, which is antialiased."""
    from PIL import Image

    bilinear = Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(channel).resize((width, height), bilinear)) for channel in image])


def read_folder(folder: Path, options: ImageOptions, known: Known = NOTHING) -> Parts:
    """All images as uint8 (N, C, H, W); the classes are the names of the subfolders, in sorted order.

    If train/ has subfolders, it is the training part, test/ the test part, and the first of VALIDATION_FOLDERS has the
    validation images; without test/ these are the test part, with a warning. Hidden files and folders (.name) are
    ignored, and so are files next to the folders of the classes. Files that are no images, and have no name of one, are
    skipped with a warning. Links must stay within the folder. Raises DataError for an unreadable image, and
    DataOptionError if the images differ in size and no size is given.
    """

    def existing(*names: str) -> Path | None:
        return next((folder / name for name in names if (folder / name).is_dir()), None)

    train, test, validation = existing("train"), existing("test"), existing(*VALIDATION_FOLDERS)
    if train is None or not any(entry.is_dir() for entry in _entries(train)):
        train, test, validation = folder, None, None
    elif test is None and validation is not None:
        shown = visible(validation.name)
        warn(folder, f"found no folder test; {shown}, which has validation images, is the test part")
        test, validation = validation, None
    reader = _Reader(options)
    names = set[str]()

    def files(part: Path | None) -> list[tuple[str, Path]]:
        classes = {} if part is None else _classes(part, folder)
        names.update(classes)
        return [(name, path) for name, paths in classes.items() for path in paths if reader.read_header(path)]

    training, held_out, tested = files(train), files(validation), files(test)
    if reader.others:
        first, count = visible(str(reader.others[0])), counted(len(reader.others), "files")
        warn(folder, f"skipped {count} of other types than PNG and JPEG, such as {first}")
    part, kept = reader.read_part([*training, *held_out], train)
    return Parts(
        part,
        None if test is None else reader.read_part(tested, test)[0],
        tuple(reader.skipped),
        tuple(sorted(names)),
        validation_rows=sum(i >= len(training) for i in kept),
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The files and folders that are not hidden, in sorted order."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from error


def _classes(part: Path, folder: Path) -> dict[str, list[Path]]:
    """The files of each class in the folder `part`, which is `folder` or a subfolder of it."""
    classes: dict[str, list[Path]] = {}
    for entry in _entries(part):
        _require_within(entry, folder)
        if entry.is_dir():
            files = _entries(Path(entry.path))
            for file in files:
                _require_within(file, folder)
                if not file.is_file():
                    raise DataError(f"{file.path}: found no regular file, expected an image of class {entry.name!r}")
            if not files:
                raise DataError(f"{entry.path}: found an empty folder, expected the images of class {entry.name!r}")
            classes[entry.name] = [Path(file.path) for file in files]
    if not classes:
        raise DataError(f"{part}: found no subfolders, expected one per class")
    return classes


def _require_within(entry: os.DirEntry[str], folder: Path) -> None:
    try:
        target = Path(os.path.realpath(entry.path, strict=True)) if entry.is_symlink() else None
    except OSError as error:
        raise DataError(f"{entry.path}: cannot be read ({error.strerror or error})") from error
    if target is not None and not target.is_relative_to(os.path.realpath(folder)):
        raise DataError(f"{entry.path}: found a link that leads out of {folder}, expected files in it")


class _Reader:
    """Reads images as arrays of one shape, which it finds from all headers first.

    Call `read_header` for every image, then `read_part`.
    """

    def __init__(self, options: ImageOptions) -> None:
        self.options = options
        self.skipped: list[str] = []
        self.others: list[Path] = []
        self.size, self.first, self.colour = options.image_size, Path(), False

    def read_header(self, path: Path) -> bool:
        """Read the image's size and kind; False if the image is skipped."""
        try:
            channels, *size = read_header(path)
        except DataError as error:
            if path.suffix.lower() in SUFFIXES:
                self._skip(error)
            else:
                self.others.append(path)
            return False
        self.colour |= channels == 3
        if self.size is None:
            self.size, self.first = (size[0], size[1]), path
        elif self.options.image_size is None and self.size != tuple(size):
            sizes = f"{path} is {size[0]} x {size[1]}, {self.first} is {self.size[0]} x {self.size[1]}"
            raise DataOptionError("image_size", f"missing, expected [height, width], as the images differ: {sizes}")
        return True

    def read_part(self, files: list[tuple[str, Path]], place: Path) -> tuple[Part, list[int]]:
        """The images of these files, each with its class, in this order, and the indices of those that can be read."""
        count = len(files)
        if self.size is None or not count:
            raise DataError(f"{place}: found no image that can be read, expected PNG or JPEG files")
        shape = (self.options.channels or (3 if self.colour else 1), *self.size)
        require_memory(str(place), count * int(np.prod(shape)), "; set data.image_size to a smaller one")
        found, kept = np.empty((count, *shape), np.uint8), list[int]()
        for i, (_, path) in enumerate(files):
            try:
                image = read_image(path, shape[0])
            except DataError as error:
                self._skip(error)
                continue
            found[len(kept)] = image if image.shape == shape else resized(image, *self.size)
            kept.append(i)
        if not kept:
            raise DataError(f"{place}: found no image that can be read, expected PNG or JPEG files")
        return Part(found[: len(kept)], np.array([files[i][0] for i in kept]), str(place)), kept

    def _skip(self, error: DataError) -> None:
        if not self.options.skip_broken:
            raise DataError(f"{error}; data.skip_broken: true skips such images") from error
        self.skipped.append(str(error))
        _log.warning("adtrain: warning: skipped %s", visible(error))


FORMAT = Format(
    name="image folder",
    title="a folder of images",
    options=ImageOptions,
    examples="images",
    read=read_folder,
    content="a subfolder for each class",
    is_content=lambda folder: any(entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith(".")),
)


def contact_sheet(name: str, train: Split, classes: Sequence[str]) -> bytes:
    """A PNG file with one row per class: its name, its number of training images, and the first COLUMNS of them.

    The first MOST_CLASSES classes are shown. For float32 images, black is the minimum and white the maximum of the
    images shown. Raises DataError, with the data set's name, if the examples are not images of 1 or 3 channels.
    """
    from PIL import Image, ImageDraw, ImageFont

    channels, height, width = train.images.shape[1:]
    if channels not in (1, 3) or height * width == 1 or train.is_text:
        raise DataError(f"{name}: found examples of shape {(channels, height, width)}, expected images to show")
    if not classes:
        raise DataError(f"{name}: found numbers to predict, expected classes to show images of")
    labels = range(min(len(classes), MOST_CLASSES))
    rows = [np.flatnonzero(train.labels == label)[:COLUMNS] for label in labels]
    indices = np.concatenate(rows)
    pixels = dict(zip(indices.tolist(), _pixels(train.images[indices]), strict=True))
    counts = np.bincount(train.labels, minlength=len(classes))

    scale = min(max(SMALLEST / max(height, width), 1), LARGEST / max(height, width)) if height and width else 1
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resampling = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR
    font = ImageFont.load_default(TEXT_HEIGHT)
    texts = [(_fitted(classes[i], font.getlength), f"{counts[i]:,}") for i in labels]
    left = MARGIN + ceil(max(font.getlength(text) for pair in texts for text in pair)) + 2 * GAP
    step_x, step_y = size[0] + GAP, max(size[1], 3 * TEXT_HEIGHT) + GAP
    sheet = Image.new(
        "RGB", (left + COLUMNS * step_x - GAP + MARGIN, 2 * MARGIN + len(rows) * step_y - GAP), BACKGROUND
    )
    draw = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        y = MARGIN + i * step_y
        for line, text in enumerate(texts[i]):
            draw.text((MARGIN, y + line * (TEXT_HEIGHT + GAP)), text, INK, font)
        for j, index in enumerate(row.tolist()):
            image = Image.fromarray(pixels[index]).convert("RGB").resize(size, resampling)
            sheet.paste(image, (left + j * step_x, y))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def _pixels(images: np.ndarray) -> np.ndarray:
    """The images as uint8 (N, H, W) or (N, H, W, 3)."""
    if images.dtype != np.uint8:
        low, high = float(images.min()), float(images.max())
        images = ((images - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    return np.ascontiguousarray(images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1))


def _fitted(text: str, length: Callable[[str], float]) -> str:
    """The text, shortened to the width of the labels."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if length(text) <= MOST_TEXT_WIDTH:
        return text
    while text and length(f"{text}...") > MOST_TEXT_WIDTH:
        text = text[:-1]
    return f"{text}..."
