"""Numbers with decimal commas and separators of thousands, and dates."""

from __future__ import annotations

import decimal
import math
import re
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data_spreadsheets import features, load

from adtrain.data import DataError, DataOptionError, Options, csv_table, table_encoder
from adtrain.data.notation import DECIMALS, SIGNS, Decimal, Notation, days, is_date_format
from adtrain.data.part import Known


@given(st.floats(-1e12, 1e12), st.integers(0, 4), st.sampled_from([*"., '"]), st.sampled_from(DECIMALS))
def test_numbers_with_thousands_are_exact(x: float, digits: int, separator: str, decimal: Decimal) -> None:
    plain = f"{x:.{digits}f}"
    marks = {"thousands": "" if separator == decimal else separator, "decimal": decimal}
    text = f"{float(plain):,.{digits}f}".translate({ord(","): marks["thousands"], ord("."): marks["decimal"]})
    assert float(Notation(decimal).in_python(text)) == float(plain)
    assert float(Notation(decimal).in_python(Notation(decimal).written(x))) == x


@given(st.text("0123456789.,' -+e", max_size=12))
def test_a_text_has_one_decimal_mark_or_is_no_number(text: str) -> None:
    """Without the separators and with a point, what is read is what Python reads; at most one mark is decimal."""
    for mark in DECIMALS:
        found = Notation(mark).in_python(text)
        if found and Notation(mark).is_number(text):
            assert text.count(mark) <= 1
            whole = text.lower().partition("e")[0].partition(mark)[0].lstrip("+-")
            groups = whole.replace(" ", ".").replace("'", ".").replace(",", ".").split(".")
            assert len(groups) == 1 or all(len(group) == 3 for group in groups[1:])
            assert len(groups) == 1 or 0 < len(groups[0]) < 4


@pytest.mark.parametrize("text", ["12.5", "0.123", "1.5e3", "1,234.5", "1.23", "1,2,3", "1.234.56", "1. 234", "1_0"])
@pytest.mark.parametrize("option", ["label", "target"])
def test_a_number_of_the_other_notation_is_an_error_with_its_place(tmp_path: Path, text: str, option: str) -> None:
    rows = "\n".join(f"{i},5;1.234,5;{i}" for i in range(5))
    columns = {"label": "a", "target": "b"}
    line = f"{text};1;0" if option == "label" else f"1;{text};0"
    chosen: dict[str, Any] = {"label": "c"} if option == "label" else {"target": "b"}
    with pytest.raises(
        DataError, match=rf"x.csv:7: found .* in column . \({columns[option]}\), expected a finite numb"
    ):
        load(tmp_path, f"a;b;c\n{rows}\n{line}\n", delimiter=";", decimal=",", **chosen)


@pytest.mark.parametrize("mark", DECIMALS)
def test_a_table_is_the_same_with_each_decimal_mark(tmp_path: Path, mark: Decimal) -> None:
    """Header, numbers, categories, missing values, targets; categories keep their texts."""
    rows = [(1234.5 * i, ["1.5", "1,5", "x"][i % 3], 0.25 * i) for i in range(30)]
    written = Notation(mark)
    cells = [[written.written(n) if n else "-999", text, written.written(t)] for n, text, t in rows]
    lines = map(";".join, cells)
    options: dict[str, Any] = {
        "delimiter": ";",
        "categories": (1,),
        "target": 2,
        "missing": "zero",
        "missing_values": (-999,),
    }
    found = load(tmp_path, "\n".join(lines), decimal=mark, **options)
    assert found.features == ("0", "1=1,5", "1=1.5", "1=x")
    assert features(found) == [[a, b == "1,5", b == "1.5", b == "x"] for a, b, _ in rows]
    assert np.asarray(found.train.labels).ravel().tolist() == [t for _, _, t in rows]


@given(
    st.sampled_from(SIGNS),
    st.sampled_from(["{minus}{sign}{digits}", "{minus}{digits} {sign}", "{sign} {minus}{digits}"]),
    st.lists(st.decimals(-(10**6), 10**6, places=2), min_size=2, max_size=40),
)
def test_a_column_whose_numbers_all_have_one_sign_is_that_of_the_numbers(
    tmp_path_factory: pytest.TempPathFactory, sign: str, form: str, numbers: list[decimal.Decimal]
) -> None:
    """Features and targets, also those of other files and of rows in memory."""
    folder = tmp_path_factory.getbasetemp()

    def written(number: decimal.Decimal) -> str:
        return form.format(minus="-" if number < 0 else "", sign=sign, digits=abs(number))

    plain = load(folder, "".join(["n;m;y\n", *(f"{x};{x};{x}\n" for x in numbers)]), delimiter=";", target="y")
    text = "".join(["n;m;y\n", *(f"{written(x)};{x};{written(x)}\n" for x in numbers)])
    found = load(folder, text, delimiter=";", target="y")
    assert features(found) == features(plain)
    assert found.train.labels.tolist() == plain.train.labels.tolist()
    assert found.encoder is not None
    columns, options = found.encoder.columns, Options(delimiter=";", target="y")
    assert [column.sign for column in columns.features] == [sign, ""]
    cells = csv_table.read_rows(folder / "x.csv", options, Known(columns))
    in_memory = {"n": [written(numbers[0]), *map(float, numbers[1:])], "m": list(map(float, numbers))}
    assert cells.values.tolist() == table_encoder.rows_in_memory(in_memory, options, columns).values.tolist()
    of_true = table_encoder.rows_in_memory({"n": [True], "m": [True]}, options, columns)
    assert of_true.values.tolist() == [[1, 1]]
    (folder / "y.csv").write_text("n;m\n5;5\n")
    with pytest.raises(DataError, match=f"y.csv:2: found '5' in column 0 .n., .* with the sign {re.escape(sign)}"):
        csv_table.read_rows(folder / "y.csv", options, Known(columns))


@pytest.mark.parametrize(
    ("targets", "tested", "message"),
    [
        (("12%", "5%"), "7%", ""),
        (("12%", "5%"), "0.07", "found '0.07' in column 1 .y., expected a finite number with the sign %"),
        (("12", "5"), "7%", "found '7%' in column 1 .y., expected a finite number without the sign %"),
        (("yes", "no"), "YES", ""),
    ],
)
def test_targets_of_the_test_file_have_the_sign_of_those_of_the_training(
    tmp_path: Path, targets: tuple[str, str], tested: str, message: str
) -> None:
    (tmp_path / "test.csv").write_text(f"n,y\n1,{tested}\n")
    options = {"target": "y", "test_path": str(tmp_path / "test.csv")}
    text = "n,y\n" + "".join(f"{i},{target}\n" for i, target in enumerate(targets))
    if message:
        with pytest.raises(DataError, match=rf"test.csv:2: {message}"):
            load(tmp_path, text, **options)
    else:
        assert load(tmp_path, text, **options).test.labels.shape == (1, 1)


def test_labels_keep_their_texts(tmp_path: Path) -> None:
    text = "\n".join(["n;label", *(f"{i};{['1.5', '12.25'][i % 2]}" for i in range(8))])
    assert load(tmp_path, text, delimiter=";", decimal=",").classes == ("1.5", "12.25")
    with pytest.raises(DataOptionError, match="to predict numbers, set data"):
        load(tmp_path, text.replace(".", ","), delimiter=";", decimal=",")


def test_numbers_in_memory_are_not_read_as_texts(tmp_path: Path) -> None:
    options = Options(delimiter=";", decimal=",", dates=("day",), date_format="%d/%m/%Y")
    text = "\n".join(["n;day;label", *(f"{i},5;0{i + 1}/02/2024;{i % 2}" for i in range(8))])
    found = load(tmp_path, text, delimiter=";", decimal=",", dates=("day",), date_format="%d/%m/%Y")
    assert found.encoder is not None
    numbers = [1.234, "1.234", "1,5", 3]
    dates = [date(2024, 2, 1), datetime(2024, 2, 1), np.datetime64("2024-02-01T12"), "01/02/2024"]
    cells = table_encoder.rows_in_memory({"n": numbers, "day": dates}, options, found.encoder.columns)
    assert cells.values[:, 0].tolist() == [1.234, 1234, 1.5, 3]
    assert cells.values[:, 1].tolist() == [8797] * 4


moments = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(lambda x: x.replace(second=0, microsecond=0))


@given(moments)
def test_every_form_of_a_date_is_the_same_day(moment: datetime) -> None:
    expected = (moment - datetime(2000, 1, 1)) / timedelta(days=1)
    for form in (
        "%Y-%m-%d %H:%M",
        "%Y/%m/%dT%H:%M:00Z",
        "%Y%m%d %H:%M",
        "%d.%m.%Y %H:%M:00.000",
        "%Y-%m-%dT%H:%M+00:00",
    ):
        assert days(moment.strftime(form), None) == pytest.approx(expected, abs=1e-9)
    for form in ("%d/%m/%Y %H:%M", "%B %d, %Y, %I:%M %p"):
        assert days(moment.strftime(form), form) == pytest.approx(expected, abs=1e-9)
    later = (moment + timedelta(hours=2)).strftime("%Y-%m-%d %H:%M")
    assert days(f"{later}+02:00", None) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "text",
    ["2024-02-30", "2024-13-01", "03/04/2024", "2024", "2024-1", "1.2.24", "2024-01/02", "2024-01-02 24:00", "today",
     "2024-01-02 10:00:60", "0000-01-01", "2024111"],
)  # fmt: skip
def test_a_date_with_several_meanings_or_none_is_an_error_with_its_place(tmp_path: Path, text: str) -> None:
    rows = [f"2024-01-{i + 1:02},{i % 2}" for i in range(8)]
    with pytest.raises(
        DataError, match=r"x.csv:10: found '.*' in column 0 \(day\), expected a date such as 2024-12-31"
    ):
        load(tmp_path, "\n".join(["day,label", *rows, f"{text},0"]), dates=("day",))


@given(st.lists(moments, min_size=2, max_size=6, unique=True))
def test_features_of_a_date_are_its_place_in_time_week_and_year(found: list[datetime]) -> None:
    numbers = np.array([(x - datetime(2000, 1, 1)) / timedelta(days=1) for x in found])
    for moment, row in zip(found, table_encoder.date_features(numbers), strict=True):
        hours = moment.hour / 24 + moment.minute / 1440
        week = 2 * math.pi * (moment.weekday() + hours) / 7
        year = 2 * math.pi * (moment.timetuple().tm_yday - 1 + hours) / 365.2425
        np.testing.assert_allclose(row[1:3], [math.sin(week), math.cos(week)], atol=1e-6)
        # Leap days move 1 January by up to two days of the mean year in two centuries.
        np.testing.assert_allclose(row[3:], [math.sin(year), math.cos(year)], atol=2 * 2 * math.pi / 365)


@pytest.mark.parametrize("missing", ["mean", "zero", "drop"])
def test_empty_cells_of_dates_are_filled_by_features(tmp_path: Path, missing: str) -> None:
    rows = [f"{f'2024-03-{i:02}' if i % 5 else ''},{'xy'[i % 2]},{i % 2}" for i in range(1, 31)]
    text = "\n".join(["day,city,label", *rows])
    found = load(tmp_path, text, dates=("day",), missing=missing)
    assert found.features == (*(f"day.{x}" for x in table_encoder.DATE_FEATURES), "city=x", "city=y")
    table = np.array(features(found))
    filled = [i % 5 > 0 for i in range(1, 31)]
    if missing == "drop":
        assert len(table) == sum(filled)
    else:
        dates = table[filled, :5]
        expected = dates.mean(axis=0) if missing == "mean" else np.zeros(5)
        np.testing.assert_allclose(table[4, :5], expected, rtol=1e-5, atol=1e-6)


def test_numbers_of_categories_stand_beside_features_of_dates(tmp_path: Path) -> None:
    text = "\n".join(["day,city,label", *(f"2024-03-{i:02},{'xyz'[i % 3]},{i % 2}" for i in range(1, 31))])
    found = load(tmp_path, text, dates=("day",), category_encoding="index")
    assert found.encoder is not None
    assert found.encoder.indexed == (False,) * 5 + (True,)
    assert [column.title for column in found.encoder.sources] == ["day"] * 5 + ["city"]
    assert (found.mean[5], found.std[5]) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dates": ("when",)}, "data.dates: found 'when', which is not a column"),
        ({"dates": ("label",)}, "data.dates: found the column of the labels"),
        ({"dates": ("day",), "drop": (0,)}, r"data.drop: found column 0 \(day\), which data.dates lists too"),
        ({"dates": ("day",), "categories": ("day",)}, r"data.categories: found column 0 \(day\), which data.dates"),
        ({"dates": ("day",), "shape": (1, 1, 1)}, "data.dates: found together with data.shape"),
        ({"date_format": "%Y-%m-%d"}, "data.date_format: found '%Y-%m-%d', but data.dates names no column"),
        ({"dates": ("day",), "date_format": "%d.%m."}, "data.date_format: found .*, expected directives for year"),
        ({"dates": ("day",), "date_format": "%Y-%q"}, "data.date_format: found .*, expected directives for year"),
    ],
)
def test_options_of_dates_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    text = "\n".join(["day,label", *(f"2024-01-{i + 1:02},{i % 2}" for i in range(8))])
    with pytest.raises(DataOptionError, match=message):
        load(tmp_path, text, **options)


def test_a_format_tells_year_month_and_day() -> None:
    assert all(map(is_date_format, ("%d/%m/%Y", "%m-%d-%y %H:%M", "%d %b %Y", "%Y-%j", "%Y-%m-%dT%H:%M:%S%z")))
    assert not any(map(is_date_format, ("%d/%m", "%Y", "%H:%M", "text", "%", "%Y-%m")))
