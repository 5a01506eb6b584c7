"""How files are to be read, where they do not say so themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Options:
    """The options of `data.load`; each format takes some of them, see `formats`.

    Attributes:
        test_path: a second file or folder of the same format, which is the test part.
        test: the fraction of the examples that becomes the test part, where the source has none.
        label: the column with the labels: its name, or its number, from 0 or, counted from the end, from -1.
        header: whether the first line names the columns; None to find out.
        shape: (C, H, W), what flat rows are turned into, and which way four axes are read.
        image_size: (height, width) that all images are resized to; None where they have one size.
        channels: 1 for grey or 3 for colour; None for 3 where any image is colour, else 1.
        skip_broken: leave out images that cannot be read, with a warning that names each.
    """

    test_path: str | None = None
    test: float = 0.0
    label: str | int | None = None
    header: bool | None = None
    shape: tuple[int, int, int] | None = None
    image_size: tuple[int, int] | None = None
    channels: int | None = None
    skip_broken: bool = False

    @property
    def given(self) -> list[str]:
        """The names of the options that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
