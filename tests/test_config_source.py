from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.config import ConfigError, source

EXPECTED = "expected a mapping of keys to values"


def refusal(content: bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        source.read(content, "c.yaml")
    assert len(caught.value.problems) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", f"c.yaml:1:1: found nothing, {EXPECTED}"),
        (b"# a comment\n", f"c.yaml:2:1: found nothing, {EXPECTED}"),
        (b"- 1\n- 2\n", f"c.yaml:1:1: found [1, 2], {EXPECTED}"),
        (b"mnist", f"c.yaml:1:1: found 'mnist', {EXPECTED}"),
        (b"a:\n\tb: 1\n", "c.yaml:2:1: found a tab, expected spaces: YAML indents with spaces only"),
        (b"a: b\n\tc: d\n", "c.yaml:2:1: found a tab, expected spaces: YAML indents with spaces only"),
        (b"a: 'x\n", "c.yaml:2:1: found the end of the text, expected a closing quote"),
        (b"a: b: c\n", "c.yaml:1:5: found a key in a value, expected one key on a line; check the indentation, and "
         "quote text that contains a colon"),
        (b"a: @b\n", "c.yaml:1:4: not valid YAML: while scanning for the next token, found character '@' that cannot "
         "start any token"),
        (b"a: 1\n---\nb: 2\n", "c.yaml:2:1: found a second document, expected one"),
        (b"a: \xff\n", "c.yaml:1:4: found the byte 0xff, expected UTF-8 text"),
        (b"a: 1\nb: \x07\n", "c.yaml:2:4: found the control character U+0007, expected text"),
        (b'a: "\\ud800"\n', "c.yaml:1:4: found half of a surrogate pair, expected text"),
        (b'a: "\\UFFFFFFFF"\n', "c.yaml: not valid YAML: an escape or a version number is out of range"),
        (b"a: !!python/name:x y\n", "c.yaml:1:4: found the tag !!python/name:x on 'y', expected plain YAML"),
        (b"a: !point {x: 1}\n", "c.yaml:1:4: found the tag !point, expected plain YAML"),
        (b"a: !!int three\n", "c.yaml:1:4: found the tag !!int on 'three', expected plain YAML"),
        (b"a: *b\n", "c.yaml:1:4: found the alias *b, which has no anchor before it"),
        (b"a: &b [*b]\n", "c.yaml:1:8: found the alias *b, which is inside its own anchor"),
        (b"a: [0, -1e400]", "c.yaml:1:8: found -1e400, expected a magnitude of at most 1.8e308"),
        (b"a: " + b"9" * 5000, "c.yaml:1:4: found a number of 5,000 characters, expected at most 100"),
        (b"[" * 100_000, "c.yaml:1:65: found more than 64 levels, expected fewer"),
        (b"a: [" + b"1," * 30_000 + b"]", "c.yaml:1:39999: found more than 20,000 values, expected fewer"),
        (b"a" * 2_000_000, "c.yaml: found more than 1,048,576 bytes, expected a config of at most that size"),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)  # fmt: skip
def test_the_error_of_invalid_yaml_is_one_line_with_its_position(content: bytes, message: str) -> None:
    assert refusal(content) == message


def test_duplicate_keys_are_reported_with_both_positions_and_parsing_goes_on() -> None:
    node, problems = source.read(b"a: 1\nb:\n  c: 2\n  c: 3\na: 4\n1: 5\n", "c.yaml")
    assert [str(problem) for problem in problems] == [
        "c.yaml:4:3: found the key c twice, first at c.yaml:3:3; expected it once",
        "c.yaml:5:1: found the key a twice, first at c.yaml:1:1; expected it once",
        "c.yaml:6:1: found the key 1, expected a string",
    ]
    assert node.plain() == {"a": 1, "b": {"c": 2}}


def test_exponentially_growing_aliases_are_refused_in_little_memory() -> None:
    lines = ["a0: &a0 [1, 1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    tracemalloc.start()
    try:
        message = refusal("\n".join(lines).encode())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message == "c.yaml:5:5: found more than 20,000 values, expected fewer"
    assert peak < 10_000_000


def test_deeply_nested_aliases_are_refused() -> None:
    lines = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 100)]
    assert refusal("\n".join(lines).encode()) == "c.yaml:65:6: found more than 64 levels, expected fewer"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1E3", 1000.0), (".5", 0.5), ("3.", 3.0), ("-1.5e+2", -150.0), ("+7", 7), ("010", 10),
        ("0x1F", 31), ("0o17", 15), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("-.inf", -math.inf), ("no", "no"), ("on", "on"), ("1_000", "1_000"), ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("'1'", "1"), ('"true"', "true"), ("!!str 5", "5"), ("!!float 3", 3), ("nan", "nan"), ("=", "="),
    ],
)  # fmt: skip
def test_scalars_have_the_types_of_yaml_1_2(text: str, value: object) -> None:
    plain = source.read(f"a: {text}\n".encode(), "c.yaml")[0].plain()
    assert isinstance(plain, dict)
    assert plain["a"] == value
    assert type(plain["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), (" 3 ", 3), ("1e-3", 0.001), ("true", True), ("null", None), ("~", None), ("'1e3'", "1e3"),
        (r'"\t"', "\t"), ("''", ""), ("[]", []), ("[1, a b]", [1, "a b"]), ("[1,\n 2]", [1, 2]),
        ("sgd: {lr: 0.1}", {"sgd": {"lr": 0.1}}), ("linear: 4", {"linear": 4}),
        ("{sgd: {lr: 0.1}}", {"sgd": {"lr": 0.1}}), ("[linear: 3, relu]", [{"linear": 3}, "relu"]),
    ],
)  # fmt: skip
def test_a_setting_that_is_yaml_to_its_last_character_is_read_as_yaml(text: str, value: object) -> None:
    found = source.read_value(text, "--set a").plain()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "label #1", "#", "3 # three", "[1, 2] # two", "[a #b]", "&label", "&a 3", "[1, &b 2]", "*label", "!label",
        "!!int 3", "|", ">", "%", "@", "`", "?", "? a", "{", "[", "[1", "'", '"', "'a' b", "it's", ":", "a:",
        "a: b: c", "a b: c", "a: 1\nb: 2", "-", "- a", "- a: 1", "? a: 1", "---", "--- 3", "3 ...", "%YAML 1.2", ",",
        "[a,,b]", "\t", " ", "a ", " a", "a\tb", "a\nb", "3\n4", "'a\nb'", "[a\n b]", "\ufeffa", "\x85", "a\x01",
        "a=b", "größe", r"\t", '"\\UFFFFFFFF"', "no",
    ],
)  # fmt: skip
def test_any_other_setting_is_read_as_text(text: str) -> None:
    assert source.read_value(text, "--set a").plain() == text


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_a_setting_that_is_read_as_text_has_all_characters(text: str) -> None:
    try:
        found = source.read_value(text, "--set a").plain()
    except ConfigError:  # such as a number of more than 100 digits
        return
    assert not isinstance(found, str) or found == text or text.strip()[0] in "'\""


def test_a_byte_order_mark_and_windows_line_ends_are_read() -> None:
    assert source.read(b"\xef\xbb\xbfa: 1\r\nb: [2]\r\n", "c.yaml")[0].plain() == {"a": 1, "b": [2]}


def test_an_alias_has_the_value_of_its_anchor() -> None:
    assert source.read(b"a: &x [1, {b: 2}]\nc: *x\n", "c.yaml")[0].plain() == {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}


def test_values_have_their_line_and_column() -> None:
    root = source.read(b"a:\n  - b: 1\n  - linear: 128\n", "c.yaml")[0]
    node, where = root.find(("a", 0, "b"))
    assert (node.where, where) == ("c.yaml:2:8", "c.yaml:2:5")
    node, where = root.find(("a", 1, "linear", "out_features"))
    assert (node.where, where) == ("c.yaml:3:13", "c.yaml:3:5")
