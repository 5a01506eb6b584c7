"""Runs that are trained on text, from a generated text to samples of the trained network."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import command
from hypothesis import given
from hypothesis import strategies as st
from resumed_runs import check_stops, train

from adtrain import config, data, training
from adtrain.core.array import array
from adtrain.data import Options, text_file
from adtrain.passes import SIMPLIFY
from adtrain.training import RunFolder, loop, sampling, scores
from adtrain.training.tensor_file import TensorFile

pytestmark = pytest.mark.unfused

LETTERS = "abcdef\n"
TEXT = """\
name: letters
data: {path: PATH, length: 9, test: 0.2, validation: 0.1, batch_size: 16}
model: {layers: [embedding: {num_embeddings: 7, embedding_dim: 7}, linear: 7]}
loss: cross_entropy
optimizer: {adam: {lr: 0.05}}
schedule: cosine
training: {epochs: 5, seed: 0}
"""

BOTH_WAYS = "gru: {hidden_size: 4, bidirectional: true, output: all}"


def transitions() -> np.ndarray:
    """The probability of each letter (column) after each letter (row)."""
    rows: np.ndarray = np.random.default_rng(0).dirichlet(np.full(len(LETTERS), 0.4), len(LETTERS))
    return rows


def generated(count: int) -> str:
    """A text in which a letter depends on the letter before it only."""
    rng, letters, sums = np.random.default_rng(1), [0], np.cumsum(transitions(), axis=1)
    for u in rng.random(count - 1):
        letters.append(min(int(np.searchsorted(sums[letters[-1]], u, side="right")), len(LETTERS) - 1))
    return "".join(LETTERS[i] for i in letters)


def write_config(folder: Path, text: str | bytes | None = None, name: str = "letters.txt") -> Path:
    """Write a text, by default of 40,000 letters, and a config; returns the config's path."""
    content = generated(40_000) if text is None else text
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    path = folder / "letters.yaml"
    path.write_text(TEXT.replace("PATH", str(folder / name)))
    return path


def error_of(*arguments: str | Path) -> str:
    """The single line of an error, without `adtrain: error: `."""
    (line,) = command(*arguments, expect=2).stderr.splitlines()
    assert line.startswith("adtrain: error: ")
    return line.removeprefix("adtrain: error: ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("text")
    command("train", write_config(folder), "--output-dir", folder / "run")
    return folder / "run"


@pytest.mark.exhaustive
def test_the_perplexity_comes_near_the_best_possible(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    parts = data.load(path=trained.parent / "letters.txt", options=Options(length=9, test=0.2))
    names = [LETTERS.index(name) for name in parts.classes]
    inputs, labels = parts.test.images[:, 0, 0, :].astype(int), parts.test.labels
    chances = transitions()[np.ix_(names, names)][inputs, labels]
    best = np.exp(-np.log(chances).mean())
    assert best < 5 < len(LETTERS)
    assert best * 0.99 < summary["test"]["perplexity"] < best * 1.02
    assert summary["test"]["perplexity"] == pytest.approx(np.exp(summary["test"]["loss"]))
    likeliest = transitions()[np.ix_(names, names)].argmax(axis=1)[inputs] == labels
    assert summary["test"]["accuracy"] == pytest.approx(likeliest.mean(), abs=0.02)
    assert summary["best"]["by"] == "validation_perplexity"
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert {list(line["train"])[1] for line in lines if "train" in line} == {"perplexity"}


@pytest.mark.parametrize("loss", ["{cross_entropy: {label_smoothing: 0.2}}", "{cross_entropy: {weight: [1, 2, 3]}}"])
def test_perplexity_counts_neither_smoothing_nor_weights(tmp_path: Path, loss: str) -> None:
    path = write_config(tmp_path, "abcab" * 30)
    layers = "model.layers=[embedding: {num_embeddings: 3, embedding_dim: 3}, linear: 3]"
    experiment = training.prepare(config.load(path, [f"loss={loss}", layers]))
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(4, 9, 3)), rng.integers(0, 3, (4, 9)).astype(np.int32)
    task = experiment.network.task
    sums = task.sums(array(outputs), array(labels)).numpy()
    log_p = outputs - np.log(np.exp(outputs).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(log_p, labels[..., None], axis=-1)
    score = task.score(0.0, sums.tolist(), 4, lambda: labels)._asdict()
    assert score["perplexity"] == pytest.approx(np.exp(-picked.mean()))
    assert score["accuracy"] == pytest.approx((outputs.argmax(axis=-1) == labels).mean())


@pytest.mark.needs_torch
def test_the_loss_is_the_mean_over_all_positions(tmp_path: Path) -> None:
    import torch

    experiment = training.prepare(config.load(write_config(tmp_path, "abcdef\n" * 30)))
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(4, 9, 7)), rng.integers(0, 7, (4, 9)).astype(np.int32)
    expected = torch.nn.functional.cross_entropy(torch.tensor(outputs).transpose(1, 2), torch.tensor(labels).long())
    assert float(experiment.network.loss_of(array(outputs), array(labels))) == pytest.approx(float(expected))


@given(count=st.integers(40, 400), length=st.integers(1, 7), shares=st.tuples(st.floats(0.2, 0.4), st.floats(0.2, 0.4)))
def test_the_parts_follow_each_other_and_share_no_character(
    tmp_path_factory: pytest.TempPathFactory, count: int, length: int, shares: tuple[float, float]
) -> None:
    path = tmp_path_factory.mktemp("parts") / "t.txt"
    text = "".join(chr(256 + i) for i in range(count))  # each character occurs once
    path.write_text(text, encoding="utf-8")
    parts = data.load(path=path, options=Options(length=length, test=shares[0]))
    train, validation = data.split_validation(parts.train, shares[1], seed=3)
    assert validation is not None
    read = []
    for part in (train, validation, parts.test):
        inputs = np.asarray(part.images)[:, 0, 0, :].astype(int)
        np.testing.assert_array_equal(inputs[:, 1:], part.labels[:, :-1])
        read.append(np.concatenate([inputs[:, :1], part.labels], axis=1).ravel())
    np.testing.assert_array_equal(np.concatenate(read), np.arange(count // (length + 1) * (length + 1)))
    assert len(parts.test) == round(shares[0] * (count // (length + 1)))


def test_a_stopped_and_resumed_run_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    path = write_config(tmp_path, generated(1500))
    experiment = training.prepare(config.load(path, ["training.epochs=2", "data.batch_size=40"]))
    assert train(experiment, RunFolder.create(experiment, tmp_path / "whole"))
    assert check_stops(experiment, tmp_path / "whole", 1, 2) > 3


def test_a_text_that_changed_its_characters_is_not_resumed(tmp_path: Path) -> None:
    path, folder = write_config(tmp_path, generated(1500)), tmp_path / "run"
    command("train", path, "--output-dir", folder, "--epochs", "1")
    (tmp_path / "letters.txt").write_text(generated(1500).replace("a", "z"))
    assert "the data's classes: [" in error_of("train", "--resume", folder, "--epochs", "2")


def test_eval_measures_another_text_with_the_classes_of_the_run(trained: Path, tmp_path: Path) -> None:
    assert "perplexity" in command("eval", trained).stdout
    other = tmp_path / "other.txt"
    other.write_text("ab" * 30)
    found = json.loads(command("eval", trained, "--data", other, "--json").stdout)
    assert found["images"] == 6
    b_after_a, a_after_b = (probabilities_after(x, trained, tmp_path)[y] for x, y in ("ab", "ba"))
    log_loss = -(5 * np.log(b_after_a) + 4 * np.log(a_after_b)) / 9  # a piece is ababababab
    assert found["test"]["perplexity"] == pytest.approx(np.exp(log_loss), rel=1e-4)
    other.write_text("ab\nabx" * 30)
    expected_error = f"{other}:2:3: found 'x', expected one of the 7 characters of the training's text"
    assert error_of("eval", trained, "--data", other) == expected_error


def probabilities_after(text: str, trained: Path, tmp_path: Path) -> dict[str, float]:
    """The predicted probability of each next character."""
    (tmp_path / "input.txt").write_text(text)
    (found,) = json.loads(command("predict", trained, tmp_path / "input.txt", "--json", "--top-k", "99").stdout)
    return {row["class"]: row["probability"] for row in found["top"]}


@pytest.mark.parametrize("text", ["a", "dcb", "c" * 9, "f\nabcdef" * 9])
def test_predict_gives_the_probabilities_of_the_next_character(trained: Path, tmp_path: Path, text: str) -> None:
    found = probabilities_after(text, trained, tmp_path)
    assert sum(found.values()) == pytest.approx(1)
    expected = transitions()[LETTERS.index(text[-1])]
    np.testing.assert_allclose([found[name] for name in LETTERS], expected, atol=0.03)


def test_predict_shows_characters_that_are_not_seen(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("a")
    assert r"'\n'" in command("predict", trained, tmp_path / "input.txt", "--top-k", "7").stdout
    assert error_of("predict", trained, tmp_path / "input.txt", "--invert", "no").startswith("--invert is for runs on")


def test_a_sample_is_determined_by_its_seed(trained: Path) -> None:
    def sample(*options: str) -> str:
        found = json.loads(command("sample", trained, "--json", "--length", "60", *options).stdout)
        result: str = found["samples"][0]["text"]
        return result

    assert sample("--seed", "1") == sample("--seed", "1")
    assert sample("--seed", "1") != sample("--seed", "2")
    assert len(sample()) == 60


def test_a_sample_of_low_temperature_takes_the_most_probable_characters(trained: Path, tmp_path: Path) -> None:
    printed = command("sample", trained, "--length", "8", "--temperature", "0.001", "--prompt", "da").stdout
    text = "da"
    for _ in range(8):
        probabilities = probabilities_after(text, trained, tmp_path)
        text += max(probabilities, key=lambda name: probabilities[name])
    assert printed == text + "\n"
    tiny = command("sample", trained, "--length", "8", "--temperature", "1e-320", "--prompt", "da")
    assert (tiny.stdout, tiny.stderr) == (printed, "")


def test_several_prompts_are_continued_together(trained: Path) -> None:
    prompts = ("--prompt", "da", "--prompt", "f", "--length", "8", "--top-k", "1", "--top-p", "0.5")
    found = json.loads(command("sample", trained, *prompts, "--json").stdout)
    assert (found["top_k"], found["top_p"]) == (1, 0.5)
    alone = [command("sample", trained, "--length", "8", "--top-k", "1", "--prompt", x).stdout for x in ("da", "f")]
    assert [x["prompt"] + x["text"] + "\n" for x in found["samples"]] == alone
    assert command("sample", trained, *prompts).stdout == alone[0] + "---\n" + alone[1]


def test_the_prompt_is_standard_input_where_none_is_given(trained: Path) -> None:
    options = ("--length", "8", "--top-k", "1")
    given = command("sample", trained, *options, "--prompt", "da").stdout
    assert command("sample", trained, *options, stdin="da").stdout == given
    assert command("sample", trained, *options, stdin="da\n").stdout == given
    assert command("sample", trained, *options, "--prompt", "da", stdin="f").stdout == given
    assert "in the prompt" in command("sample", trained, *options, stdin=b"\xff", expect=2).stderr


def test_a_sample_has_the_frequencies_of_the_text(trained: Path) -> None:
    model = training.model_file.load(trained)
    drawn = itertools.islice(sampling.sample(model, "cpu", [np.array([1], np.int32)]), 1500)
    letters = [LETTERS.index(model.classes[i]) for (i,) in drawn]
    counts = np.zeros((7, 7))
    np.add.at(counts, (letters[:-1], letters[1:]), 1)
    often = counts.sum(axis=1) > 100
    np.testing.assert_allclose((counts / counts.sum(axis=1, keepdims=True))[often], transitions()[often], atol=0.12)


def test_a_text_of_bytes_needs_no_encoding(tmp_path: Path) -> None:
    path = write_config(tmp_path, b"\xff\x00z" * 200, "book.bin")
    layers = "[embedding: {num_embeddings: 256, embedding_dim: 8}, linear: 256]"
    settings = ("data.format=text", "data.unit=byte", f"model.layers={layers}")
    options = [word for setting in settings for word in ("--set", setting)]
    folder = tmp_path / "run"
    command("train", path, "--output-dir", folder, "--epochs", "9", *options)
    found = json.loads(
        command("sample", folder, "--prompt", "z", "--length", "6", "--temperature", "0.01", "--json").stdout
    )
    assert found["samples"] == [{"prompt": "z", "text": "\ufffd\x00z" * 2}]
    assert json.loads((folder / "summary.json").read_text())["test"]["accuracy"] == 1


def test_huge_scores_of_a_training_that_diverges_are_short() -> None:
    diverged = scores.TextScore(4.0785e30, np.exp(690), 0.25)
    assert scores.text(diverged) == "loss 4.079e+30, perplexity 4.605e+299, accuracy 25.00%"
    assert scores.short_text(diverged) == "loss 4.079e+30, perplexity 4.6e+299"


def test_the_other_commands_take_a_run_on_text(trained: Path, tmp_path: Path) -> None:
    assert "7 classes" in command("new", trained.parent / "letters.txt").stdout
    book = tmp_path / "letters.csv"  # a text although its name is that of a table
    book.write_bytes((trained.parent / "letters.txt").read_bytes())
    assert re.match(
        r"# \d+ sequences of 128 characters or bytes; 7 classes\n", command("new", book, "--set", "format=text").stdout
    )
    assert r"'\n'" in command("data", "inspect", trained.parent / "letters.txt").stdout
    command("report", trained, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "test perplexity" in page
    assert "<h2>Sample</h2>" in page
    assert "passed" in command("gradcheck", trained).stdout


@pytest.mark.needs_onnx
def test_an_exported_network_has_the_same_outputs(trained: Path, tmp_path: Path) -> None:
    found = command("export", trained, tmp_path / "letters.onnx")
    assert "test sequences: same predictions" in found.stdout
    assert "test sequences\n" in found.stderr


def test_a_dry_run_of_a_text_counts_sequences(tmp_path: Path) -> None:
    found = command("train", write_config(tmp_path, "abcdef\n" * 40), "--dry-run").stdout
    assert " test sequences\n" in found
    assert "of 16 sequences; epochs: 5" in found


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (b"", [], "TEXT: found an empty file, expected text"),
        (b"abc", [], "data.length: found 9, which needs 10 characters, but TEXT has 3"),
        ("aé\nbé".encode() + b"\xe9\n", [], "TEXT:2: found 0xe9 at byte 4 of the line, which is not UTF-8"),
        (None, ["loss=mse"], "loss: found mse for a text, expected cross_entropy or nll"),
        (None, ["data.augment=[noise]"], "data.augment: expected none for a text"),
        (
            None,
            ["model.layers.1.linear=6"],
            "model.layers[1]: found 6 outputs, expected at least 7: TEXT has 7 classes",
        ),
        (None, ["model.layers.0.embedding.num_embeddings=6"], "found num_embeddings 6, expected at least 7"),
        (None, ["model.layers=[linear: 7]"], "found output (7,), expected (length, classes) for a text"),
        (
            None,
            [f"model.layers=[reshape: [9, 1], {BOTH_WAYS}, linear: 7]"],
            "position 0 depends on the input at position 8",
        ),
        (None, ["model.input=[8]"], "model.input: found [8], expected [9], the length of a sequence (data.length)"),
        (None, ["data.image_size=[8, 8]"], "data.image_size: an option of an archive of images or a folder of images"),
        (None, ["data.test=0"], "data.test: missing, TEXT has no test part"),
        (None, ["training.best_by=validation_rmse"], "expected train_ or validation_ with one of loss, perplexity"),
    ],
)
def test_a_text_or_config_that_does_not_fit_is_an_error(
    tmp_path: Path, text: bytes | None, settings: list[str], expected: str
) -> None:
    path = write_config(tmp_path, generated(400) if text is None else text)
    options = [word for setting in settings for word in ("--set", setting)]
    error = error_of("train", path, "--output-dir", tmp_path / "run", *options)
    assert expected.replace("TEXT", str(tmp_path / "letters.txt")) in error
    assert not (tmp_path / "run").exists()


def test_the_file_at_test_path_must_have_the_characters_of_the_training(tmp_path: Path) -> None:
    path, other = write_config(tmp_path, generated(400)), tmp_path / "other.txt"
    other.write_text("abcdefabcdé\n")
    assert f"{other}:1:11: found 'é'" in error_of(
        "train", path, "--set", "data.test=0", "--set", f"data.test_path={other}", "--output-dir", tmp_path / "run"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--temperature", "0"], "found '0', expected a number above 0; --top-k 1 takes the most probable one"),
        (["--temperature", "nan"], "found 'nan', expected a finite number above 0"),
        (["--prompt", "xaéx\x1b"], r"found 'x', 'é', '\x1b' in the prompt, expected characters of the text"),
        (["--length", "0"], "found '0', expected a whole number of at least 1"),
    ],
)
def test_a_sample_with_wrong_options_is_an_error(trained: Path, options: list[str], expected: str) -> None:
    assert expected in error_of("sample", trained, *options)


@pytest.mark.parametrize("classes", [(), ("ab",), ("b", "a"), ("a", "a")])
def test_a_model_whose_classes_are_no_characters_is_refused(
    trained: Path, monkeypatch: pytest.MonkeyPatch, classes: tuple[str, ...]
) -> None:
    about = TensorFile.metadata
    monkeypatch.setattr(TensorFile, "metadata", lambda *arguments: replace(about(*arguments), classes=classes))
    assert "found metadata that do not fit the model" in error_of("sample", trained)


def test_classes_of_finds_each_character_and_names_the_unknown_ones() -> None:
    found, unknown = text_file.classes_of("b\U0001f600aé", ("a", "b", "\U0001f600"))
    assert found[:3].tolist() == [1, 2, 0]
    assert unknown == ["é"]


def test_a_step_computes_the_loss_of_perplexity_once(tmp_path: Path) -> None:
    experiment = training.prepare(config.load(write_config(tmp_path, generated(400))))
    names = [e.name for e in experiment.step_program(passes=SIMPLIFY).equations]
    assert names.count("log_softmax") == names.count("take_along_axis") == 1
