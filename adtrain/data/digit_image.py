"""Photographs of digits in the form of MNIST's images: light ink on a black background, scaled and centred.

https://yann.lecun.com/exdb/mnist describes that form: each digit was scaled to fit into 20 x 20 pixels, with its aspect
ratio, and placed so that its centre of mass is the centre of 28 x 28 pixels. Needs Pillow.

The brightness of the paper at a pixel is that of the window around it, so it follows shading. Ink differs from the
paper. The lines of ruled paper are removed: they cross the whole image. The digit is the largest connected shape, with
the parts near it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from adtrain.data.errors import DataError

LIGHT, DARK = 0.7, 0.3
"""Means of training images, as fractions of white, that count as a light and as a dark background."""

BOX = 20 / 28
"""The longer side of a digit's box, as a fraction of the image's."""

SIDE, COARSE_SIDE = 400, 64
"""The longer sides, in pixels, of the images in which the digit and the paper are looked for."""

WINDOWS = (0.35, 0.6)
"""Sides of the window around a pixel that holds more paper than ink, as fractions of the image's shorter side. The
smaller one follows shadows. The larger one is for a digit with thick strokes that fills the image."""

MOST_PAPER = 0.75
"""The quantile of the pixels of a window that is the brightness of paper under dark ink."""

LEAST_CONTRAST = 0.12
"""The least difference between ink and paper, as a fraction of the paper's brightness, or of white if ink is light."""

NOISE = 6
"""Ink differs from the paper by more than this number of standard deviations of the paper."""

PAPER, INK = 0.25, 0.75
"""Fractions of the contrast: paper is below the first one, full ink above the second one."""

LINE, END, MOST_SLOPE, THIN = 0.5, 0.12, 0.15, 0.025
"""A ruled line is ink along at least the fraction LINE of the width, and of both ends of the width, which have the
fraction END of it. MOST_SLOPE is its greatest slope, THIN its greatest thickness as a fraction of the longer side."""

LEAST_STROKE = 0.09
"""Thinner strokes are thickened to this fraction of the digit's longer side; MNIST's have about 0.12."""

PART, NEAR = 0.04, 0.25
"""A part of a digit has at least the fraction PART of the largest part's area. It is at most the fraction NEAR of the
largest part's size away from it."""

MOST_INK = 0.75
"""A digit has at most this fraction of ink in its box, except a long stroke."""

LEAST_PLAIN = 0.98
"""At least this fraction of the image is the digit, ruled lines, or differs from the paper by less than half of ink."""

Ink = Literal["auto", "dark", "light"]


@dataclass(frozen=True)
class Digit:
    """A digit in the form of MNIST's images.

    Attributes:
        image: uint8 (1, height, width), light ink on black.
        was_dark: whether the ink was darker than the paper.
        doubt: why the picture may show no single digit on plain paper; empty if nothing speaks against it.
    """

    image: np.ndarray
    was_dark: bool
    doubt: str


class _Shape(NamedTuple):
    """A connected shape of ink: the rows and columns of its pixels, and their number."""

    rows: np.ndarray
    columns: np.ndarray
    area: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        """(top, bottom, left, right), each inclusive."""
        return int(self.rows.min()), int(self.rows.max()), int(self.columns.min()), int(self.columns.max())


def looks_inverted(image: np.ndarray, mean: float) -> bool:
    """Whether the border of a grey image, uint8 (1, H, W), is light and training images are dark, or the reverse.

    `mean` is that of the training images, as a fraction of white. False where they are neither light nor dark.
    """
    return (mean < DARK and has_light_background(image)) or (mean > LIGHT and not has_light_background(image))


def has_light_background(image: np.ndarray) -> bool:
    """Whether the median of the border of a grey image, uint8 (1, H, W), is lighter than half of white."""
    pixels = image[0]
    return bool(np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])) > 127.5)


def centred(image: np.ndarray, height: int, width: int, place: str, ink: Ink = "auto") -> Digit:
    """The digit in a grey image, uint8 (1, H, W), as an image of `height` x `width` pixels.

    `ink` says whether it is darker or lighter than the paper. Raises DataError that names `place` if there is no ink.
    """
    pixels = _reduced(image[0], SIDE)
    best: Digit | None = None
    for window in WINDOWS:
        digit = _digit(pixels, window, height, width, ink)
        if digit is not None and not digit.doubt:
            return digit
        best = best or digit
    if best is None:
        raise DataError(f"{place}: found no ink on plain paper, expected a digit; --center no takes the image as it is")
    return best


def _digit(pixels: np.ndarray, window: float, height: int, width: int, ink: Ink) -> Digit | None:
    """The digit in grey pixels, float64 (H, W), with a window of WINDOWS; None if there is no ink."""
    dark = ink == "dark"
    if ink == "auto":  # the pixels that differ most from the paper decide
        dark = float(((pixels - _paper(pixels, window, 0.5)) ** 3).sum()) < 0
    paper = _paper(pixels, window, MOST_PAPER if dark else 1 - MOST_PAPER)
    difference = (paper - pixels) / np.maximum(paper, 24) if dark else (pixels - paper) / np.maximum(255 - paper, 24)
    difference = difference - np.median(difference)
    mask, contrast = _ink(difference)
    unruled = _without_lines(_without_lines(mask).T).T
    shapes = _shapes(unruled)
    if contrast < LEAST_CONTRAST or not shapes:
        return None
    parts, doubt = _parts_of_digit(shapes, mask.shape)
    kept = np.zeros(mask.shape, bool)
    for part in parts:
        kept[part.rows, part.columns] = True
    is_plain = np.abs(difference) < contrast / 2
    if not doubt and (is_plain | _grown(kept, 2) | (mask & ~unruled)).mean() < LEAST_PLAIN:
        doubt = "its background is not plain"
    soft = np.clip((difference / contrast - PAPER) / (INK - PAPER), 0, 1) * _grown(kept, 1)
    return Digit(_placed(_thickened(_cropped(soft)), height, width), dark, doubt)


def _reduced(pixels: np.ndarray, side: int) -> np.ndarray:
    """The pixels as float64, averaged to at most `side` pixels along the longer side."""
    from PIL import Image

    scale = side / max(pixels.shape)
    if scale >= 1:
        return pixels.astype(np.float64)
    size = max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX)).astype(np.float64)


def _paper(pixels: np.ndarray, window: float, quantile: float) -> np.ndarray:
    """The brightness of the paper at each pixel: a quantile of the window around it."""
    from PIL import Image, ImageFilter

    coarse = Image.fromarray(_reduced(pixels.astype(np.uint8), COARSE_SIDE).astype(np.uint8))
    side = max(3, round(window * min(coarse.size)) | 1)
    paper = coarse.filter(ImageFilter.RankFilter(side, round(quantile * (side**2 - 1))))
    return np.asarray(
        paper.filter(ImageFilter.GaussianBlur(1)).resize(pixels.shape[::-1], Image.Resampling.BILINEAR)
    ).astype(np.float64)


def _ink(difference: np.ndarray) -> tuple[np.ndarray, float]:
    """Where ink is, bool (H, W), and its contrast: the 80th percentile of the largest shape."""
    spread = 1.4826 * float(np.median(np.abs(difference - np.median(difference))))
    shapes = _shapes(difference > max(LEAST_CONTRAST / 2, NOISE * spread))
    if not shapes:
        return np.zeros(difference.shape, bool), 0.0
    inked = [difference[shape.rows, shape.columns] for shape in shapes]
    contrast = float(np.percentile(max(inked, key=lambda values: float((values**2).sum())), 80))
    return difference > contrast / 2, contrast


def _without_lines(mask: np.ndarray) -> np.ndarray:
    """The ink without thin lines from left to right, straight or slightly sloping."""
    height, width = mask.shape
    lengths = _run_lengths(mask)
    thin = mask & (lengths <= max(3, THIN * max(height, width)))
    rows, columns = np.nonzero(thin)
    if len(rows) < LINE * width:
        return mask
    best, lines, heights = 0, np.zeros(0, int), np.zeros(0, int)
    margin, end = int(MOST_SLOPE * width / 2) + 1, max(1, round(END * width))
    for slope in np.linspace(-MOST_SLOPE, MOST_SLOPE, 61):
        at = np.rint(rows - slope * (columns - width / 2)).astype(int) + margin
        # Thin ink, at its height on a line of this slope, or beside it.
        covered = np.zeros((height + 2 * margin, width), bool)
        for shift in (-1, 0, 1):
            covered[np.clip(at + shift, 0, len(covered) - 1), columns] = True
        is_line = covered.mean(axis=1) >= LINE
        for part in (covered[:, :end], covered[:, -end:]):
            is_line &= part.mean(axis=1) >= LINE
        if (total := int(covered[is_line].sum())) > best:
            best, lines, heights = total, np.flatnonzero(is_line), at
    if not len(lines):
        return mask
    on_line = np.isin(heights, np.unique(np.concatenate([lines - 1, lines, lines + 1])))
    thickness = np.median(lengths[rows[on_line], columns[on_line]])
    removed = mask.copy()
    removed[rows[on_line], columns[on_line]] &= lengths[rows[on_line], columns[on_line]] > thickness + 2
    return removed


def _run_lengths(mask: np.ndarray) -> np.ndarray:
    """For each pixel of the mask, the number of pixels of the mask in a vertical run through it; 0 elsewhere."""
    lengths = np.zeros(mask.shape, int)
    for row in range(len(mask)):
        lengths[row] = np.where(mask[row], lengths[row - 1] + 1 if row else 1, 0)
    for row in range(len(mask) - 2, -1, -1):
        lengths[row] = np.where(mask[row] & mask[row + 1], lengths[row + 1], lengths[row])
    return lengths


def _shapes(mask: np.ndarray) -> list[_Shape]:
    """The connected shapes of a mask, the largest first; pixels that touch at a corner are connected."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]  # runs of a row: columns starts to ends - 1
    parents = list(range(len(rows)))

    def root(run: int) -> int:
        while parents[run] != run:
            parents[run] = parents[parents[run]]
            run = parents[run]
        return run

    first = np.searchsorted(rows, np.arange(len(mask) + 1))
    for row in range(1, len(mask)):
        above, here, last = first[row - 1], first[row], first[row + 1]
        while above < first[row] and here < last:
            if starts[here] <= ends[above] and starts[above] <= ends[here]:
                parents[root(int(here))] = root(int(above))
            if ends[above] < ends[here]:
                above += 1
            else:
                here += 1
    roots = np.array([root(run) for run in range(len(rows))], int)
    lengths = ends - starts
    owners = np.repeat(roots, lengths)
    all_rows = np.repeat(rows, lengths)
    all_columns = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    order = np.argsort(owners, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(owners[order])) + 1) if len(order) else []
    found = [_Shape(all_rows[group], all_columns[group], len(group)) for group in groups]
    return sorted(found, key=lambda shape: -shape.area)


def _parts_of_digit(shapes: list[_Shape], size: tuple[int, int]) -> tuple[list[_Shape], str]:
    """The shapes that make up the digit, and the doubt, see `Digit`. `size` is (height, width) of the image."""
    inside = [shape for shape in shapes if not _crosses(shape.box, size)]
    main = (inside or shapes)[0]
    top, bottom, left, right = main.box
    height, width = bottom - top + 1, right - left + 1
    parts, others = [main], 0
    for shape in inside:
        if shape is main or shape.area < PART * main.area:
            continue
        above, below, before, after = shape.box
        beside = max(before - right, left - after)
        gap = max(above - bottom, top - below, beside)
        is_another_digit = beside > 0 and below - above + 1 > height / 2
        if gap <= NEAR * max(height, width) and not is_another_digit:
            parts.append(shape)
        elif not _at_edge(shape.box, size):
            others += shape.area > main.area / 5
    doubt = ""
    if _at_edge(main.box, size):
        doubt = "its largest shape reaches the edge of the image"
    elif others:
        doubt = f"it has {others + 1} separate shapes"
    elif main.area > MOST_INK * height * width and max(height, width) < 3 * min(height, width):
        doubt = "its largest shape has no strokes"
    return parts, doubt


def _at_edge(box: tuple[int, int, int, int], size: tuple[int, int]) -> bool:
    """Whether a box touches an edge of an image."""
    top, bottom, left, right = box
    return top == 0 or left == 0 or bottom == size[0] - 1 or right == size[1] - 1


def _crosses(box: tuple[int, int, int, int], size: tuple[int, int]) -> bool:
    """Whether a box reaches from one edge of an image to the opposite one."""
    top, bottom, left, right = box
    return (top == 0 and bottom == size[0] - 1) or (left == 0 and right == size[1] - 1)


def _cropped(ink: np.ndarray) -> np.ndarray:
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _thickened(ink: np.ndarray) -> np.ndarray:
    """The ink with strokes of at least LEAST_STROKE of its longer side. A stroke's width is 2 area / outline."""
    mask = np.pad(ink > 0.5, 1)
    outline = sum(int((np.diff(mask.astype(np.int8), axis=axis) != 0).sum()) for axis in (0, 1)) * np.pi / 4
    missing = LEAST_STROKE * max(ink.shape) - 2 * float(mask.sum()) / max(outline, 1)
    radius = round(missing / 2)
    return _grown(np.pad(ink, radius), radius) if radius > 0 else ink


def _grown(values: np.ndarray, radius: int) -> np.ndarray:
    """The maximum over a square of 2 `radius` + 1 pixels around each pixel; bool and float arrays (H, W)."""
    for axis in (0, 1):
        padded = np.pad(values, [(radius, radius) if axis == a else (0, 0) for a in (0, 1)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1, axis)
        values = windows.max(axis=-1)
    return values


def _placed(ink: np.ndarray, height: int, width: int) -> np.ndarray:
    """The ink, float64 in [0, 1], scaled into the box and placed by its centre of mass: uint8 (1, height, width)."""
    from PIL import Image

    scale = min(BOX * height / ink.shape[0], BOX * width / ink.shape[1])
    size = max(1, round(ink.shape[1] * scale)), max(1, round(ink.shape[0] * scale))
    digit = np.asarray(Image.fromarray((255 * ink).astype(np.uint8)).resize(size, Image.Resampling.BILINEAR))
    digit = (digit * (255.0 / max(int(digit.max()), 1))).astype(np.uint8)
    field = np.zeros((1, height, width), np.uint8)
    top, left = (
        min(max(round(length / 2 - 0.5 - mass), 0), length - extent)
        for length, mass, extent in zip((height, width), _centre_of_mass(digit), digit.shape, strict=True)
    )
    field[0, top : top + digit.shape[0], left : left + digit.shape[1]] = digit
    return field


def _centre_of_mass(pixels: np.ndarray) -> tuple[float, float]:
    """(row, column), weighted by the pixels."""
    weights = pixels.astype(np.float64)
    total = max(weights.sum(), 1)
    return (
        float(weights.sum(axis=1) @ np.arange(len(pixels)) / total),
        float(weights.sum(axis=0) @ np.arange(pixels.shape[1]) / total),
    )
