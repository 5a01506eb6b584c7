"""Weights and networks of transformers and torchvision: names, config.json, export, and what does not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import command
from random_networks import with_arrays
from report_runs import one_line
from safetensors.numpy import load_file, save_file

import adtrain as ad
from adtrain import config, nn, training
from adtrain.core.errors import AdtrainError
from adtrain.data import tokenizer
from adtrain.export import architectures
from adtrain.training import TrainedModel, names, tensor_file

pytestmark = pytest.mark.unfused

GPT2 = {"model_type": "gpt2", "vocab_size": 37, "n_positions": 8, "n_embd": 12, "n_layer": 1, "n_head": 3}
LLAMA = {
    "model_type": "llama", "vocab_size": 37, "hidden_size": 16, "intermediate_size": 10, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 3}
QWEN3 = {**LLAMA, "model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 4}
VIT = {
    "model_type": "vit", "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 10,
    "image_size": 8, "patch_size": 4, "num_channels": 3, "id2label": {"0": "one", "1": "two"},
}  # fmt: skip
OF_TRANSFORMERS: dict[str, Mapping[str, Any]] = {
    "gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen3": QWEN3, "vit": VIT
}  # fmt: skip

LAYER_OF_LLAMA = {
    "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,), "mlp.gate_proj.weight": (10, 16),
    "mlp.up_proj.weight": (10, 16), "mlp.down_proj.weight": (16, 10), "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16), "self_attn.v_proj.weight": (8, 16), "self_attn.o_proj.weight": (16, 16),
}  # fmt: skip
SHAPES: dict[str, dict[str, nn.Shape]] = {
    "gpt2": {
        "transformer.wte.weight": (37, 12), "transformer.wpe.weight": (8, 12), "transformer.ln_f.weight": (12,),
        "transformer.ln_f.bias": (12,), **{
            f"transformer.h.0.{name}": shape for name, shape in {
                "ln_1.weight": (12,), "ln_1.bias": (12,), "attn.c_attn.weight": (12, 36), "attn.c_attn.bias": (36,),
                "attn.c_proj.weight": (12, 12), "attn.c_proj.bias": (12,), "ln_2.weight": (12,), "ln_2.bias": (12,),
                "mlp.c_fc.weight": (12, 48), "mlp.c_fc.bias": (48,), "mlp.c_proj.weight": (48, 12),
                "mlp.c_proj.bias": (12,),
            }.items()
        },
    },
    "llama": {
        "model.embed_tokens.weight": (37, 16), "model.norm.weight": (16,), "lm_head.weight": (37, 16),
        **{f"model.layers.0.{name}": shape for name, shape in LAYER_OF_LLAMA.items()},
    },
    "vit": {
        "vit.embeddings.cls_token": (1, 1, 12), "vit.embeddings.position_embeddings": (1, 5, 12),
        "vit.embeddings.patch_embeddings.projection.weight": (12, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": (12,), "vit.layernorm.weight": (12,),
        "vit.layernorm.bias": (12,), "classifier.weight": (2, 12), "classifier.bias": (2,), **{
            f"vit.encoder.layer.0.{name}.{kind}": shape if kind == "weight" else shape[:1] for name, shape in {
                "layernorm_before": (12,), "layernorm_after": (12,), "attention.attention.query": (12, 12),
                "attention.attention.key": (12, 12), "attention.attention.value": (12, 12),
                "attention.output.dense": (12, 12), "intermediate.dense": (10, 12), "output.dense": (12, 10),
            }.items() for kind in ("weight", "bias")
        },
    },
}  # fmt: skip
"""The arrays of the packages' files."""


def described(values: Mapping[str, Any]) -> architectures.Architecture:
    return architectures._read(architectures.Settings(values, "config.json"))


def with_weights(values: Mapping[str, Any]) -> TrainedModel:
    """A network that a config.json describes, with random weights."""
    found = described(values)
    return with_arrays(found.model(), found.input or (found.length,), scale=255.0 if found.input else 1.0)


def write(trained: TrainedModel, folder: Path, program: str = "huggingface") -> Path:
    folder.mkdir(exist_ok=True)
    for name, parts in architectures.encode(trained, program).items():
        (folder / name).write_bytes(b"".join(parts))
    return folder


def read(path: Path, table: Any, model: nn.Sequential, shape: nn.Shape, partial: bool = False) -> dict[str, np.ndarray]:
    params, statistics = model.init(shape)
    expected = tensor_file.named(params, statistics)
    return names.read(path, names.table_of(table), model, expected, partial)


def arrays_of(trained: TrainedModel) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in tensor_file.named(trained.params, trained.statistics).items()}


def outputs(trained: TrainedModel, x: np.ndarray) -> np.ndarray:
    mode = nn.Mode(training=False)
    y, _ = trained.network.model.forward(trained.params, trained.statistics, ad.array(x), mode)
    found: np.ndarray = y.numpy()
    return found


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_an_exported_folder_has_the_packages_arrays_and_gives_the_same_network(tmp_path: Path, kind: str) -> None:
    trained = with_weights(OF_TRANSFORMERS[kind])
    folder = write(trained, tmp_path / "out")
    if kind == "vit":
        normalization = json.loads((folder / "preprocessor_config.json").read_text())
        network = trained.network
        assert normalization["image_mean"] == list(network.mean)
        assert normalization["image_std"] == list(network.std)
        assert normalization["rescale_factor"] == 1 / 255
    if kind in SHAPES:
        assert {name: x.shape for name, x in load_file(folder / "model.safetensors").items()} == SHAPES[kind]
    found = architectures.read(folder)
    assert [x for x in found.model().layers if not isinstance(x, nn.Dropout)] == [
        x for x in trained.network.model.layers if not isinstance(x, nn.Dropout)
    ]
    shape = trained.network.input_shape
    assert_equal(read(folder, found.names, trained.network.model, shape), arrays_of(trained))


@pytest.mark.exhaustive  # the import of the package takes seconds
@pytest.mark.needs_transformers
@pytest.mark.filterwarnings("ignore")  # of the package, at import
@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_logits_equal_those_of_transformers_both_ways(tmp_path: Path, kind: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    values = dict(OF_TRANSFORMERS[kind])
    values = {"n_layer": 2, **values} if kind == "gpt2" else {**values, "num_hidden_layers": 2}
    given = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    of_images = kind == "vit"
    auto = transformers.AutoModelForImageClassification if of_images else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    theirs = auto.from_config(given).eval()
    with torch.no_grad():
        for x in theirs.parameters():
            x.add_(torch.randn_like(x) * 0.1)  # biases are 0, and weights of norms 1
    theirs.save_pretrained(tmp_path / "theirs")

    found = architectures.read(tmp_path / "theirs")
    shape = found.input or (found.length,)
    trained = with_arrays(found.model(), shape)
    arrays = read(tmp_path / "theirs", found.names, trained.network.model, shape)
    params, statistics = tensor_file.replaced(trained.params, trained.statistics, arrays)
    trained = TrainedModel(trained.config, trained.network, params, statistics, ("one", "two"), trained.image_shape)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *shape)).astype(np.float32) if of_images else rng.integers(0, 37, (2, *shape))
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).logits.numpy()
    np.testing.assert_allclose(outputs(trained, x), expected, rtol=1e-5, atol=1e-5)

    again, info = auto.from_pretrained(write(trained, tmp_path / "mine"), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    with torch.no_grad():
        np.testing.assert_allclose(again.eval()(torch.tensor(x)).logits.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.needs_torchvision
@pytest.mark.parametrize("kind", ["resnet18", "resnet50", "vit_torchvision"])
def test_logits_equal_those_of_torchvision(tmp_path: Path, kind: str) -> None:
    torch, torchvision = pytest.importorskip("torch"), pytest.importorskip("torchvision")
    values = {"model_type": kind, "num_labels": 2, "image_size": 64}
    if kind == "vit_torchvision":
        values = {**VIT, "model_type": kind, "layer_norm_eps": 1e-6}
        theirs = torchvision.models.VisionTransformer(8, 4, 1, 3, 12, 10, num_classes=2).eval()
        torch.nn.init.normal_(theirs.heads.head.weight)
    else:
        theirs = getattr(torchvision.models, kind)(num_classes=2).eval()
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 1.5)
    save_file({name: x.numpy() for name, x in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    found = described(values)
    trained = with_arrays(found.model(), found.input)
    arrays = read(tmp_path, kind, found.model(), found.input)
    trees = tensor_file.replaced(trained.params, trained.statistics, arrays)
    trained = TrainedModel(trained.config, trained.network, *trees, ("one", "two"), trained.image_shape)
    x = np.random.default_rng(0).normal(size=(2, *found.input)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    np.testing.assert_allclose(outputs(trained, x), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    exported = load_file(write(trained, tmp_path / "out", "torchvision") / "model.safetensors")
    theirs.load_state_dict({name: torch.tensor(x) for name, x in exported.items()})


def narrow(layers: list[Any]) -> list[Any]:
    """The layers of a ResNet with few channels."""
    text = json.dumps(layers)
    for channels in (64, 128, 256, 512, 1024, 2048):
        text = text.replace(f'"out_channels": {channels},', f'"out_channels": {channels // 32},')
    return json.loads(text)


@pytest.mark.parametrize(("kind", "blocks", "parts"), [("resnet18", (2, 2, 2, 2), 2), ("resnet50", (3, 4, 6, 3), 3)])
def test_a_resnet_has_torchvisions_names(kind: str, blocks: tuple[int, ...], parts: int) -> None:
    found = described({"model_type": kind, "num_labels": 2, "image_size": 32})
    found = architectures.Architecture(kind, narrow(found.layers), found.input)
    trained = with_arrays(found.model(), found.input)
    written = names.written(names.TABLES[kind], found.model(), found.input, arrays_of(trained))
    norm = {"weight", "bias", "running_mean", "running_var"}
    expected = {"conv1.weight", "fc.weight", "fc.bias", *(f"bn1.{name}" for name in norm)}
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            inside = f"layer{stage}.{block}"
            for n in range(1, parts + 1):
                expected |= {f"{inside}.conv{n}.weight", *(f"{inside}.bn{n}.{name}" for name in norm)}
            if block == 0 and (stage > 1 or kind == "resnet50"):
                expected |= {f"{inside}.downsample.0.weight", *(f"{inside}.downsample.1.{name}" for name in norm)}
    assert written.keys() == expected


def test_a_table_of_the_config_has_numbers_texts_lists_and_changes(tmp_path: Path) -> None:
    """By positions, {i+1}, and by kinds, decoder_layer{i}."""
    model = nn.Sequential(
        nn.Embedding(5, embedding_dim=4), *[nn.DecoderLayer(2, dim_feedforward=3) for _ in range(2)], nn.Linear(5)
    )
    trained = with_arrays(model, (3,))
    mine = arrays_of(trained)
    rows = {
        "0.weight": "tokens reshaped",
        "{i+1}.norm1.*": "blocks.{i}.first.*",
        "decoder_layer{i}.self_attn.in_proj_weight": ["b{i+5}.q", "b{i+5}.k", "b{i+5}.v"],
        "{i+1}.linear1.weight": "up_{i} transposed",
        "*": "rest.*",
    }
    theirs = {"tokens": mine["0.weight"].reshape(20)}
    for at, x in mine.items():
        position, _, rest = at.partition(".")
        i = int(position) - 1
        if rest.startswith("norm1."):
            theirs[f"blocks.{i}.first.{rest.removeprefix('norm1.')}"] = x
        elif rest == "self_attn.in_proj_weight":
            theirs |= dict(zip((f"b{i + 5}.q", f"b{i + 5}.k", f"b{i + 5}.v"), np.split(x, 3), strict=True))
        elif rest == "linear1.weight":
            theirs[f"up_{i}"] = np.ascontiguousarray(x.T)
        elif at != "0.weight":
            theirs[f"rest.{at}"] = x
    save_file(theirs, tmp_path / "other.safetensors")
    assert_equal(read(tmp_path / "other.safetensors", rows, model, (3,)), mine)


def test_numbers_of_16_bits_several_files_and_shorter_positions_are_read(tmp_path: Path) -> None:
    trained = with_weights(GPT2)
    folder = write(trained, tmp_path / "out")
    arrays = load_file(folder / "model.safetensors")
    halves = {name: x.astype(np.float16) for name, x in arrays.items()}
    first = dict(list(halves.items())[:5])
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file({name: x for name, x in halves.items() if name not in first}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    found = read(folder, "gpt2", trained.network.model, (5,))
    assert found["1.weight"].shape == (5, 12)
    for name, x in arrays_of(trained).items():
        np.testing.assert_allclose(found[name], x[: len(found[name])], rtol=1e-3, atol=1e-4)
        assert found[name].dtype == np.float32
    bfloat16 = tmp_path / "bfloat16.safetensors"
    header = b'{"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    bfloat16.write_bytes(len(header).to_bytes(8, "little") + header + bytes([0xC0, 0x3F, 0x00, 0xC0]))
    assert tensor_file.TensorFile(bfloat16, of_adtrain=False).floats("x").tolist() == [1.5, -2.0]


def without(name: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda arrays: arrays.pop(name)


LN = "transformer.h.0.ln_1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(LN), f"missing {LN}"),
        (lambda arrays: arrays.update(more=np.ones(2, np.float32)), "unexpected more"),
        (lambda arrays: arrays.update({LN: np.ones(11, np.float32)}), f"{LN} is (11,), expected (12,) for 3.norm1"),
        (lambda arrays: arrays.update({LN: np.ones(12, np.int32)}), f"{LN} has the dtype I32, expected one of F16"),
        (lambda arrays: arrays.update({LN: np.full(12, np.nan, np.float32)}), f"{LN} holds numbers that are not"),
        (lambda arrays: arrays.update({"transformer.h.0.attn.c_attn.weight": np.ones((36, 12), np.float32)}),
         "transformer.h.0.attn.c_attn.weight is (36, 12) transposed, expected (36, 12) for 3.self_attn.in_proj_weight"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_one_line(tmp_path: Path, change: Any, message: str) -> None:
    trained = with_weights(GPT2)
    path = write(trained, tmp_path / "out") / "model.safetensors"
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)
    with pytest.raises(AdtrainError) as caught:
        read(tmp_path / "out", "gpt2", trained.network.model, (8,))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"0.{i}{i}": "a"}, "training.names: found i twice in '0.{i}{i}', expected once"),
        ({"0.{word}": "a"}, "training.names: found '0.{word}', expected numbers such as {i} or {i+2}"),
        ({"{i}.{word}": "a"}, "training.names: found '{i}.{word}', expected numbers such as {i} or {i+2}"),
        ({"{i}.weight": "a.{k}"}, "training.names: found {k} in 'a.{k}', expected {i}"),
        ({"0.weight": "a.{k}"}, "training.names: found {k} in 'a.{k}', expected no number: its path has none"),
        ({"0.weight": "weight"}, "missing 0.bias (no row of training.names has it)"),
    ],
)
def test_tables_that_cannot_be_read_are_one_line(tmp_path: Path, rows: Any, message: str) -> None:
    save_file({"weight": np.ones((2, 3), np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(AdtrainError) as caught:
        read(tmp_path / "x.safetensors", rows, nn.Sequential(nn.Linear(2)), (3,))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["gpt3", "[a]", '{"*": []}', '{"*": 3}'])
def test_other_values_of_names_are_one_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "c.yaml").write_text(f"training: {{epochs: 1, init_from: x, names: {value}}}\n")
    with pytest.raises(AdtrainError) as caught:
        config.load(tmp_path / "c.yaml")
    (line,) = [line for line in str(caught.value).splitlines() if "training.names" in line]
    assert "expected one of gpt2, llama, vit, vit_torchvision, resnet18, resnet50, or a table from paths" in line


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(AdtrainError, match=r"found no model\.safetensors, expected one; other formats, such as "):
        read(tmp_path, "gpt2", described(GPT2).model(), (8,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "found no mapping, expected one such as"),
        ("{}", "found no model_type"),
        ('{"model_type": "bert"}', "model_type is 'bert', expected one of gpt2, llama, mistral, qwen3, vit"),
        ('{"model_type": "gpt2", "n_embd": "8"}', "n_embd is '8', expected an integer in [1, 2^31)"),
        ('{"model_type": "gpt2", "n_layer": 0}', "n_layer is 0, expected an integer in [1, 2^31)"),
        ('{"model_type": "gpt2", "n_layer": 2000000000}', "n_layer is 2000000000, expected at most 10000"),
        ('{"model_type": "gpt2", "n_layer": true}', "n_layer is True, expected an integer"),
        ('{"model_type": "gpt2", "activation_function": "mish"}', "activation_function is 'mish', expected one"),
        ('{"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true}', "scale_attn_by_inverse_layer_idx is True"),
        ('{"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}', "rope_type is 'llama3', expected"),
        ('{"model_type": "llama", "head_dim": 64, "hidden_size": 64}', "head_dim is 64, expected 2"),
        ('{"model_type": "gpt2", "n_embd": 8, "n_head": 3}',
         ": its network does not fit: model.layers[3] decoder_layer: multihead_attention: num_heads 3 does not divide"),
        ('{"model_type": "vit"}', "found a network for images, but the data are a text"),
        ('{"model_type": "vit", "image_size": [8, 9]}', "image_size is [8, 9], expected an integer"),
    ],
)  # fmt: skip
def test_a_config_json_that_adtrain_has_no_network_for_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "x.txt").write_text("abc " * 100)
    assert message in one_line(command("new", tmp_path / "x.txt", "--from", tmp_path, expect=2))


def test_a_network_for_texts_is_refused_for_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "x.csv").write_text("x,label\n" + "1,a\n2,b\n" * 20)
    line = one_line(command("new", tmp_path / "x.csv", "--from", tmp_path, expect=2))
    assert line == (
        f"{tmp_path}: found a network for texts, expected one for images or a table, as {tmp_path}/x.csv has; "
        "give a text, or another --from"
    )


@pytest.mark.parametrize(
    ("layers", "program", "message"),
    [
        ([nn.Embedding(5, embedding_dim=4), nn.PositionalEmbedding(), nn.DecoderLayer(2, soft_cap=3.0), nn.LayerNorm(),
          nn.Linear(5, bias=False)], "huggingface",
         "huggingface: layer 2.self_attn: multihead_attention: soft_cap is 3.0, expected None"),
        ([nn.Embedding(5, embedding_dim=4), nn.DecoderLayer(2), nn.LayerNorm(), nn.Linear(5)], "huggingface",
         "transformers has no network of these layers: found neither positions nor rotary_base"),
        ([nn.Embedding(5, embedding_dim=4), nn.DecoderLayer(2, rotary_base=1e4, norm="rms_norm", qk_norm=True)],
         "huggingface",
         "huggingface: it has no network of these layers: qwen3: rms_norm_eps is 1e-05, expected 1e-06"),
        ([nn.Linear(3)], "huggingface", "transformers has no network of these layers: found no embedding"),
        ([nn.Linear(3)], "torchvision", "torchvision has no network of these layers: found 0 residual layers"),
    ],
)  # fmt: skip
def test_an_export_of_another_network_is_one_line(layers: list[nn.Module], program: str, message: str) -> None:
    with pytest.raises(AdtrainError) as caught:
        architectures.encode(with_arrays(nn.Sequential(*layers), (3,)), program)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*its classes are tokens")
def test_a_network_trains_from_a_folder_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`new --from`, `train`, `export --format huggingface`, and again."""
    monkeypatch.chdir(tmp_path)
    write(with_weights({**GPT2, "tie_word_embeddings": True}), tmp_path / "given")
    (tmp_path / "x.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)
    (tmp_path / "c.yaml").write_text(command("new", "x.txt", "--from", "given").stdout)
    cfg = config.load(tmp_path / "c.yaml")
    assert cfg.data.options.length == 8
    assert cfg.training.names == "gpt2"
    state = training.prepare(cfg).initial_state("cpu")
    arrays = read(tmp_path / "given", "gpt2", described(GPT2).model(), (8,))
    assert_equal({name: x.numpy() for name, x in tensor_file.named(state.params).items()}, arrays)
    command("train", "c.yaml", "--output-dir", "run", "--set", "training.epochs=1")
    result = command("export", "run", "--format", "huggingface")
    assert result.stdout.splitlines()[0] == "folder  run/huggingface"
    trained = load_file(tmp_path / "run" / "model.safetensors")
    again = read(tmp_path / "run" / "huggingface", "gpt2", described(GPT2).model(), (8,))
    assert_equal(again, {name: trained[name] for name in again})
    assert any(np.abs(again[name] - arrays[name]).max() > 0 for name in again)
    shutil.rmtree(tmp_path / "given")
    assert "given" in one_line(command("train", "c.yaml", "--output-dir", "second", expect=2))
    assert not (tmp_path / "second").exists()
    assert "expected a folder of its own" in one_line(
        command("export", "run", "run", "--format", "huggingface", expect=2)
    )
    assert "Missing argument 'FILE'" in command("export", "run", expect=2).stderr


def test_an_export_that_fails_leaves_no_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    write(with_weights(GPT2), tmp_path / "given")
    (tmp_path / "c.yaml").write_text(command("new", "x.txt", "--from", "given").stdout)
    command("train", "c.yaml", "--output-dir", "run", "--set", "training.epochs=1")
    replace, full = os.replace, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def replaced(source: Path, target: Path) -> None:
        if Path(target).name == tensor_file.MODEL:
            raise full
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    result = command("export", "run", "out", "--format", "huggingface", expect=2)
    line = "adtrain: error: out/model.safetensors: cannot be written (No space left on device); it needs "
    assert result.stderr.splitlines()[-1].startswith(line)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_tokenizer_gives_the_tokens_of_the_text_and_its_export_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    used = tokenizer.train(tokenizer.pieces_of(tmp_path / "x.txt"), 270)
    write(with_weights({**GPT2, "vocab_size": 270}), tmp_path / "given")
    (tmp_path / "given" / "tokenizer.json").write_text(used.content)
    assert "give one of them" in one_line(command("new", "x.txt", "--from", "given", "--tokens", 300, expect=2))
    command("data", "tokenize", "x.txt", "-o", "same", "--tokenizer", "given/tokenizer.json")
    assert "path: same\n  unit: token\n  length: 8\n" in command("new", "same", "--from", "given").stdout
    command("data", "tokenize", "x.txt", "-o", "other", "--vocabulary", 260)
    assert one_line(command("new", "other", "--from", "given", expect=2)) == (
        "other: found tokens of another tokenizer; make them by data tokenize --tokenizer given/tokenizer.json"
    )
    (tmp_path / "c.yaml").write_text(command("new", "x.txt", "--from", "given").stdout)
    options = config.load(tmp_path / "c.yaml").data.options
    assert (options.unit, options.tokenizer, options.length) == ("token", "given/tokenizer.json", 8)
    command("train", "c.yaml", "--output-dir", "run", "--set", "training.epochs=1")
    assert "set training.init_from to run" in one_line(command("new", "x.txt", "--from", "run", expect=2))
    command("export", "run", "--format", "huggingface")
    assert (tmp_path / "run" / "huggingface" / "tokenizer.json").read_text() == used.content
    settings = json.loads((tmp_path / "run" / "huggingface" / "config.json").read_text())
    assert settings["eos_token_id"] == used.end_of_text  # where `generate` stops


def test_a_vit_gets_a_new_last_layer_for_other_classes(tmp_path: Path) -> None:
    write(with_weights(VIT), tmp_path / "given")
    images = np.random.default_rng(0).integers(0, 256, (30, 3, 8, 8), dtype=np.uint8)
    data = tmp_path / "x.npz"
    np.savez(data, X=images, y=np.arange(30) % 3)
    (tmp_path / "c.yaml").write_text(command("new", data, "--from", tmp_path / "given").stdout)
    cfg = config.load(tmp_path / "c.yaml")
    assert cfg.training.init_partial
    found = tensor_file.named(training.prepare(cfg).initial_state("cpu").params)
    assert found["8.weight"].shape == (3, 12)
    given = load_file(tmp_path / "given" / "model.safetensors")
    np.testing.assert_array_equal(found["1.bias"], given["vit.embeddings.patch_embeddings.projection.bias"])
    small = tmp_path / "small.npz"
    np.savez(small, X=images[:, :, :4, :4], y=np.arange(30) % 3)
    assert "the network takes images of 3 x 8 x 8, found 3 x 4 x 4" in one_line(
        command("new", small, "--from", tmp_path / "given", expect=2)
    )
