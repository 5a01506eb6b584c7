"""Runs that are trained on tokens, from a generated text to samples of the trained network."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_runs as images
from command_line import command
from resumed_runs import check_stops, train
from safetensors import safe_open
from thread_ranks import ThreadRank, on_ranks

import adtrain as ad
from adtrain import config, training
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.data import token_folder, tokenizer
from adtrain.data.tokenizer import Tokenizer
from adtrain.export import architectures
from adtrain.report import record
from adtrain.training import RunFolder, evaluation, examples, loop, model_file, sampling
from adtrain.training.checkpoint import fetch
from adtrain.training.examples import Streamed
from adtrain.training.tasks import NextToken

pytestmark = pytest.mark.unfused

VOCABULARY = 270
CONFIG = """\
name: words
data: {path: PATH, unit: token, vocabulary: 270, length: 8, test: 0.2, validation: 0.1, batch_size: 16}
model: {layers: [embedding: {num_embeddings: 270, embedding_dim: 8}, linear: 270]}
loss: cross_entropy
optimizer: {adam: {lr: 0.05}}
training: {epochs: 2, seed: 0}
"""
WORDS = ("the", "cat", "sat", "on", "a", "mät", "😀", "far\n")


def generated(count: int, seed: int = 0) -> str:
    """A text of so many words."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def write_config(folder: Path, text: str | None = None) -> Path:
    """Write a text and a config that trains on it; returns the config's path."""
    (folder / "words.txt").write_text(generated(900) if text is None else text, encoding="utf-8")
    path = folder / "words.yaml"
    path.write_text(CONFIG.replace("PATH", str(folder / "words.txt")))
    return path


def write_tokens(folder: Path, words: int = 900) -> Path:
    """Write files of tokens and a config that trains on them; returns the config's path."""
    write_config(folder, generated(words))
    text = folder / "words.txt"
    used = tokenizer.train(tokenizer.pieces_of(text), VOCABULARY)
    token_folder.write([text], folder / "tokens", used, shard_tokens=101)
    path = folder / "tokens.yaml"
    path.write_text(CONFIG.replace("PATH", str(folder / "tokens")).replace("vocabulary: 270, ", ""))
    return path


def error_of(*arguments: str | Path) -> str:
    """The single line of an error, without `adtrain: error: `."""
    (line,) = command(*arguments, expect=2).stderr.splitlines()
    return line.removeprefix("adtrain: error: ")


def test_a_batch_of_an_evaluation_has_few_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = training.prepare(config.load(write_config(tmp_path)))
    task = experiment.network.task
    assert evaluation.batch_size_of(task) == evaluation.BATCH_SIZE
    state = experiment.initial_state("cpu")

    def score() -> dict[str, float]:
        examples = training.on_device(experiment.test, "cpu")
        found = training.Evaluation(training.evaluation_step(experiment.network), task, examples)
        return found.score(state.params, state.statistics)._asdict()

    whole = score()
    monkeypatch.setattr(evaluation, "MOST_OUTPUTS", 5 * 8 * VOCABULARY)
    assert evaluation.batch_size_of(task) == 5
    assert score() == pytest.approx(whole)
    monkeypatch.setattr(evaluation, "MOST_OUTPUTS", 1)
    assert evaluation.batch_size_of(task) == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; the text is there no longer, but in the run's folder is what a sample needs."""
    folder = tmp_path_factory.mktemp("tokens")
    command("train", write_config(folder), "--output-dir", folder / "run")
    return folder / "run"


def test_the_score_of_tokens_is_that_of_its_definition(tmp_path: Path) -> None:
    experiment = training.prepare(config.load(write_config(tmp_path)))
    task, used = experiment.network.task, experiment.data.tokenizer
    assert isinstance(task, NextToken)
    assert used is not None
    labels = experiment.test.labels[:4]
    outputs = np.random.default_rng(0).normal(size=(4, 8, VOCABULARY))
    log_p = outputs - np.log(np.exp(outputs).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(log_p, labels[..., None], axis=-1)
    text = b"".join(used.tokens[x] for x in labels.ravel())
    sums = task.sums(array(outputs), array(labels)).numpy()
    score = task.score(0.0, sums.tolist(), 4, lambda: labels)._asdict()
    assert score["perplexity"] == pytest.approx(np.exp(-picked.mean()))
    assert score["bits_per_byte"] == pytest.approx(-picked.sum() / np.log(2) / len(text))
    assert score["accuracy"] == pytest.approx((outputs.argmax(axis=-1) == labels).mean())


def test_all_that_shows_a_score_shows_the_same_one(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())["test"]
    assert list(summary) == ["loss", "perplexity", "bits_per_byte", "accuracy"]
    assert summary["perplexity"] == pytest.approx(np.exp(summary["loss"]))
    assert json.loads(command("eval", trained, "--json").stdout)["test"] == pytest.approx(summary)
    assert f"bits_per_byte {summary['bits_per_byte']:.4f}" in command("eval", trained).stdout
    assert json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])["test"] == summary
    found = ad.train(str(trained.parent / "words.yaml"), progress=False).summary.test
    assert found._asdict() == pytest.approx(summary)
    command("report", trained, "-o", trained.parent / "report.html")
    page = (trained.parent / "report.html").read_text()
    assert f"{summary['bits_per_byte']:.4f}" in page
    assert "<h2>Sample</h2>" in page


def test_a_sweep_has_the_scores_of_its_members(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    settings = ("--set", "training.epochs=1", "--set", "sweep={optimizer.adam.lr: [0.05]}")
    command("sweep", path, "--output-dir", tmp_path / "sweep", *settings)
    command("train", path, "--output-dir", tmp_path / "run", "--set", "training.epochs=1")
    (line,) = json.loads((tmp_path / "sweep" / "results.json").read_text())["members"]
    assert line["test"] == pytest.approx(json.loads((tmp_path / "run" / "summary.json").read_text())["test"])
    member = tmp_path / "sweep" / "members" / "0"
    assert (
        command("sample", member, "--length", "5").stdout == command("sample", tmp_path / "run", "--length", "5").stdout
    )
    assert "data.order: found it in a sweep" in error_of(
        "sweep", path, "--output-dir", tmp_path / "other", *settings, "--set", "data.order=in_order"
    )


@pytest.mark.parametrize("order", ["in_order", "random_offsets"])
def test_a_stopped_and_resumed_run_on_token_files_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(examples, "_copy_limit", lambda device: 0)
    experiment = training.prepare(config.load(write_tokens(tmp_path), [f"data.order={order}", "data.batch_size=32"]))
    assert isinstance(training.on_device(experiment.train, "cpu"), Streamed)
    assert train(experiment, RunFolder.create(experiment, tmp_path / "whole"))
    assert check_stops(experiment, tmp_path / "whole", 1, 8) > 8


def encoded(path: Path, *settings: str) -> bytes:
    """The bytes of the model that is trained."""
    experiment = training.prepare(config.load(path, settings))
    return b"".join(model_file.encode(experiment, fetch(training.run(experiment).state)()))


@pytest.mark.parametrize("order", ["shuffled", "random_offsets"])
def test_tokens_in_files_train_as_those_of_the_text_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    def state(path: Path) -> list[bytes]:
        found = training.run(training.prepare(config.load(path, [f"data.order={order}"]))).state
        return [x.numpy().tobytes() for x in tree.leaves(found)]

    in_files = write_tokens(tmp_path)
    whole = state(tmp_path / "words.yaml")
    assert state(in_files) == whole
    monkeypatch.setattr(examples, "_copy_limit", lambda device: 0)
    assert state(in_files) == whole


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_in_order_ranks_see_each_token_once_in_an_epoch(tmp_path: Path, ranks: int) -> None:
    path = write_tokens(tmp_path)

    def batches(rank: ThreadRank) -> list[tuple[np.ndarray, np.ndarray]]:
        experiment = training.prepare(config.load(path, ["data.order=in_order", "data.shards=4"]))
        parts = [experiment.part(batch) for batch in loop.batches_of(experiment, 2)]
        return [(experiment.train.images[x].reshape(len(x), -1), experiment.train.labels[x]) for x in parts]

    found = on_ranks(ranks, batches)
    seen = [
        np.concatenate([inputs[:, :1], labels], axis=1).astype(int)
        for step in zip(*found, strict=True)
        for inputs, labels in step
    ]
    tokens = np.concatenate([np.fromfile(x, "<u2") for x in sorted((tmp_path / "tokens").glob("*.bin"))])
    whole = np.concatenate(seen)
    np.testing.assert_array_equal(whole.ravel(), tokens[: whole.size])


def test_each_number_of_ranks_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "_copy_limit", lambda device: 0)
    path = write_tokens(tmp_path)
    settings = ["data.order=random_offsets", "data.shards=2", "training.epochs=1"]
    (one,), two = (on_ranks(ranks, lambda rank: encoded(path, *settings)) for ranks in (1, 2))
    assert two == [one, one]


def test_validation_takes_a_fixed_number_of_tokens(tmp_path: Path) -> None:
    path = write_tokens(tmp_path)
    settings = ["data.validation=0", "data.validation_tokens=90"]
    experiment = training.prepare(config.load(path, settings))
    assert experiment.validation is not None
    assert len(experiment.validation) == 12  # of 8 tokens each
    tokens = np.concatenate([np.fromfile(x, "<u2") for x in sorted((tmp_path / "tokens").glob("*.bin"))])
    begin = len(experiment.train) * 9
    whole = tokens[begin:][: 12 * 9].reshape(12, 9)
    np.testing.assert_array_equal(np.asarray(experiment.validation.labels), whole[:, 1:])
    assert "data.validation_tokens: found 99,999, expected at most " in error_of(
        "train", path, "--dry-run", "--set", "data.validation=0", "--set", "data.validation_tokens=99999"
    )
    assert "data.validation: found 0.1, but data.validation_tokens is set; remove this key" in error_of(
        "train", path, "--dry-run", "--set", "data.validation_tokens=90"
    )


def test_a_tokenizer_that_changed_is_not_resumed(tmp_path: Path) -> None:
    path, run = write_config(tmp_path), tmp_path / "run"
    command("train", path, "--output-dir", run, "--epochs", "1")
    before = (run / "last.safetensors").read_bytes()
    (tmp_path / "words.txt").write_text(generated(900).replace("cat", "dog"), encoding="utf-8")
    error = error_of("train", "--resume", run, "--epochs", "2")
    assert "the data's tokenizer: 'SHA-256 " in error
    assert "classes" not in error
    assert (run / "last.safetensors").read_bytes() == before


def test_eval_measures_any_text_with_the_tokenizer_of_the_run(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text(generated(40, seed=1), encoding="utf-8")
    found = json.loads(command("eval", trained, "--text", other, "--json").stdout)
    used = model_file.load(trained).tokenizer
    assert used is not None
    assert found["images"] == len(used.encode([other.read_text(encoding="utf-8")])) // 9
    assert found["test"]["perplexity"] < VOCABULARY / 4
    assert error_of("eval", trained, "--text", tmp_path) == f"{tmp_path}: found a folder, expected a text file"
    assert error_of("eval", trained, "--text", "none") == "none: found no file, expected a text file"
    both = error_of("eval", trained, "--text", other, "--data", other)
    assert both.startswith("found --data and --text, expected one of them")
    folder = tmp_path / "tokens"
    token_folder.write([other], folder, tokenizer.train([generated(50)], 260))
    assert error_of("eval", trained, "--data", folder) == (
        f"{folder}: found tokens of another tokenizer than the run's, expected those of the run's"
    )


def test_eval_of_a_text_needs_a_run_on_text(tmp_path: Path) -> None:
    command("train", images.write_config(tmp_path), "--output-dir", tmp_path / "run", "--epochs", "1")
    (tmp_path / "a.txt").write_text("a")
    assert "--text is for runs on text" in error_of("eval", tmp_path / "run", "--text", tmp_path / "a.txt")


def test_a_sample_continues_a_text(trained: Path) -> None:
    def sample(*options: str) -> str:
        samples = json.loads(command("sample", trained, "--json", "--length", "30", *options).stdout)["samples"]
        found: str = samples[0]["text"]
        return found

    assert sample("--prompt", "the mät", "--seed", "1") == sample("--prompt", "the mät", "--seed", "1")
    assert sample("--seed", "1") != sample("--seed", "2")
    printed = command("sample", trained, "--length", "9", "--prompt", "the mät", "--temperature", "0.001").stdout
    assert printed.startswith("the mät")
    assert error_of("sample", trained, "--prompt", "a\udcff") == (
        "found bytes in the prompt that are not UTF-8, expected text"
    )


def test_a_sample_ends_with_the_text(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = model_file.load(trained).tokenizer
    assert used is not None
    with_end = [*used.encode(["the cat"]), used.end_of_text, *used.encode(["sat"])]
    shorter = [*used.encode(["a dog"]), *[used.end_of_text] * len(with_end)][: len(with_end)]
    monkeypatch.setattr(sampling, "sample", lambda *arguments: iter(np.array([with_end]).T))
    assert command("sample", trained, "--prompt", "a ").stdout == "a the cat\n"
    monkeypatch.setattr(sampling, "sample", lambda *arguments: iter(np.array([with_end, shorter]).T))
    printed = command("sample", trained, "--prompt", "a ", "--prompt", "is ").stdout
    assert printed.splitlines() == ["a the cat", "---", "is a dog"]


def test_exported_weights_have_the_tokenizer(trained: Path, tmp_path: Path) -> None:
    command("export", trained, tmp_path / "words.safetensors")
    with safe_open(tmp_path / "words.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["adtrain"])
    assert Tokenizer(about["tokenizer"]) == model_file.load(trained).tokenizer


def test_exported_weights_are_for_integers_without_normalisation(trained: Path, tmp_path: Path) -> None:
    lines = command("export", trained, tmp_path / "words.safetensors").stdout.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["input", "int64"]]


@pytest.mark.needs_onnx
def test_an_exported_network_has_the_tokenizer(trained: Path, tmp_path: Path) -> None:
    import onnx

    assert "same predictions" in command("export", trained, tmp_path / "words.onnx").stdout
    about = {x.key: x.value for x in onnx.load(tmp_path / "words.onnx").metadata_props}
    assert Tokenizer(about["tokenizer"]) == model_file.load(trained).tokenizer


def test_predict_names_the_next_token(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat")
    (found,) = json.loads(command("predict", trained, tmp_path / "a.txt", "--json", "--top-k", "270").stdout)
    assert sum(x["probability"] for x in found["top"]) == pytest.approx(1)
    best = found["top"][0]["class"]
    assert best.startswith("Ġ")
    (_, line) = command("predict", trained, tmp_path / "a.txt").stdout.splitlines()
    assert f"' {best[1:]}'" in line


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tokens", "an option of a text file, found a folder of tokens"),
        ("a.csv", "an option of a text file or a folder of tokens, found a CSV file"),
    ],
)
def test_a_vocabulary_for_data_that_have_none_is_an_error(tmp_path: Path, name: str, found: str) -> None:
    write_tokens(tmp_path, words=300)
    (tmp_path / "a.csv").write_text("a,b\n1,x\n2,y\n3,x\n")
    assert error_of("new", tmp_path / name, "--tokens", "270") == f"--tokens: {found}"


@pytest.mark.parametrize("source", ["words.txt", "tokens"])
def test_the_proposed_config_trains(tmp_path: Path, source: str) -> None:
    write_tokens(tmp_path, words=300)
    tokens = ["--tokens", "270"] if source == "words.txt" else []
    proposed = command("new", tmp_path / source, *tokens).stdout
    assert "sequences of 16 tokens; 270 classes" in proposed.splitlines()[0]
    path = tmp_path / "gpt.yaml"
    path.write_text(proposed)
    cfg = config.load(path)
    kinds = [layer.kind for layer in cfg.model.layers]
    assert kinds == ["embedding", "positional_embedding", *["decoder_layer"] * 4, "layer_norm", "linear"]
    if source == "tokens":
        return
    small = [f"model.layers.{i}.decoder_layer.dim_feedforward=4" for i in range(2, 6)]
    run = tmp_path / "run"
    command(
        "train", path, "--output-dir", run, *(x for setting in ("training.steps=1", *small) for x in ("--set", setting))
    )
    files = architectures.encode(model_file.load(run), "huggingface")
    assert json.loads(b"".join(files["config.json"]))["model_type"] == "gpt2"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda about: about["tokenizer"].update(content="{}"), "found no tokenizer (Model missing"),
        (lambda about: about.update(tokenizer=None), "found metadata that do not fit the model of config.yaml"),
        (lambda about: about["classes"].reverse(), "found metadata that do not fit the model of config.yaml"),
    ],
)
def test_a_model_without_its_tokenizer_is_refused(
    trained: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    about = json.loads(header["__metadata__"]["adtrain"])
    change(about)
    header["__metadata__"]["adtrain"] = json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    error = error_of("sample", tmp_path / "run")
    assert error.startswith(f"{path}: ")
    assert expected in error


SMALL = ("--set", "model.layers=[embedding: {num_embeddings: 300, embedding_dim: 4}, linear: 300]", "--epochs", "1")


def test_the_commands_of_the_page_about_text_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    for name in ("book.txt", "other.txt", "more.txt", "books/a.txt"):
        Path(name).write_text(generated(300), encoding="utf-8")
    page = (Path(__file__).parents[1] / "docs/how-to/text.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks for line in block.splitlines() if not language]
    assert len(lines) == 8
    for line in lines:
        arguments, _, output = line.removeprefix("adtrain ").partition(" > ")
        if arguments.startswith("sample runs/letters"):
            continue  # a run on characters
        result = command(*shlex.split(arguments), *(SMALL if arguments.startswith("train") else []))
        if output:
            Path(output).write_text(result.stdout)


def test_an_evaluation_within_an_epoch_is_recorded_and_drawn(tmp_path: Path) -> None:
    settings = ("--set", "training.validate_every=7", "--set", "data.batch_size=8")
    found = command("train", write_config(tmp_path), "--output-dir", tmp_path / "run", *settings, "--verbose")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    within = [line for line in lines if line["kind"] == "validation"]
    ends = [line["step"] for line in lines if line["kind"] == "epoch"]
    assert [line["step"] for line in within] == [step for step in range(7, ends[-1], 7) if step not in ends]
    assert f"step 7: validation loss {within[0]['validation']['loss']:.4f}, perplexity " in found.stderr
    loss = record.panels(record.read(tmp_path / "run"))[0]
    (drawn,) = (curve for curve in loss.curves if curve.name == "validation")
    tokens = [line["step"] * 8 * 8 * 1e-6 for line in lines if "validation" in line]
    assert drawn.xs == pytest.approx(tokens)
    assert "million tokens" in loss.draw()
