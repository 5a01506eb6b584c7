"""Read image files as arrays, by Pillow, which is imported when the first image is read.

An image is turned as its EXIF orientation says, so it is upright, as browsers show it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adtrain.data.errors import DataError
from adtrain.files import open_regular

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}
ORIENTED = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}
"""The entries of Pillow's `Image.info` that can hold an orientation. Most images have none, which is quick to see."""
GREY_MODES, COLOUR_MODES = {"1", "L", "LA"}, {"P", "PA", "RGB", "RGBA"}


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
