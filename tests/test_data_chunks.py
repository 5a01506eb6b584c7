"""Tables whose bytes NumPy splits are read as a reader of CSV reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.data import DataError, Options, chunks, csv_table
from adtrain.data.chunks import ByteChunk, RowChunk, decimal_numbers, iso_dates
from adtrain.data.csv_file import opened
from adtrain.data.notation import days

NUMBERS = [b"1", b"2.5", b"-0", b"+.5", b"0.1257302210933933", b"9007199254740993", b"1e3", b"-999"]
DATED = [b"2024-05-06", b"2024-05-06 07:08", b"1999-12-31T23:59:59", b"2024-05-06 07:08:09.5", b"31.12.2024"]
WORDS = [b"x", b" yes ", b"no", b"\xc3\xa4", b"maybe", b"another word"]
OTHERS = [b"", b"2024-05-06", b"NA", b"nan", b"1_0", b"1,", b"inf", b"?", b"a longer text than NumPy compares"]
MARKS = [b",", b",", b"\n", b"\n", b"\r\n", b"\r", b'"', b" ", b"\xff", b"\0"]

ISO = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2})?)?")

OPTIONS: list[dict[str, Any]] = [{}, {"missing": "mean"}, {"missing": "drop", "missing_values": (-999, "NA")},
                                 {"categories": ("n",)}, {"label": None, "target": "n"}, {"dates": ("n",)},
                                 {"dates": ("n",), "missing": "mean", "missing_values": ("1999-12-31T23:59:59",)},
                                 {"dates": ("n",), "missing": "drop", "missing_values": ("NA",)}]  # fmt: skip


def table(rng: np.random.Generator, values: Sequence[bytes]) -> bytes:
    """Rows of a value, a word and a label; in most tables with one cell of another kind, or bytes anywhere."""
    rows = [[rng.choice(values), rng.choice(WORDS), rng.choice(WORDS)] for _ in range(25)]
    change = rng.integers(3)
    if change == 0:
        rows[rng.integers(25)][rng.integers(3)] = rng.choice(OTHERS)
    content = b"\n".join([b"n,word,label", *map(b",".join, rows)])
    at = int(rng.integers(len(content)))
    return content[:at] + rng.choice(MARKS) + content[at:] if change == 1 else content


@contextmanager
def sizes(**values: int) -> Iterator[None]:
    """Small chunks and blocks, or with `BLOCK_BYTES=0` none of bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(chunks, name, value)
        if values.get("BLOCK_BYTES") == 0:
            patch.setattr(chunks, "_split", lambda *_: None)
        yield


def outcome(path: Path, options: Options) -> Any:
    """What is read from a table, or the error."""
    try:
        found = csv_table.read(path, options).train
    except DataError as error:
        return str(error)
    images = np.asarray(found.images)
    return images.shape, images.tobytes(), found.labels.dtype, found.labels.tolist(), found.columns


@given(st.integers(0, 2**32 - 1))
def test_bytes_are_read_as_a_reader_of_csv_reads_them(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng, path = np.random.default_rng(seed), tmp_path_factory.getbasetemp() / "chunks.csv"
    options = Options(**OPTIONS[rng.integers(len(OPTIONS))])
    path.write_bytes(table(rng, DATED if options.dates else NUMBERS))
    with sizes(BLOCK_BYTES=0, FIRST_ROWS=5):
        expected = outcome(path, options)
    with sizes(BLOCK_BYTES=1 << 20, FIRST_ROWS=5, MORE_ROWS=9):
        assert outcome(path, options) == expected


@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from(["x", '"x"', "x,", "\u00e4"]), st.integers(1, 60))
def test_a_table_may_need_a_reader_of_csv_from_any_row_on(
    tmp_path_factory: pytest.TempPathFactory, rows: int, at: int, cell: str, size: int
) -> None:
    """Blocks before the first quote, or the first row of another length, are split by NumPy."""
    path = tmp_path_factory.getbasetemp() / "mixed.csv"
    lines = [f"{i},{cell if i == at else 'x'}" for i in range(rows)]
    path.write_text("\n".join(["n,label", *lines]) + "\n", encoding="utf-8")
    with sizes(BLOCK_BYTES=0):
        expected = outcome(path, Options())
    with sizes(BLOCK_BYTES=size, FIRST_ROWS=3, MORE_ROWS=4):
        assert outcome(path, Options()) == expected
    path.write_text("\n".join(["n,label", *lines, "bad,x"]) + "\n", encoding="utf-8")
    with sizes(BLOCK_BYTES=size, FIRST_ROWS=3, MORE_ROWS=4), pytest.raises(DataError, match=rf"mixed.csv:{rows + 2}: "):
        csv_table.read(path, Options(header=True, missing="mean"))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("n,label\n1,x\n2,y\n", ByteChunk),
        ("\ufeffn,label\r\n1,\u00e4\r\n2,y", ByteChunk),
        ('"n","label"\n1,x\n2,y\n', ByteChunk),
        ("sep=;\nn;label\n1;x\n", ByteChunk),
        ('n,label\n1,"x"\n2,y\n', RowChunk),
        ("n,label\n1,x,\n2,y,\n", RowChunk),
        ("n,label\n\n1,x\n", RowChunk),
    ],
)
def test_a_table_without_quotes_is_split_by_numpy(tmp_path: Path, text: str, kind: type) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="utf-8", newline="")
    with opened(path, Options(), None) as table:
        assert {type(chunk) for chunk in chunks.chunks(table)} == {kind}


written = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=12).map(str),
    st.integers(-(10**23), 10**23).map(str),
    st.from_regex(r"[+-]?[0-9]{1,20}\.[0-9]{0,23}", fullmatch=True),
    # The middle of two float64.
    st.integers(2**52, 2**53 - 1).map(lambda x: str(2 * x + 1)),
    st.sampled_from(["", ".", "-", "+.5", "5.", "--1", "1-2", "1.2.3", "1_0", " 1", "x", "1e5", "inf"]),
)


@given(st.lists(written, min_size=1, max_size=20))
def test_decimals_are_rounded_as_python_rounds_them(texts: list[str]) -> None:
    block = bytes(chunks.PADDING) + "".join(f"{text}," for text in texts).encode()
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord(","))
    found = decimal_numbers(block, np.concatenate([[chunks.PADDING], ends[:-1] + 1]), ends)
    others = set(found.others.tolist())
    for i, (text, value) in enumerate(zip(texts, found.values.tolist(), strict=True)):
        if i in others or not text:
            assert np.isnan(value)
        else:
            assert value.hex() == float(text).hex()
    short = {i for i, x in enumerate(texts) if x.replace(".", "", 1).lstrip("+-").isdecimal() and len(x) < 16}
    assert not short & others or any(text.count("-") + text.count("+") > 1 for text in texts)


DATES = st.one_of(
    st.datetimes().map(lambda x: x.isoformat(" ", "seconds")),
    st.datetimes().map(lambda x: x.isoformat("T", "minutes")),
    st.dates().map(str),
    st.from_regex(r"[0-9]{4}-[0-3][0-9]-[0-3][0-9]([ T][0-9]{2}:[0-9]{2}(:[0-9]{2})?)?", fullmatch=True),
    st.sampled_from(
        ["", "0000-01-01", "1900-02-29", "2000-02-29", "9999-12-31", "2024-12-31 24:00", "2024/12/31", "x"]
    ),
)


@given(st.lists(st.tuples(DATES, st.sampled_from(["", "", "", "x", " "])).map("".join), min_size=1))
def test_dates_are_read_as_one_by_one(texts: list[str]) -> None:
    block = bytes(chunks.PADDING) + "".join(f"{text}," for text in texts).encode()
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord(","))
    found = iso_dates(block, np.concatenate([[chunks.PADDING], ends[:-1] + 1]), ends)
    others = set(found.others.tolist())
    for i, (text, value) in enumerate(zip(texts, found.values.tolist(), strict=True)):
        if i in others or not text:
            assert np.isnan(value)
            assert not (ISO.fullmatch(text) and days(text, None) is not None)
        else:
            assert value == days(text, None)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 5, 2**64 - 1])), min_size=1))
def test_equal_cells_have_the_first_of_them(rows: list[tuple[int, int]]) -> None:
    words = [np.array(column, np.uint64) for column in zip(*rows, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "HASH_BITS", 2)  # different cells have the same hash
        assert chunks.first_equal(words).tolist() == [rows.index(row) for row in rows]
