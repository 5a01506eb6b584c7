"""Names of Keras, PyTorch and others in a config or on the command line: one hint, and no list of all names."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from command_line import command
from report_runs import one_line

from adtrain import config
from adtrain.config.habits import KEYS, NAMES, OPTIONS, key_of, option_of_optimizer
from adtrain.config.source import of_python
from adtrain.config.specs import FAMILIES, OPTIMIZERS

TEXT = """\
name: net
data: {dataset: mnist, batch_size: 8}
model: {input: [784], layers: [linear: 10]}
loss: cross_entropy
optimizer: {sgd: 0.1}
training: {epochs: 1}
"""


def problems(folder: Path, text: str) -> list[str]:
    (folder / "c.yaml").write_text(text)
    with pytest.raises(config.ConfigError) as caught:
        config.load(folder / "c.yaml")
    return [re.sub(r"^\S+: (?=\S+: )", "", line) for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("name", "lr: 0.1\nname", "lr: unknown key; did you mean optimizer.sgd.lr?"),
        ("name", "epochs: 3\nname", "epochs: unknown key; did you mean training.epochs?"),
        ("name", "batch_size: 3\nname", "batch_size: unknown key; did you mean data.batch_size?"),
        ("name", "device: gpu\nname", "device: unknown key; the command line has it: --device gpu"),
        ("epochs: 1", "epochs: 1, grad_clip: 1", "training.grad_clip: unknown key; did you mean training.clip_norm?"),
        ("epochs: 1", "epochs: 1, loss: mse", "training.loss: unknown key; did you mean loss at the top level?"),
        ("size: 8", "size: 8, shuffle: true", "data.shuffle: unknown key; the images of each epoch are always in a new "
         "random order; remove it"),
        ("size: 8", "size: 8, weight: n", "data.weight: unknown key; examples have no weights; classes have, such as "
         "loss: {cross_entropy: {weight: balanced}}"),
        ("name", "eval: {views: [flip]}\nname", "eval: unknown key; did you mean data.views?"),
        ("size: 8", "size: 8, augment: [RandomHorizontalFlip]",
         "data.augment[0]: unknown augmentation 'RandomHorizontalFlip'; did you mean flip?"),
        ("linear: 10", "Dense: 10", "model.layers[0]: unknown layer 'Dense'; did you mean linear?"),
        ("linear: 10", "Conv2D: 10", "model.layers[0]: unknown layer 'Conv2D'; did you mean conv2d?"),
        ("linear: 10", "linear: {out_features: 10, in_feature: 784}",
         "model.layers[0].linear.in_feature: unknown key; did you mean in_features?"),
        ("linear: 10", "linear: {out_features: 10, activation: relu}",
         "model.layers[0].linear.activation: unknown key; write the activation as the next layer, such as relu"),
        ("linear: 10", "rnn: {hidden_size: 10, activation: relu}",
         "model.layers[0].rnn.activation: unknown key; did you mean nonlinearity?"),
        ("linear: 10", "lstm: {hidden_size: 10, activation: tanh}",
         "model.layers[0].lstm.activation: unknown key; gates have a sigmoid, states tanh; remove it"),
        ("linear: 10", "gru: {hidden_size: 10, units: 10}",
         "model.layers[0].gru.units: unknown key; did you mean hidden_size?"),
        ("linear: 10", "gru: {hidden_size: 10, return_sequences: true}",
         "model.layers[0].gru.return_sequences: unknown key; write output: all for the states of all steps, "
         "and nothing for the last one"),
        ("linear: 10", "embedding: {num_embeddings: 4, embedding_dim: 2, input_dim: 4}",
         "model.layers[0].embedding.input_dim: unknown key; did you mean num_embeddings?"),
        ("linear: 10", "multihead_attention: {num_heads: 4, key_dim: 2}",
         "model.layers[0].multihead_attention.key_dim: unknown key; the width of a head follows; remove it"),
        ("linear: 10", "Bidirectional: {gru: 10}",
         "model.layers[0]: unknown layer 'Bidirectional'; write bidirectional: true in rnn, lstm or gru"),
        ("linear: 10", "relu 6", "model.layers[0]: unknown layer 'relu 6'; did you mean relu: 6?"),
        ("linear: 10", "decoder_layer: {num_heads: 4, rope_theta: 10000}",
         "model.layers[0].decoder_layer.rope_theta: unknown key; did you mean rotary_base?"),
        ("linear: 10", "decoder_layer: {num_heads: 4, sliding_window: 8}",
         "model.layers[0].decoder_layer.sliding_window: unknown key; did you mean window?"),
        ("linear: 10", "linear: {out_features: 10, tie_weights: true}",
         "model.layers[0].linear.tie_weights: unknown key; did you mean tied?"),
        ("linear: 10", "relu2", "model.layers[0]: unknown layer 'relu2'; did you mean squared_relu?"),
        ("linear: 10", "patch_embedding: 4",
         "model.layers[0]: unknown layer 'patch_embedding'; did you mean patches?"),
        ("{sgd: 0.1}", "{sgd: {lr: 0.1, learning_rate: 0.1}}",
         "optimizer.sgd.learning_rate: unknown key; did you mean lr?"),
        ("{sgd: 0.1}", "{lr: 0.1}",
         "optimizer: found the option lr, expected the name of the optimizer before it; write for example "
         "optimizer.sgd.lr"),
        ("{sgd: 0.1}", "{name: sgd, lr: 0.1}", "optimizer: found a mapping with name, lr, expected one optimizer; the "
         "name is the key: write {sgd: {lr: ...}}"),
        ("cross_entropy", "{type: cross_entropy}",
         "loss: unknown loss 'type'; the name is the key: write cross_entropy"),
        ("linear: 10", "{type: linear, out_features: 10}", "model.layers[0]: found a mapping with type, out_features, "
         "expected one layer; the name is the key: write {linear: {out_features: ...}}"),
        ("cross_entropy", "CrossEntropyLoss", "loss: unknown loss 'CrossEntropyLoss'; did you mean cross_entropy?"),
    ],
)  # fmt: skip
def test_a_foreign_name_gets_one_hint(tmp_path: Path, old: str, new: str, hint: str) -> None:
    assert problems(tmp_path, TEXT.replace(old, new, 1)) == [hint]


def test_every_hint_names_something_that_exists() -> None:
    for name, key in KEYS.items():
        section, *rest = key.replace("NAME", "adam").split(".")
        assert section in config.Config.model_fields, name
        assert not rest or (key_of(rest[-1]) or option_of_optimizer(rest[-1])) == key.replace("NAME", "adam"), name
    kinds = {kind for family in FAMILIES.values() for kind in family}
    options = {option for family in FAMILIES.values() for spec in family.values() for option in spec.model_fields}
    assert set(NAMES.values()) <= kinds
    assert {option for names in OPTIONS.values() for option in names} <= options
    for name in OPTIMIZERS:
        assert option_of_optimizer("lr", of_python({"optimizer": name}, "config")) == f"optimizer.{name}.lr"


def test_a_list_of_known_names_is_printed_once(tmp_path: Path) -> None:
    found = problems(tmp_path, TEXT.replace("[linear: 10]", "[qqqq, wwww, lineer: 3, zzzz]"))
    assert [line.partition(", conv2d")[0] for line in found] == [
        "model.layers[0]: unknown layer 'qqqq'; known: linear",
        "model.layers[1]: unknown layer 'wwww'",
        "model.layers[2]: unknown layer 'lineer'; did you mean linear?",
        "model.layers[3]: unknown layer 'zzzz'",
    ]


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--lr=0.1", "--set optimizer.adam.lr=VALUE for the optimizer adam"),
        ("--batch-size=8", "--set data.batch_size=VALUE"),
        ("--gpu", "the command line has it: --device gpu"),
    ],
)
def test_an_option_that_is_a_key_of_the_config_gets_a_hint(option: str, hint: str) -> None:
    message = one_line(command("train", "mlp", option, expect=2))
    assert message.startswith(f"No such option {option.partition('=')[0]!r}; ")
    assert hint in message


@pytest.mark.parametrize("words", [("new", "mnist"), ("data", "inspect", "mnist")])
def test_commands_on_data_propose_keys_that_they_take(words: tuple[str, ...]) -> None:
    for option, hint in (
        ("--validation", ": --set data.validation=VALUE"),
        ("--epochs", ", but not of its data: adtrain train CONFIG --set training.epochs=VALUE"),
    ):
        assert f"it is a key of the config{hint}" in one_line(command(*words, option, "0.5", expect=2))
    assert command("data", "inspect", "mnist", "--set", "data.validation=0.5").exit_code == 0


@pytest.mark.parametrize(
    ("layers", "loss", "warned"),
    [
        ("[linear: 10, softmax]", "cross_entropy", True),
        ("[linear: 10, softmax, linear: 10]", "cross_entropy", False),
        ("[linear: 10, log_softmax]", "nll", False),
        ("[linear: 10, sigmoid]", "binary_cross_entropy_with_logits", True),
    ],
)
def test_a_last_layer_that_the_loss_applies_itself_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layers: str, loss: str, warned: bool
) -> None:
    (tmp_path / "c.yaml").write_text(TEXT.replace("[linear: 10]", layers).replace("cross_entropy", loss))
    with caplog.at_level(logging.WARNING):
        config.load(tmp_path / "c.yaml")
    assert ["remove this layer" in message for message in caplog.messages] == [True] * warned
