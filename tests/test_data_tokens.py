"""Tokens of texts, folders of token files, and sequences of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from command_line import command
from hypothesis import given
from hypothesis import strategies as st

from adtrain import data
from adtrain.core.errors import AdtrainError
from adtrain.data import DataError, DataOptionError, Options, shuffle, token_folder, tokenizer
from adtrain.data.file_array import MemoryStream, cut
from adtrain.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer

TEXT = "the cat sat on the mat, the rat ate the cat's hat.\n\nThat is that: 3 hats, 14 cats!\n" * 20


@cache
def learnt(vocabulary: int = 280) -> Tokenizer:
    return tokenizer.train([TEXT], vocabulary)


def write_tokens(folder: Path, shard_tokens: int = 200, used: Tokenizer | None = None) -> Path:
    """A folder with the tokens of TEXT in files of `shard_tokens` tokens."""
    source = folder / "source.txt"
    source.write_text(TEXT)
    token_folder.write([source], folder / "tokens", used or learnt(), shard_tokens)
    return folder / "tokens"


END = learnt().end_of_text or 0
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(text=texts)
def test_the_tokens_of_a_text_are_its_bytes(text: str) -> None:
    found = learnt().encode([text])
    assert b"".join(learnt().tokens[number] for number in found) == text.encode()
    assert "".join(learnt().decode(found)) == text


@given(text=texts)
def test_each_string_that_is_decoded_has_whole_characters(text: str) -> None:
    of_bytes = learnt(SMALLEST_VOCABULARY)
    chunks = list(of_bytes.decode(of_bytes.encode([text])))
    assert "".join(chunks) == text
    assert all(text.startswith("".join(chunks[:i])) for i in range(len(chunks)))


def test_bytes_that_are_not_utf_8_are_decoded_as_replacement_characters() -> None:
    numbers = {name: number for number, name in enumerate(learnt().tokens) if len(name) == 1}
    assert "".join(learnt().decode([numbers[b"\xff"], numbers[b"a"], numbers[b"\xc3"]])) == "\ufffda\ufffd"


WORDS = {
    "GPT-2": None,  # as `train` makes it
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    "Qwen 2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
}
"""The expressions that divide texts into words, which no token leaves, of well-known tokenizers."""


@cache
def with_words_of(name: str) -> Tokenizer:
    """A tokenizer with many tokens of several words, if they were not divided first."""
    values = json.loads(tokenizer.train([TEXT + "\n\n  \n .\n a.\n\n 00 \t1\n" * 50], 300).content)
    if WORDS[name] is not None:
        split = {"type": "Split", "pattern": {"Regex": WORDS[name]}, "behavior": "Isolated", "invert": False}
        of_bytes = values["pre_tokenizer"] | {"use_regex": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, of_bytes]}
    return Tokenizer(json.dumps(values))


@given(
    text=st.text("abz019 \n\t.,'!é字\u0301", max_size=80), block=st.integers(1, 40), name=st.sampled_from(list(WORDS))
)
def test_the_tokens_of_a_text_do_not_depend_on_the_blocks_in_which_it_is_read(text: str, block: int, name: str) -> None:
    pieces, used = list(tokenizer.pieces(text[i : i + block] for i in range(0, len(text), block))), with_words_of(name)
    assert "".join(pieces) == text
    np.testing.assert_array_equal(used.encode(pieces), used.encode([text]))


def test_a_text_without_spaces_is_divided_after_the_longest_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "LONGEST_PIECE", 10)
    assert list(map(len, tokenizer.pieces(["字" * 4] * 8))) == [10, 10, 10, 2]


def test_the_same_text_gives_the_same_tokenizer() -> None:
    assert tokenizer.train([TEXT], 280) == tokenizer.train([TEXT[:83], TEXT[83:]], 280) == learnt()
    assert len(learnt().classes) == len(set(learnt().classes)) == 280


def test_a_short_text_has_fewer_tokens_than_asked_for() -> None:
    assert SMALLEST_VOCABULARY <= len(tokenizer.train(["aa"], 1000).classes) < 300


def test_a_text_that_spells_the_end_of_a_text_has_no_such_token() -> None:
    assert learnt().end_of_text not in learnt().encode(["a<|endoftext|>b"])
    assert learnt().tokens[END] == b""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{}", "found no tokenizer (Model missing"),
        ('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', "without a token for each byte"),
        (b"\xff", "found no UTF-8, expected a tokenizer.json"),
    ],
)
def test_a_tokenizer_of_another_kind_is_an_error(tmp_path: Path, content: str | bytes, expected: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        tokenizer.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_added_tokens_that_are_not_special_have_their_text() -> None:
    values = json.loads(learnt().content)
    values["added_tokens"].append(values["added_tokens"][0] | {"id": 280, "content": "    ", "special": False})
    used = Tokenizer(json.dumps(values))
    found = used.encode(["the     cat"])
    assert 280 in found
    assert "".join(used.decode(found)) == "the     cat"
    assert used.tokens[280] == b"    "


def test_truncation_and_padding_of_a_tokenizer_are_ignored(tmp_path: Path) -> None:
    values = json.loads(learnt().content)
    values["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    used = tokenizer.read(tmp_path / "tokenizer.json")
    assert "".join(used.decode(used.encode([TEXT]))) == TEXT


def test_a_user_without_the_package_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "a.txt").write_text(TEXT)
    result = command("data", "tokenize", tmp_path / "a.txt", "-o", tmp_path / "t", "--vocabulary", "300", expect=2)
    assert result.stderr.splitlines()[-1] == (
        "adtrain: error: tokens need the package tokenizers: pip install 'adtrain[text]'"
    )
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("texts", "output", "expected"),
    [
        (["empty.txt", "mark.txt"], "t", "empty.txt, mark.txt: found no characters, expected text"),
        (["a.txt"], "a.txt/t", "a.txt/t: cannot be written (Not a directory)"),
        (["a.txt"], "-", "-o -: tokens are a folder of files, expected a folder (see 'adtrain data tokenize --help')"),
        (["a.txt"], "a.txt", "a.txt: already exists; give another folder, or remove it first"),
    ],
)
def test_tokens_that_cannot_be_written_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], output: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {"a.txt": TEXT.encode(), "empty.txt": b"", "mark.txt": b"\xef\xbb\xbf"}
    for name, content in contents.items():
        Path(name).write_bytes(content)
    result = command("data", "tokenize", *texts, "-o", output, "--vocabulary", "300", expect=2)
    assert result.stderr.splitlines()[-1] == f"adtrain: error: {expected}"
    assert output == "t" or "learning" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(contents)


def test_a_file_that_is_not_utf_8_is_an_error_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "BLOCK", 5)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab cd\nef\n\xffgh\n")
    with pytest.raises(DataError, match=r"a\.txt:3: found 0xff, which is not UTF-8"):
        list(tokenizer.pieces_of(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab cd\nef\n")
    assert "".join(tokenizer.pieces_of(tmp_path / "a.txt")) == "ab cd\nef\n"


@given(shard_tokens=st.integers(1, 700), length=st.integers(1, 30), rows=st.lists(st.integers(0, 10), min_size=1))
def test_sequences_do_not_depend_on_where_the_files_are_cut(
    tmp_path_factory: pytest.TempPathFactory, shard_tokens: int, length: int, rows: list[int]
) -> None:
    folder = write_tokens(tmp_path_factory.mktemp("cut"), shard_tokens=shard_tokens)
    tokens = np.append(learnt().encode([TEXT]), END)
    found = data.load(path=folder, options=Options(unit="token", length=length), need_test=False)
    whole = tokens[: len(tokens) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    np.testing.assert_array_equal(np.asarray(found.train.images)[:, 0, 0], whole[:, :-1])
    np.testing.assert_array_equal(np.asarray(found.train.labels), whole[:, 1:])
    np.testing.assert_array_equal(found.train.labels[np.array(rows)], whole[rows, 1:])
    np.testing.assert_array_equal(found.train.images[3], whole[3, :-1].reshape(1, 1, length))
    assert found.train.images.dtype == np.float32
    assert found.train.labels.dtype == np.int32


def test_each_text_ends_with_its_token(tmp_path: Path) -> None:
    (tmp_path / "books" / "more").mkdir(parents=True)
    (tmp_path / "books" / ".hidden.txt").write_text("no")
    (tmp_path / "books" / "notes.md").write_text("no")
    for name, text in {"books/b.txt": "the cat", "books/more/a.txt": "", "other.md": "the rat"}.items():
        (tmp_path / name).write_text(text)
    documents = token_folder.documents_of([tmp_path / "other.md", tmp_path / "books", tmp_path / "books" / "b.txt"])
    header = token_folder.write(documents, tmp_path / "tokens", learnt())
    tokens = np.fromfile(tmp_path / "tokens" / "tokens-00000.bin", "<u2")
    ends = np.flatnonzero(tokens == learnt().end_of_text)
    parts = [b"".join(learnt().tokens[x] for x in part) for part in np.split(tokens, ends + 1)]
    assert parts == [b"the rat", b"the cat", b"", b""]
    assert (header.documents, header.tokens, header.bytes, header.vocabulary) == (3, len(tokens), 14, 280)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, "<u2"), (2**16 + 1, "<u4")])
def test_the_vocabulary_decides_the_type_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int, dtype: str
) -> None:
    names = (*learnt().classes, *[""] * (vocabulary - 280))
    monkeypatch.setattr(Tokenizer, "classes", names)
    folder = write_tokens(tmp_path, 10_000, Tokenizer(learnt().content))
    tokens = np.fromfile(folder / "tokens-00000.bin", dtype)
    np.testing.assert_array_equal(tokens[:-1], learnt().encode([TEXT]))
    found = data.load(path=folder, options=Options(unit="token", length=9), need_test=False).train
    np.testing.assert_array_equal(np.asarray(found.labels)[:, -1], tokens[9::10])


def damage(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change the header of a folder of tokens."""
    values = json.loads((folder / "tokens.json").read_text())
    change(values)
    (folder / "tokens.json").write_text(json.dumps(values))


def truncate(folder: Path) -> None:
    path = folder / "tokens-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])


def enlarge_a_token(folder: Path) -> None:
    path = folder / "tokens-00001.bin"
    path.write_bytes(b"\xff\xff" + path.read_bytes()[2:])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated file": (truncate, "FOLDER/tokens-00001.bin: is truncated: found 399 bytes, expected 400"),
    "a missing file": (
        lambda folder: (folder / "tokens-00001.bin").unlink(),
        "FOLDER/tokens-00001.bin: cannot be read (No such file or directory)",
    ),
    "another vocabulary": (
        lambda folder: damage(folder, lambda x: x.update(vocabulary=281)),
        "FOLDER/tokens.json: found a vocabulary of 281, but that of tokenizer.json is 280; expected the same",
    ),
    "a tokenizer that changed": (
        lambda folder: (folder / "tokenizer.json").write_text(learnt(SMALLEST_VOCABULARY).content),
        "FOLDER/tokenizer.json: has changed since the tokens were made; restore it, or make them again",
    ),
    "another format": (
        lambda folder: damage(folder, lambda x: x.update(format=2)),
        "FOLDER/tokens.json: found format 2, expected 1",
    ),
    "wrong counts": (
        lambda folder: damage(folder, lambda x: x.update(tokens=7)),
        "FOLDER/tokens.json: is damaged: its numbers do not fit together; adtrain data tokenize makes such a folder",
    ),
    "a path out of the folder": (
        lambda folder: damage(folder, lambda x: x["shards"][0].update(file="../x")),  # type: ignore[index]
        "FOLDER/tokens.json: is damaged: its numbers do not fit together; adtrain data tokenize makes such a folder",
    ),
    "no header": (
        lambda folder: (folder / "tokens.json").write_text("[1"),
        "FOLDER/tokens.json: is damaged: found no header of tokens; adtrain data tokenize makes such a folder",
    ),
    "a deep header": (
        lambda folder: (folder / "tokens.json").write_text("[" * 100_000),
        "FOLDER/tokens.json: is damaged: found no header of tokens; adtrain data tokenize makes such a folder",
    ),
    "a token that is too large": (
        enlarge_a_token,
        "FOLDER/tokens-00001.bin: is damaged: found token 65535, expected tokens below 280",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_folder_is_one_line(tmp_path: Path, kind: str) -> None:
    folder = write_tokens(tmp_path)
    change, expected = DAMAGES[kind]
    change(folder)
    with pytest.raises(DataError) as caught:
        np.asarray(data.load(path=folder, options=Options(unit="token"), need_test=False).train.images)
    assert str(caught.value) == expected.replace("FOLDER", str(folder))


def test_inspect_verifies_the_checksums(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path)
    assert "a sequence of 128 tokens, read from the file as needed" in command("data", "inspect", folder).stdout
    path = folder / "tokens-00000.bin"
    path.write_bytes(b"\x05\x00" + path.read_bytes()[2:])
    assert f"{path}: found SHA-256 " in command("data", "inspect", folder, expect=2).stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"unit": "character"}, "data.unit: found character, expected token: FOLDER has tokens"),
        ({"unit": "token", "length": 9999}, "data.length: found 9999, which needs 10,000 tokens, but FOLDER has "),
        ({"unit": "token", "vocabulary": 300}, "data.vocabulary: an option of a text file, found a folder of tokens"),
    ],
)
def test_an_option_that_does_not_fit_a_folder_of_tokens_is_an_error(
    tmp_path: Path, options: dict[str, object], expected: str
) -> None:
    folder = write_tokens(tmp_path)
    with pytest.raises(DataOptionError) as caught:
        data.load(path=folder, options=Options(**options), need_test=False)  # type: ignore[arg-type]
    assert str(caught.value).startswith(expected.replace("FOLDER", str(folder)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"unit": "token"}, "data.unit: found token, expected one of vocabulary, "),
        (
            {"unit": "token", "vocabulary": 300, "tokenizer": "t.json"},
            "data.tokenizer: found t.json, but data.vocabulary is set; remove one of them",
        ),
        ({"vocabulary": 300}, "data.vocabulary: found 300 for characters, expected data.unit: token"),
        ({"unit": "byte", "tokenizer": "t.json"}, "data.tokenizer: found t.json for bytes, expected data.unit: token"),
    ],
)
def test_a_text_has_tokens_by_one_tokenizer(tmp_path: Path, options: dict[str, object], expected: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(DataOptionError) as caught:
        data.load(path=tmp_path / "a.txt", options=Options(**options), need_test=False)  # type: ignore[arg-type]
    assert str(caught.value).startswith(expected)


def test_a_text_has_the_tokens_of_a_given_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "tokenizer.json").write_text(learnt().content)
    options = Options(unit="token", length=9, tokenizer=str(tmp_path / "tokenizer.json"))
    found = data.load(path=tmp_path / "a.txt", options=options, need_test=False)
    np.testing.assert_array_equal(found.train.labels[:, -1], learnt().encode([TEXT])[9::10])
    assert found.classes == learnt().classes
    assert found.tokenizer == learnt()


def test_a_folder_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text(TEXT)
    bad.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="which is not UTF-8"):
        token_folder.write([good, bad], tmp_path / "tokens", learnt())
    assert sorted(x.name for x in tmp_path.iterdir()) == ["bad.txt", "good.txt"]
    token_folder.write([good], tmp_path / "tokens", learnt())
    with pytest.raises(AdtrainError, match="tokens: already exists; give another folder, or remove it first"):
        token_folder.write([good], tmp_path / "tokens", learnt())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.txt"], "expected one of --vocabulary and --tokenizer"),
        (["a.txt", "--vocabulary", "256"], "found '256', expected a whole number from 257 to 16777216"),
        (
            ["none.txt", "--vocabulary", "300"],
            "none.txt: found nothing, expected a text file, or a folder of .txt files",
        ),
        (["empty", "--vocabulary", "300"], "empty: found a folder without .txt files, expected text files"),
    ],
)
def test_what_cannot_be_tokenized_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXT)
    Path("empty").mkdir()
    (error,) = command("data", "tokenize", *arguments, "-o", "tokens", expect=2).stderr.splitlines()
    assert expected in error
    assert not Path("tokens").exists()


@given(count=st.integers(1, 50), length=st.integers(1, 9), seed=st.integers(0, 9), epoch=st.integers(1, 9))
def test_sequences_at_random_offsets_are_parts_of_the_text(count: int, length: int, seed: int, epoch: int) -> None:
    tokens = np.arange(count * (length + 1), dtype=np.int32)
    inputs, labels = (x.at_offsets() for x in cut(MemoryStream(tokens, ""), length))
    offsets = shuffle.offsets(count, seed, epoch, length)
    assert offsets.shape == (count,)
    np.testing.assert_array_equal(inputs[offsets].reshape(count, length), offsets[:, None] + np.arange(length))
    np.testing.assert_array_equal(labels[offsets], offsets[:, None] + np.arange(1, length + 1))
    np.testing.assert_array_equal(shuffle.offsets(count, seed, epoch, length), offsets)


def test_random_offsets_are_anywhere_and_differ_between_epochs() -> None:
    first, second = (shuffle.offsets(1000, 0, epoch, 3) for epoch in (1, 2))
    assert (first != second).mean() > 0.99
    assert len(np.unique(np.concatenate([first, second]) % 4)) == 4
    assert min(first) < 40
    assert max(first) > 3960
