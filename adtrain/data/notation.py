"""How a table writes numbers and dates, and the numbers that they are."""

from __future__ import annotations

import re
import unicodedata
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Literal, NamedTuple

BLANKS = {0xA0: " ", 0x2007: " ", 0x202F: " ", 0x200B: None, 0xFEFF: None}
"""No-break spaces, which are read as spaces, and characters without width, which are left out."""

FLOAT32_INFINITY = 2.0**128 - 2.0**103
"""From here on float32 rounds to infinity."""

NUMBER_LIKE = re.compile(r"\W*\d|[+-]?inf(inity)?$", re.IGNORECASE)
"""Texts that could be numbers, also in notations that are not read, as 1_000: by default they are not categories."""

DATE_LIKE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}([T ].*)?")
"""Texts that could be dates, also in formats that are not read by default."""

SIGNS = "$€£%"
"""Signs before or after numbers. They are left out where all numbers of a column have the same one."""

Decimal = Literal[".", ","]

DECIMALS: tuple[Decimal, ...] = (".", ",")


def _number(decimal: str, separators: str) -> re.Pattern[str]:
    """Numbers with a decimal mark, and one of the separators of thousands. A number such as 0.123 has no thousands."""
    thousands = rf"[1-9][0-9]{{0,2}}([{separators}])[0-9]{{3}}(?:\1[0-9]{{3}})*"
    return re.compile(rf"[+-]?(?:{thousands}|[0-9]*)(?:[{decimal}][0-9]*)?(?:[eE][+-]?[0-9]+)?")


NUMBERS = {".": _number(".", ", '"), ",": _number(",", ". '")}

IN_PYTHON = {".": str.maketrans("", "", ", '"), ",": str.maketrans(",", ".", ". '")}

EPOCH = datetime(2000, 1, 1)
"""A Saturday. Recent dates are numbers that float32 holds with the time of the day."""

SATURDAY = 5
"""Its number from Monday, 0."""

WEEK, YEAR = 7.0, 365.2425
"""Their lengths in days."""

DATE = re.compile(
    r"(?:([0-9]{4})(?:([-/.])([0-9]{1,2})\2([0-9]{1,2})|([0-9]{2})([0-9]{2}))|([0-9]{1,2})\.([0-9]{1,2})\.([0-9]{4}))"
    r"(?:(?:T| +)([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}(?:[.,][0-9]+)?))? *(?:Z|([+-])([0-9]{2}):?([0-9]{2}))?)?"
)
"""Dates that have one meaning: 2024-12-31 (also with / or .), 20241231 and 31.12.2024, with a time or without."""


class Notation:
    """How numbers are written: with `decimal` as their decimal mark, or if it is None as in Python.

    With `decimal` they can have separators of thousands: the other one of comma and point, blanks or apostrophes. With
    `sign`, one of SIGNS, each has it before or after its digits, as in -$5, $ 5 and 5 %.
    """

    def __init__(self, decimal: Decimal | None, sign: str = "") -> None:
        self.decimal, self.sign = decimal, sign

    def of(self, text: str) -> Notation:
        """This notation with the sign that the text has, or without one."""
        sign = next((sign for sign in SIGNS if sign in text), "")
        return self if sign == self.sign else Notation(self.decimal, sign)

    def in_python(self, text: str) -> str:
        """The number as Python writes it; an empty text if it is not in this notation."""
        if self.sign:
            text = _unsigned(text, self.sign)
        if self.decimal is None:
            return text
        return text.translate(IN_PYTHON[self.decimal]) if NUMBERS[self.decimal].fullmatch(text) else ""

    def written(self, number: float) -> str:
        """A number in this notation."""
        return repr(number).replace(".", self.decimal or ".")

    def is_number(self, text: str) -> bool:
        return is_number(self.in_python(text))

    def is_signed_number(self, text: str) -> bool:
        """Whether the text is a number with any sign or without one."""
        return self.of(text).is_number(text)

    def is_finite(self, text: str) -> bool:
        """Whether the text is a number that is finite in float32."""
        found = self.in_python(text)
        return is_plain(found) and is_finite(found)


def _unsigned(text: str, sign: str) -> str:
    """The number without the sign before or after its digits; an empty text where it does not have it there once."""
    minus = text[:1] if text[:1] in ("+", "-") else ""
    digits = text[len(minus) :].strip()
    if text.count(sign) != 1 or sign not in (digits[:1], digits[-1:]):
        return ""
    return minus + digits.strip(sign).strip()


class Pair(NamedTuple):
    """Two texts that stand for 0 and 1, in lower case; they are read in upper and lower case."""

    zero: str
    one: str

    def in_python(self, text: str) -> str:
        """The number as Python writes it; an empty text if it is neither of the two."""
        return str(self.index(found)) if (found := text.lower()) in self else ""

    def is_finite(self, text: str) -> bool:
        """Whether the text is one of the two."""
        return text.lower() in self


PAIRS = Pair("no", "yes"), Pair("false", "true")


def pair_of(text: str) -> Pair | None:
    """The pair that has this text."""
    return next((pair for pair in PAIRS if pair.is_finite(text)), None)


def expected_number(notation: Notation | Pair, text: str, can_change: bool = True) -> str:
    """What was expected in place of a text that is no finite number in this notation.

    `can_change` says whether `data.decimal` of the config can set another notation for the table.
    """
    if isinstance(notation, Pair):
        return f"expected {notation.zero} or {notation.one}"
    readings = [Notation(mark, notation.sign) for mark in (notation.decimal, *DECIMALS)]
    other = notation.of(text)
    if other is not notation and any(each.of(text).is_finite(text) for each in readings):
        has = f"with the sign {notation.sign}" if notation.sign else f"without the sign {other.sign}"
        return f"expected a finite number {has}"
    if notation.decimal is not None:
        written = "1.234,5" if notation.decimal == "," else "1,234.5"
        return f"expected a finite number such as {written}, as data.decimal says"
    if any(each.is_finite(text) for each in readings):
        advice = '; data.decimal: "," reads 1.234,5, and "." reads 1,234.5' if can_change else ""
        return f"expected a finite number such as 1.5{advice}"
    return "expected a finite number"


def is_number(text: str) -> bool:
    """Whether Python reads the text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_plain(text: str) -> bool:
    """False for digits of other scripts and groups such as 1_000, which Python reads as numbers."""
    return text.isascii() and "_" not in text


def is_finite(text: str) -> bool:
    """Whether Python reads the text as a number that is finite in float32."""
    try:
        return abs(float(text)) < FLOAT32_INFINITY
    except ValueError:
        return False


def cleaned(text: str) -> str:
    """A name or cell as it is compared with others: without blanks around it, and with composed letters (NFC)."""
    if text.isascii():
        return text.strip()
    return unicodedata.normalize("NFC", text.translate(BLANKS)).strip()


@lru_cache(maxsize=1 << 16)
def days(text: str, form: str | None) -> float | None:
    """A date, with the time of the day as a fraction, as days since EPOCH; None if it is not one.

    `form` has the directives of `strptime`; without it `DATE` says which dates are read. A time with an offset from UTC
    becomes UTC.
    """
    try:
        if form is not None:
            found = datetime.strptime(text, form)
            if found.tzinfo is not None:
                found = found.astimezone(timezone.utc).replace(tzinfo=None)
            return (found - EPOCH) / timedelta(days=1)
        if not (match := DATE.fullmatch(text)):
            return None
        year, _, month, day, month2, day2, day3, month3, year3, hour, minute, second, sign, *offset = match.groups()
        date = datetime(int(year or year3), int(month or month2 or month3), int(day or day2 or day3))
        seconds = float((second or "0").replace(",", "."))
        if int(hour or 0) > 23 or int(minute or 0) > 59 or seconds >= 60:
            return None
        since = date - EPOCH + timedelta(hours=int(hour or 0), minutes=int(minute or 0), seconds=seconds)
        if sign:
            shift = timedelta(hours=int(offset[0]), minutes=int(offset[1]))
            since = since - shift if sign == "+" else since + shift
        return since / timedelta(days=1)
    except (ValueError, OverflowError):
        return None


def date_text(number: float) -> str:
    """The date `number` days after EPOCH, with the time unless it is midnight."""
    moment = EPOCH + timedelta(seconds=round(number * 86400))
    return moment.isoformat(" ") if moment.time() != EPOCH.time() else moment.date().isoformat()


def is_date_format(form: str) -> bool:
    """Whether the directives of `strptime` tell year, month and day."""
    sample = datetime(2003, 11, 25, tzinfo=timezone.utc)
    try:
        text = sample.strftime(form)
        return (
            any(x in form for x in ("%Y", "%y", "%x", "%c", "%G"))
            and datetime.strptime(text, form).date() == sample.date()
        )
    except ValueError:
        return False
