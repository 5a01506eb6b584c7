"""Image files as a network takes them. Needs Pillow, imported when the first image is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adtrain.data.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

MODES = {1: "L", 3: "RGB"}


def read_image(path: str | Path, channels: int) -> np.ndarray:
    """The PNG or JPEG file as uint8 (C, H, W): colour is turned into grey, or grey into colour, as `channels` asks.

    Raises DataError when the file is missing or no such image, is transparent, and when Pillow is absent.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError("reading an image file needs Pillow; pip install 'adtrain[report]'") from error
    if channels not in MODES:
        raise DataError(f"{path}: an image file has 1 or 3 channels, the network takes {channels}; give an IDX file")
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            _refuse_mode(image, path)
            pixels = np.asarray(image.convert(MODES[channels]))
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: found neither a PNG nor a JPEG image") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({cause})") from error
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1))


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The image uint8 (C, H, W) at another size, by bilinear interpolation over all pixels that a new one covers."""
    from PIL import Image

    bilinear = Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(channel).resize((width, height), bilinear)) for channel in image])


def _refuse_mode(image: Image.Image, path: str | Path) -> None:
    """What `convert` would turn into other pixels than a person sees: 16-bit values clipped, transparency dropped."""
    if image.mode not in {"1", "L", "LA", "P", "PA", "RGB", "RGBA"}:
        raise DataError(f"{path}: found pixels of kind {image.mode}, expected 8-bit grey or RGB")
    if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
        raise DataError(f"{path}: found transparent pixels, expected an opaque image; flatten it on a background first")
