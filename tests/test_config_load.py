from __future__ import annotations

import errno
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from config_files import FULL, load, problems, small
from hypothesis import given
from hypothesis import strategies as st

from adtrain import config

NETWORK = small("flatten", "linear: 10")
POSITIVE = "expected an integer in [1, 2^31)"
POSITIVE_NUMBER = "a number in (0, 3.4e38]"
LOSSES = "cross_entropy, nll, mse, l1, huber, binary_cross_entropy_with_logits, equations"
PACKAGED = (
    "burgers, char-gpt, cifar-94, cifar-96, cifar-small, cnn, field, gpt-shakespeare, inverse-heat, lenet5, "
    "lenet5-augmented, lstm, mlp, mlp-small, mnist-99, navier-stokes, poisson, resnet, resnet18, schroedinger, "
    "sdf, smoke, vit, wave"
)
NO_PAIR = "found no key=value, expected one such as training.epochs=3"
TRAINING = (
    "epochs, steps, seed, precision, clip_norm, clip_value, micro_batch, average, init_from, init_partial, "
    "names, checkpoint_every, validate_every, best_by, final_model, metrics, early_stopping"
)


def test_options_in_long_form_are_read(tmp_path: Path) -> None:
    cfg = load(tmp_path, FULL)
    assert (cfg.name, cfg.data.model_dump()["dataset"], cfg.data.batch_size) == ("mnist-cnn", "mnist", 128)
    assert cfg.model.input == (1, 28, 28)
    assert cfg.model.layers[0].options()["out_channels"] == 32
    assert cfg.loss.options() == {"label_smoothing": 0.1, "weight": None}
    assert cfg.schedule.options() == {"final": 0.0, "warmup_epochs": 1.0, "warmup_steps": 0}
    assert cfg.source.path == tmp_path / "c.yaml"


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("relu", "relu: {}"),
        ("relu:", "relu: {}"),
        ("linear: 3", "linear: {out_features: 3}"),
        ("max_pool2d: 2", "max_pool2d: {kernel_size: 2}"),
        ("max_pool2d: [2, 3]", "max_pool2d: {kernel_size: [2, 3]}"),
        ("dropout: 0.25", "dropout: {p: 0.25}"),
        ("leaky_relu: 1", "leaky_relu: {negative_slope: 1.0}"),
        ("reshape: [6, -1]", "reshape: {shape: [6, -1]}"),
        ("residual: [relu]", "residual: {body: [relu]}"),
        ("concat: [[relu], [tanh]]", "concat: {branches: [[relu: null], [tanh]]}"),
    ],
)
def test_a_short_form_equals_its_long_form(tmp_path: Path, short: str, long: str) -> None:
    layers = ("flatten", "linear: 10")
    assert load(tmp_path, small(short, *layers)) == load(tmp_path, small(long, *layers))


def test_missing_keys_have_their_defaults(tmp_path: Path) -> None:
    cfg = load(tmp_path, NETWORK)
    assert cfg.schedule.kind == "constant"
    assert (cfg.data.validation, cfg.data.normalize) == (0.0, True)
    assert (cfg.training.seed, cfg.training.precision, cfg.training.steps) == (0, "float32", None)
    assert cfg.optimizer.options()["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("small", "../x", "1:7: name: found '../x', expected a name of at most 100 bytes: letters, digits, '.', "
         "'_', '-' and spaces, a letter or digit first"),
        ("size: 8", "size: 0", f"2:36: data.batch_size: found 0, {POSITIVE}"),
        ("size: 8", "size: 8.0", f"2:36: data.batch_size: found 8.0, {POSITIVE}"),
        ("size: 8", "size: true", f"2:36: data.batch_size: found true, {POSITIVE}"),
        ("size: 8", "size: 2147483648", f"2:36: data.batch_size: found 2147483648, {POSITIVE}"),
        ("dataset: mnist", "dataset: mnist, path: x", "2:1: data: found a mapping with dataset, path, batch_size, "
         "expected only one of dataset and path (null for the other)"),
        ("dataset: mnist, ", "", "2:1: data: found a mapping with batch_size, expected either dataset or path"),
        ("epochs: 1", "epochs: 1, early_stopping: 3", "10:39: training.early_stopping: found 3, expected a mapping "
         "such as {patience: 5}"),
        ("{dataset: mnist, batch_size: 8}", "mnist", "2:7: data: found 'mnist', expected a mapping such as "
         "{dataset: mnist, batch_size: 128}"),
        ("size: 8", "size: 8, validation: 1", "2:51: data.validation: found 1, expected a number in [0, 1)"),
        ("dataset: mnist", "path: x, test: 0.1, test_path: y", "2:1: data: found a mapping with path, test, test_path, "
         "batch_size, expected at most one of test and test_path"),
        ("size: 8", "size: 8, label: 1.5", "2:46: data.label: found 1.5, expected the name of a column, or its number"),
        ("size: 8", "size: 8, channels: 2", "2:49: data.channels: found 2, expected 1 or 3"),
        ("size: 8", "size: 8, shape: [28, 28]", "2:39: data.shape: found [28, 28], expected a list of channels, height "
         "and width"),
        ("size: 8", "size: 8, normalize: yes", "2:50: data.normalize: found 'yes', expected true or false"),
        ("[1, 6, 6]", "[1, -6, 6]", "4:3: model.input: found [1, -6, 6], "
         "expected a list of 1 or more integers in [1, 2^31), or of variables such as [t, x]"),
        ("[1, 6, 6]", "36", "4:10: model.input: found 36, "
         "expected a list of 1 or more integers in [1, 2^31), or of variables such as [t, x]"),
        ("linear: 10", "linear: '10'", f"7:15: model.layers[1].linear.out_features: found '10', {POSITIVE}"),
        ("linear: 10", "linear:", f"7:7: model.layers[1].linear.out_features: missing, {POSITIVE}"),
        ("linear: 10", "linear:\n      bias: true", "7:7: model.layers[1]: found a mapping with linear, bias, "
         "expected one layer, its options indented below its name"),
        ("flatten", "flatten: 3", "6:16: model.layers[0].flatten: found 3, expected no options"),
        ("flatten", "dropout: 1", "6:16: model.layers[0].dropout.p: found 1, expected a number in [0, 1)"),
        ("flatten", "gelu: tan", "6:13: model.layers[0].gelu.approximate: found 'tan', expected one of none, tanh"),
        ("flatten", "softmax: {x: 1}", "6:17: model.layers[0].softmax.x: unknown key; known: dim"),
        ("flatten", "add: [[{relu: {x: 1}}]]", "6:22: model.layers[0].add.branches[0][0].relu.x: "
         "unknown key; known: none"),
        ("flatten", "residual: []", "6:7: model.layers[0].residual.body: found [], expected a list that is not empty"),
        ("flatten", "add: [relu]", "6:13: model.layers[0].add.branches[0]: found 'relu', expected a list"),
        ("loss: cross_entropy", "loss: crossentropy", "8:7: loss: unknown loss 'crossentropy'; "
         "did you mean cross_entropy?"),
        ("loss: cross_entropy", "loss: 3", f"8:7: loss: found 3, expected one loss; known: {LOSSES}"),
        ("loss: cross_entropy\n", "",
         "1:1: loss: missing, expected a loss, such as cross_entropy, or a list of equations"),
        ("adam", "{adam: {lr: .nan}}", f"9:24: optimizer.adam.lr: found nan, expected {POSITIVE_NUMBER}"),
        ("adam", "{adam: -1e-3}", f"9:19: optimizer.adam.lr: found -0.001, expected {POSITIVE_NUMBER}"),
        ("adam", "{adam: {betas: [0, 1]}}", "9:20: optimizer.adam.betas: found [0, 1], "
         "expected a list of 2 numbers in [0, 1)"),
        ("adam", "sgd", f"9:1: optimizer.sgd.lr: missing, expected {POSITIVE_NUMBER}"),
        ("adam", "{Adam: {}}", "9:13: optimizer: unknown optimizer 'Adam'; did you mean adam?"),
        ("adam", "{adam: , sgd: }", "9:1: optimizer: found a mapping with adam, sgd, expected one optimizer"),
        ("epochs: 1", "seed: 1", "10:1: training: found a mapping with seed, expected a number for epochs or steps"),
        ("epochs: 1", "epochs: 1e3", f"10:20: training.epochs: found 1000.0, {POSITIVE}"),
        ("epochs: 1", "epochs: 1, seed: -1", "10:29: training.seed: found -1, expected an integer in [0, 2^64)"),
        ("epochs: 1", "epochs: 1, precision: half", "10:34: training.precision: found 'half', "
         "expected one of float32, tf32, bfloat16, float64"),
        ("epochs: 1", "epochs: 1, clip_norm: 1, clip_value: 1", "10:1: training: found a mapping with epochs, "
         "clip_norm, clip_value, expected at most one of clip_norm and clip_value"),
        ("epochs: 1", 'epochs: 1, "a\\nb": 1', f"10:23: training.'a\\nb': unknown key; known: {TRAINING}"),
        ("training:", "schedule: {multistep: [-1]}\ntraining:", "10:12: schedule.multistep.milestones: found [-1], "
         "expected a list of 1 or more numbers in (0, 2^31)"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_value_names_its_position_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert NETWORK.count(old) == 1
    assert problems(tmp_path, NETWORK.replace(old, new)) == [f"c.yaml:{message}"]


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = small("flatten", "linera: 10").replace("batch_size: 8", "batch: 8")
    text = text.replace("epochs: 1", "epochs: 0, epochs: 2")
    found = problems(tmp_path, text)
    assert [re.sub(r"; .*|, .*", "", line) for line in found] == [
        "c.yaml:10:23: found the key epochs twice",
        "c.yaml:2:24: data.batch: unknown key",
        "c.yaml:7:7: model.layers[1]: unknown layer 'linera'",
        "c.yaml:10:20: training.epochs: found 0",
    ]


def test_a_message_lists_at_most_30_problems(tmp_path: Path) -> None:
    found = problems(tmp_path, small(*["rellu"] * 100))
    assert len(found) == 31
    assert found[-1] == "... and 70 more problems"


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["training.epochs=3"], "training.epochs", 3),
        (["training.epochs=3", "training.epochs=4"], "training.epochs", 4),
        (["training.steps=5"], "training.steps", 5),
        (["training={epochs: 7}"], "training.epochs", 7),
        (["model.layers.1.linear.out_features=5"], "model.layers.1.out_features", 5),
        (["model.layers[1].linear=6"], "model.layers.1.out_features", 6),
        (["model.layers.1.linear.bias=false"], "model.layers.1.bias", False),
        (["model.layers.1.linear.bias=false"], "model.layers.1.out_features", 10),
        (["model.layers.0=linear: 4", "model.input=[4]"], "model.layers.0.kind", "linear"),
        (["optimizer.adam.lr=1e-2"], "optimizer.lr", 0.01),
        (["optimizer.sgd.lr=0.5", "optimizer.sgd.momentum=0.9"], "optimizer.momentum", 0.9),
        (["optimizer=sgd: 0.5"], "optimizer.lr", 0.5),
        (["loss.cross_entropy.label_smoothing=0.1"], "loss.label_smoothing", 0.1),
        (["schedule.cosine.warmup_epochs=1"], "schedule.warmup_epochs", 1.0),
        (["data.path=images"], "data.dataset", None),
        (["data.path=images", "data.dataset=cifar-10"], "data.path", None),
        (["data.path=images", "data.path=null", "data.dataset=mnist"], "data.path", None),
        (["data.path=null"], "data.dataset.kind", "mnist"),
    ],
)
def test_overrides_set_values_by_dotted_key(tmp_path: Path, overrides: list[str], path: str, value: object) -> None:
    found: object = load(tmp_path, NETWORK, *overrides)
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epoch=3", "--set training.epoch: unknown key; did you mean epochs?"),
        ("model.layers.1.linear.outs=3", "--set model.layers.1.linear.outs: model.layers[1].linear.outs: unknown key; "
         "known: out_features, bias, in_features, weight_init, init_gain, tied"),
        ("model.layers.1.conv2d.outs=3", "c.yaml:7:7: model.layers[1]: found a mapping with "
         "linear, conv2d, expected one layer"),
        ("training.precision.x=1", "--set training.precision.x: training.precision: found a mapping with x, "
         "expected one of float32, tf32, bfloat16, float64"),
        ("data.augment.0.crop.pading=1", "--set data.augment.0.crop.pading: data.augment: found a mapping with 0, "
         "expected a list"),
        ("optimizer.adam.lrr=1", "--set optimizer.adam.lrr: unknown key; did you mean lr?"),
        ("training.epochs=three", f"--set training.epochs: found 'three', {POSITIVE}"),
        ("model.layers.1.linear.out_features=-1", "--set model.layers.1.linear.out_features: "
         f"model.layers[1].linear.out_features: found -1, {POSITIVE}"),
        ("model.layers.2.linear=3", "--set model.layers.2.linear: found the index 2, expected one from 0 to 1"),
        ("name.x=3", "--set name.x: found 'small' at name, which has no x"),
        ("training.epochs=", "--set training.epochs: found no value after the =, expected one (null for none)"),
        ("training.epochs=[1", f"--set training.epochs: found '[1', {POSITIVE}"),
        ("training.epochs", f"--set 'training.epochs': {NO_PAIR}"),
        ("training..epochs=3", f"--set 'training..epochs=3': {NO_PAIR}"),
        ("nonsense", f"--set nonsense: {NO_PAIR}"),
        ("", f"--set '': {NO_PAIR}"),
        ("optimizer=sgd", f"--set optimizer: optimizer.sgd.lr: missing, expected {POSITIVE_NUMBER}"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_override_names_it(tmp_path: Path, override: str, message: str) -> None:
    assert problems(tmp_path, NETWORK, override) == [message]


def test_an_override_changes_only_one_of_two_aliases(tmp_path: Path) -> None:
    text = small("flatten", "&wide {linear: 10}", "*wide")
    layers = load(tmp_path, text, "model.layers.1.linear.out_features=20").model.layers
    assert [layer.options()["out_features"] for layer in layers[1:]] == [20, 10]


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("mlp", "mlp"), ("net v1.2", "net v1.2"), ("größe", "größe"), ("gro\u0308ße", "größe"), ("数字", "数字"),
        ("net (1)", "net-1"), ("_draft", "draft"), ("a+b", "a-b"), ("a & b", "a-b"), ("-x", "x"), (" x ", "x"),
        ("\u202etxt", "txt"), ("a\nb", "a-b"), ("+", "run"), ("a" * 200, "a" * 100), ("ß" * 60, "ß" * 50),
        ("\udcff9", "9"), ("#1", "1"), ("x*", "x"),
    ],
)  # fmt: skip
def test_any_file_name_gives_a_job_its_name(tmp_path: Path, stem: str, name: str) -> None:
    path = tmp_path / f"{stem}.yaml"
    path.write_text(NETWORK.replace("name: small\n", ""))
    cfg = config.load(path)
    assert cfg.name == name
    path.write_text(config.dump(cfg))
    assert config.load(path) == cfg


@pytest.mark.parametrize("name", ["", "-a", ".a", "a/b", "a\nb", "a\u202eb", "a\u00a0b", "a+b", "a" * 101, "ß" * 51])
def test_an_invalid_name_in_a_config_is_an_error(tmp_path: Path, name: str) -> None:
    (message,) = problems(tmp_path, NETWORK.replace("small", json.dumps(name)))
    assert "expected a name of at most 100 bytes" in message


def test_a_dumped_config_loads_to_an_equal_one(tmp_path: Path) -> None:
    for text in (FULL, NETWORK.replace("name: small", "name: '1e3'").replace("adam", "{adam: {lr: 1.0e-7}}")):
        cfg = load(tmp_path, text)
        dumped = config.dump(cfg)
        assert load(tmp_path, dumped) == cfg
        assert config.dump(load(tmp_path, dumped)) == dumped


def test_a_dumped_config_has_letters_of_every_script_as_they_are(tmp_path: Path) -> None:
    cfg = load(tmp_path, NETWORK, "data.dataset=null", "data.path=größe 宽度.csv", "data.label=gekündigt")
    assert "path: größe 宽度.csv, test: 0.0, label: gekündigt," in config.dump(cfg)
    assert load(tmp_path, config.dump(cfg)) == cfg


def test_configs_with_different_values_are_not_equal(tmp_path: Path) -> None:
    assert load(tmp_path, NETWORK) != load(tmp_path, NETWORK, "model.layers.1.linear.out_features=11")


def test_packaged_configs_load_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ", ".join(config.packaged()) == PACKAGED
    for name in config.packaged():
        assert config.load(name).name == name


def test_a_file_but_not_a_folder_has_precedence_over_a_packaged_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp").mkdir()
    assert config.load("mlp").name == "mlp"
    (tmp_path / "cnn").write_text(NETWORK)
    assert config.load("cnn").name == "small"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mpl", "mpl: neither a file nor a packaged config; did you mean mlp?"),
        ("configs/lenet5.yaml", "configs/lenet5.yaml: neither a file nor a packaged config; did you mean lenet5?"),
        ("runs/nothing", "runs/nothing: found nothing, expected a YAML file or the folder of a run; "
         "runs in runs: runs/first, runs/second"),
        ("else/nothing", "else/nothing: found nothing, expected a YAML file or the folder of a run; "
         "runs in else: none"),
        ("nothing-like-it", f"nothing-like-it: neither a file nor a packaged config; packaged: {PACKAGED}"),
        ("", f"'': neither a file nor a packaged config; packaged: {PACKAGED}"),
        (".", ".: found a folder without config.yaml, expected a YAML file or the folder of a run; "
         "adtrain new . prints a config for data"),
        ("my rows.csv", "my rows.csv: found data, expected a YAML file; "
         "adtrain new 'my rows.csv' prints a config for data"),
    ],
)  # fmt: skip
def test_the_error_of_a_missing_config_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my rows.csv").touch()
    for run in ("first", "second"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "config.yaml").touch()
    with pytest.raises(config.ConfigError) as caught:
        config.load(name)
    assert str(caught.value) == message


def test_a_file_of_50_mb_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with path.open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(config.ConfigError, match="found more than 1,048,576 bytes"):
        config.load(path)


def test_the_error_of_an_unreadable_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("adtrain.config.files.open_regular", denied)
    assert problems(tmp_path, NETWORK) == ["c.yaml: cannot be read: Permission denied"]


FRAGMENTS = [
    *("relu", "[", "]", "{", "}", ":", "- ", "\n", " ", "\t", "null", "true", "-1", "0", "1e99", ".nan", "'", '"'),
    *("&a", "*a"),
    *("!!int", "residual:", "concat:", "linear", "|", ">", "%", "#", "?", "~", "<<:", "embedding", "same", "reshape:"),
    *("group_norm:", "softmax:", "padding: same", "stride: 2", "\x00", "\u2028", "9" * 30),
]


@given(st.integers(0, 2**32 - 1))
def test_a_mangled_config_loads_or_raises_config_error(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    choose = random.Random(seed)
    text = FULL
    for _ in range(choose.randint(1, 6)):
        position, other = sorted(choose.choices(range(len(text)), k=2))
        inserted = choose.choice([choose.choice(FRAGMENTS), "", text[other : other + choose.randint(1, 40)]])
        text = text[:position] + inserted + text[position + choose.choice([0, 0, 1, 8]) :]
    path = tmp_path_factory.getbasetemp() / "mangled.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        cfg = config.load(path)
    except config.ConfigError as error:
        for problem in error.problems:
            line = str(problem)
            assert line.startswith(str(path))
            assert len(line.splitlines()) == 1
            assert "pydantic" not in line
    else:
        config.build.model(cfg)


def test_a_config_of_python_values_equals_that_of_a_file(tmp_path: Path) -> None:
    cfg = load(tmp_path, FULL)
    values = cfg.model_dump(mode="python")
    assert config.from_values(values) == config.from_values(cfg.model_dump(mode="json", exclude_none=True)) == cfg


@given(st.sampled_from(sorted(PACKAGED.split(", "))), st.integers(1, 9), st.floats(1e-4, 1))
def test_overrides_by_value_equal_those_by_text(name: str, epochs: int, lr: float) -> None:
    values = {"training.epochs": np.int64(epochs), "optimizer": {"sgd": {"lr": lr, "momentum": np.float64(0.5)}}}
    texts = [f"training.epochs={epochs}", f"optimizer={{sgd: {{lr: {lr!r}, momentum: 0.5}}}}"]
    assert config.load(name, values) == config.load(name, texts)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.epochs", "3", "overrides: training.epochs: found '3', expected an integer in [1, 2^31)"),
        ("training.epocs", 3, "overrides: training.epocs: unknown key; did you mean epochs?"),
        ("training.seed", {1}, "overrides: training.seed: found an object of type set, expected a number, string, "),
        ("training", {3: 4}, "overrides: training: found the key 3, expected a string"),
        ("training..seed", 3, "overrides: found the key 'training..seed', expected one such as training.epochs"),
        (3, 3, "overrides: found the key 3, expected one such as training.epochs"),
        ("name", "\udc80", r"overrides: name: found '\udc80', expected text in UTF-8"),
    ],
)
def test_a_wrong_override_by_value_is_one_line(key: str, value: object, message: str) -> None:
    with pytest.raises(config.ConfigError) as error:
        config.load("mlp", {key: value})
    (line,) = error.value.lines
    assert line.startswith(message)


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(config.ConfigError, match="found more than 64 levels, expected fewer"):
        config.from_values({"model": endless})
