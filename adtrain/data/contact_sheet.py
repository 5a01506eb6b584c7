"""A contact sheet of a data set: some images of each class."""

from __future__ import annotations

import io
from collections.abc import Callable
from math import ceil

import numpy as np

from adtrain.data.datasets import DataSet
from adtrain.data.errors import DataError

COLUMNS, MOST_CLASSES = 12, 100
GAP, MARGIN, MOST_TEXT_WIDTH, TEXT_HEIGHT = 8, 20, 320, 26
SMALLEST, LARGEST = 112, 224
BACKGROUND, INK = (255, 255, 255), (30, 30, 30)


def contact_sheet(data: DataSet) -> bytes:
    """A PNG file with one row per class: its name, its number of training images, and the first COLUMNS of them.

    The first MOST_CLASSES classes are shown. For float32 images, black is the minimum and white the maximum of the
    images shown. Raises DataError if the examples are not images of 1 or 3 channels.
    """
    from PIL import Image, ImageDraw, ImageFont

    channels, height, width = data.train.images.shape[1:]
    if channels not in (1, 3) or height * width == 1 or data.train.is_text:
        raise DataError(f"{data.name}: found examples of shape {(channels, height, width)}, expected images to show")
    if data.targets:
        raise DataError(f"{data.name}: found numbers to predict, expected classes to show images of")
    labels = range(min(len(data.classes), MOST_CLASSES))
    rows = [np.flatnonzero(data.train.labels == label)[:COLUMNS] for label in labels]
    indices = np.concatenate(rows)
    pixels = dict(zip(indices.tolist(), _pixels(data.train.images[indices]), strict=True))
    counts = np.bincount(data.train.labels, minlength=len(data.classes))

    scale = min(max(SMALLEST / max(height, width), 1), LARGEST / max(height, width)) if height and width else 1
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resampling = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR
    font = ImageFont.load_default(TEXT_HEIGHT)
    texts = [(_fitted(data.classes[i], font.getlength), f"{counts[i]:,}") for i in labels]
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
