"""Image files: read as arrays, also many in several processes, and contact sheets that show a data set.

Pillow reads them. It is imported when the first image is read. An image is turned as its EXIF orientation says,
so it is upright, as in a browser.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from subprocess import Popen
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from adtrain.child_process import end, started
from adtrain.data.errors import DataError
from adtrain.data.split import Split
from adtrain.files import open_regular

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}
ORIENTED = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}
"""The entries of Pillow's `Image.info` that can hold an orientation. Most images have none, which is quick to see."""
GREY_MODES, COLOUR_MODES = {"1", "L", "LA"}, {"P", "PA", "RGB", "RGBA", "CMYK"}
DEEP_MODES = {"I", "I;16", "I;16B"}
"""Grey with 16 bits. Pillow itself reduces colours with 16 bits to their high bytes."""

# Of a contact sheet: columns and rows; sizes in pixels; colours.
COLUMNS, MOST_CLASSES = 12, 100
GAP, MARGIN, MOST_TEXT_WIDTH, TEXT_HEIGHT = 8, 20, 320, 26
SMALLEST, LARGEST = 112, 224
BACKGROUND, INK = (255, 255, 255), (30, 30, 30)


class OtherTypeError(DataError):
    """The file is neither a PNG nor a JPEG image."""


def read_image(path: str | Path, channels: int | None = None, content: bytes | None = None) -> np.ndarray:
    """The PNG or JPEG file as uint8 (C, H, W), in grey (`channels` 1) or colour (3); by default as the file has it.

    `content` is the content of the file, by default read from `path`. Colours of a palette are looked up. CMYK becomes
    RGB by (1 - C)(1 - K) and so on, without a colour profile. Of 16 bits the high byte is kept.

    Raises OtherTypeError if the file is not such an image, and DataError if it is missing, damaged or transparent.
    """
    if channels not in {None, *MODES}:
        raise DataError(f"{path}: an image file has 1 or 3 channels, the network takes {channels}; use an IDX file")
    with _opened(path, content) as image:
        if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
            raise DataError(
                f"{path}: found transparent pixels, expected an opaque image; flatten it on a background first"
            )
        if image.mode in DEEP_MODES:
            pixels = _high_bytes(np.asarray(image), path)[..., np.newaxis].repeat(channels or 1, axis=2)
        else:
            mode = MODES[channels or (1 if image.mode in GREY_MODES else 3)]
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1))


def _high_bytes(pixels: np.ndarray, path: str | Path) -> np.ndarray:
    """The high bytes of pixels with 16 bits. Raises DataError where these are 0 because only the low bytes are used."""
    if 0 < (largest := pixels.max()) < 256:
        reason = f"found pixels of 16 bits, of at most {largest} of 65535: all of them are black"
        raise DataError(f"{path}: {reason}; store numbers up to 255 in 8 bits")
    high: np.ndarray = (pixels >> 8).astype(np.uint8)
    return high


@contextmanager
def _opened(path: str | Path, content: bytes | None) -> Iterator[Image.Image]:
    """The upright image."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            file = open_regular(path) if content is None else io.BytesIO(content)
            with file, Image.open(file, formats=("PNG", "JPEG")) as image:
                if image.mode not in GREY_MODES | COLOUR_MODES | DEEP_MODES:
                    raise DataError(f"{path}: found pixels of kind {image.mode}, expected grey, RGB, CMYK or a palette")
                if not ORIENTED.isdisjoint(image.info):
                    ImageOps.exif_transpose(image, in_place=True)
                yield image
    except UnidentifiedImageError as error:
        raise OtherTypeError(f"{path}: found neither a PNG nor a JPEG image") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: found too many pixels ({error})") from error
    except (OSError, SyntaxError, ValueError) as error:
        cause = getattr(error, "strerror", None) or "it is damaged or cut short"
        raise DataError(f"{path}: cannot be read ({cause})") from error


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The image uint8 (C, H, W) at another size, by Pillow's bilinear filter, which is antialiased."""
    from PIL import Image

    bilinear = Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(channel).resize((width, height), bilinear)) for channel in image])


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


CHUNK = 256
"""Images that are decoded for one answer of a process."""
SECONDS_PER_FILE, SECONDS_PER_BYTE = 1.2e-4, 4e-8
"""The time to decode an image is about this for the file, and for each of its bytes."""
LEAST_SECONDS = 0.5
"""The work for which a process is started; the start takes about 0.2 s."""

SERVE = """
import sys
sys.path[:] = {path!r}
from adtrain.data.images import serve
serve()
"""
"""The program of a process, whose folders of modules are those of this process."""


class ImageFile(NamedTuple):
    """A file that may be an image: its name, the number of its bytes, and its content, None if it is to be read."""

    name: str
    size: int
    content: bytes | None = None


class Wanted(NamedTuple):
    """How images are decoded: 1 or 3 channels or, by default, those that an image has; (height, width) or its own."""

    channels: int | None
    size: tuple[int, int] | None


class Unreadable(NamedTuple):
    """Why a file cannot be read, and whether it is an image at all."""

    problem: str
    is_image: bool


Decoded: TypeAlias = "np.ndarray | Unreadable"
"""The pixels, uint8 (C, H, W), if the file can be read."""


def decode(files: Sequence[ImageFile], wanted: Wanted) -> list[Decoded]:
    """The images in these files, in their order."""
    return [_decoded(file, wanted) for file in files]


def _decoded(file: ImageFile, wanted: Wanted) -> Decoded:
    try:
        image = read_image(file.name, wanted.channels, file.content)
    except DataError as error:
        return Unreadable(str(error), not isinstance(error, OtherTypeError))
    return image if wanted.size in (None, image.shape[1:]) else resized(image, *wanted.size)


def median_size(files: Sequence[ImageFile]) -> tuple[int, int]:
    """The medians of the heights and of the widths of those files that are images, of which there is one or more.

    Only the headers are read. Of two middle values the median is the larger one.
    """
    sizes = []
    for file in files:
        with suppress(DataError), _opened(file.name, file.content) as image:
            sizes.append(image.size)
    width, height = (sorted(sides)[len(sides) // 2] for sides in zip(*sizes, strict=True))
    return height, width


def decode_all(files: Sequence[ImageFile], wanted: Wanted) -> Iterator[Decoded]:
    """`decode` in as many processes as pay off. A process that fails is replaced by this one."""
    chunks = [files[i : i + CHUNK] for i in range(0, len(files), CHUNK)]
    count = min(os.cpu_count() or 1, int(seconds(files) / LEAST_SECONDS), len(chunks))
    if count < 2:
        for chunk in chunks:
            yield from decode(chunk, wanted)
        return
    processes = [_start() for _ in range(count)]
    idle = SimpleQueue[Popen[bytes] | None]()
    for process in processes:
        idle.put(process)

    def answer(chunk: Sequence[ImageFile]) -> list[Decoded]:
        process = idle.get()
        try:
            found = None if process is None else _asked(process, chunk, wanted)
            process = process if found is not None else None
            return decode(chunk, wanted) if found is None else found
        finally:
            idle.put(process)

    try:
        with ThreadPoolExecutor(count) as threads:
            try:
                for decoded in threads.map(answer, chunks):
                    yield from decoded
            finally:  # after an error the other answers are not needed
                threads.shutdown(wait=False, cancel_futures=True)
    finally:
        end(*(process for process in processes if process is not None))


def seconds(files: Sequence[ImageFile]) -> float:
    """An estimate of the processor time to decode the files."""
    return len(files) * SECONDS_PER_FILE + sum(file.size for file in files) * SECONDS_PER_BYTE


def _start() -> Popen[bytes] | None:
    try:
        return started([sys.executable, "-c", SERVE.format(path=sys.path)])
    except OSError:
        return None


def _asked(process: Popen[bytes], chunk: Sequence[ImageFile], wanted: Wanted) -> list[Decoded] | None:
    """What the process decodes; None if it has failed."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, EOFError, pickle.UnpicklingError):
        pickle.dump((list(chunk), wanted), process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        found: list[Decoded] = pickle.load(process.stdout)
        return found
    return None


def serve() -> None:
    """Decode what comes from stdin, until it is closed."""
    with suppress(EOFError):
        while True:
            files, wanted = pickle.load(sys.stdin.buffer)
            pickle.dump(decode(files, wanted), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()
