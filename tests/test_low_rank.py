"""Low-rank adaptation: what is trained, what it computes, and the weights that are exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import command
from program_samples import for_gpu
from report_runs import one_line
from safetensors.numpy import load_file
from training_runs import load, prepare, write_config

import adtrain as ad
from adtrain import config, nn, ops, training
from adtrain.core import tree
from adtrain.core.primitive import Trait
from adtrain.core.program import single_equations
from adtrain.core.staging import stage
from adtrain.nn.linear import A, B, product
from adtrain.training import model_file, tensor_file

pytestmark = pytest.mark.unfused

FLOAT64 = np.dtype(np.float64)


def named(arrays: nn.Params) -> dict[str, Any]:
    return {name: x.numpy() for name, x in tensor_file.named(arrays).items()}


def test_an_adapted_network_computes_weights_plus_products_and_begins_as_the_network() -> None:
    layers = nn.Embedding(7, embedding_dim=8), nn.DecoderLayer(2, activation="swiglu"), nn.Linear(7, tied=True)
    plain, adapted = nn.Sequential(*layers), nn.LowRankSequential(*layers, rank=2, paths=("*.self_attn.*", "1.gate.*"))
    (params, _), (more, _) = (model.init((5,), 0, FLOAT64) for model in (plain, adapted))
    added = {name: x for name, x in named(more).items() if nn.is_low_rank(name)}
    assert {name: x.shape for name, x in added.items()} == {
        "1.self_attn.in_proj_weight_lora_a": (2, 8), "1.self_attn.in_proj_weight_lora_b": (24, 2),
        "1.self_attn.out_proj.weight_lora_a": (2, 8), "1.self_attn.out_proj.weight_lora_b": (8, 2),
        "1.gate.weight_lora_a": (2, 8), "1.gate.weight_lora_b": (32, 2),
    }  # fmt: skip
    assert adapted.parameter_shapes((5,)) == {name: x.shape for name, x in named(more).items()}
    x = np.random.default_rng(0).integers(0, 7, (2, 5))
    np.testing.assert_array_equal(adapted(more, x), plain(params, x))

    rng = np.random.default_rng(1)
    changed = tree.map(lambda x: ad.array(rng.normal(size=x.shape)), more)
    np.testing.assert_allclose(adapted(changed, x), plain(nn.with_products(changed), x), rtol=1e-10)
    merged, given = named(nn.with_products(changed)), named(changed)
    product = given["1.gate.weight_lora_b"] @ given["1.gate.weight_lora_a"]
    np.testing.assert_allclose(merged["1.gate.weight"], given["1.gate.weight"] + product, rtol=1e-13)
    assert merged.keys() == named(params).keys()


def test_derivatives_are_those_of_the_weight_plus_the_product() -> None:
    rng = np.random.default_rng(0)
    given = [ad.array(rng.normal(size=size)) for size in ((2, 5, 4), (3, 4), (2, 4), (3, 2))]
    direction = ad.array(rng.normal(size=(2, 5, 3)))

    def adapted(x: Any, w: Any, a: Any, b: Any) -> Any:
        return product(x, {"weight": w, "weight" + A: a, "weight" + B: b}, "weight")

    def composed(x: Any, w: Any, a: Any, b: Any) -> Any:
        return ops.matmul(x, w + ops.matmul(b, a), transpose_b=True)

    def loss(f: Any, *args: Any) -> Any:
        return ops.sum(ops.tanh(f(*args)) * direction)

    def of_gradients(f: Any, *args: Any) -> Any:
        return sum(ops.sum(ops.square(x)) for x in ad.grad(partial(loss, f), range(4))(*args))

    for function in (loss, of_gradients):
        found, expected = (ad.grad(partial(function, f), range(4))(*given) for f in (adapted, composed))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-9, atol=1e-12)


def test_products_with_small_matrices_read_the_copies_of_large_ones_in_bfloat16() -> None:
    def gradients(x: Any, w: Any, a: Any, b: Any) -> Any:
        def loss(x: Any, a: Any, b: Any) -> Any:
            with ops.matmul_precision("bfloat16"):
                return ops.sum(ops.square(product(x, {"weight": w, "weight" + A: a, "weight" + B: b}, "weight")))

        return ad.grad(loss, (0, 1, 2))(x, a, b)

    arrays = [np.zeros(size, np.float32) for size in ((2048, 512), (512, 512), (8, 512), (512, 8))]
    program = for_gpu(stage(gradients).program(*arrays))
    products = [e for fused in program.equations for e in single_equations(fused) if e.has(Trait.MATMUL)]
    assert [e.name for e in products if any(v.type.shape[0] == 2048 for v in e.inputs)] == ["matmul_bfloat16"] * 6


def test_only_the_small_matrices_and_what_a_group_trains_change(tmp_path: Path) -> None:
    experiment = prepare(
        tmp_path, "lora={rank: 2, paths: 0.weight}", "parameter_groups=[{paths: 2.bias, trainable: true}]",
        "training.epochs=1",
    )  # fmt: skip
    before = named(experiment.initial_state("cpu").params)
    folder = tmp_path / "run"
    command("train", tmp_path / "tiny.yaml", "--output-dir", folder, "--set", "lora={rank: 2, paths: 0.weight}",
            "--set", "parameter_groups=[{paths: 2.bias, trainable: true}]", "--set", "training.epochs=1")  # fmt: skip
    after = load_file(folder / "model.safetensors")
    rows = nn.describe(experiment.network.model, experiment.network.input_shape)
    assert sum(row.parameters for row in rows) == sum(x.size for x in after.values())
    assert {name for name in before if np.abs(before[name] - after[name]).max() > 0} == {
        "0.weight_lora_a", "0.weight_lora_b", "2.bias"
    }  # fmt: skip
    checkpoint = load_file(folder / "last.safetensors")
    trained = {name.rpartition("/")[2] for name in checkpoint if name.startswith("optimizer.") and "lora" in name}
    assert any("0.weight_lora_b" in name for name in trained)
    assert not any(name.startswith("optimizer.") and name.endswith("2.weight") for name in checkpoint)


def test_products_are_in_the_exported_weights_and_a_training_starts_from_them(tmp_path: Path) -> None:
    write_config(tmp_path)
    tiny, folder, weights = tmp_path / "tiny.yaml", tmp_path / "run", tmp_path / "w.safetensors"
    command("train", tiny, "--output-dir", folder, "--set", "lora={rank: 1}")
    command("export", folder, weights)
    exported, run = load_file(weights), load_file(folder / "model.safetensors")
    assert set(exported) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name in ("0.weight", "2.weight"):
        product = run[f"{name}_lora_b"].astype(np.float64) @ run[f"{name}_lora_a"]
        np.testing.assert_allclose(exported[name], run[name] + product, rtol=1e-6, atol=1e-7)
        assert np.abs(product).max() > 0
    loaded = model_file.load(folder)
    x = ad.array(np.random.default_rng(0).normal(size=(4, 36)).astype(np.float32))
    merged = loaded.merged()
    np.testing.assert_allclose(
        loaded.network.model(loaded.params, x), merged.network.model(merged.params, x), rtol=1e-4, atol=1e-5
    )
    for source, lora in ((weights, "lora={rank: 3}"), (weights, ""), (folder, "lora={rank: 1}")):
        given = [f"training.init_from={source}", *([lora] if lora else [])]
        state = training.prepare(load(tmp_path, *given)).initial_state("cpu")
        np.testing.assert_array_equal(named(state.params)["0.weight"], load_file(
            source if source.is_file() else source / "model.safetensors")["0.weight"])  # fmt: skip
    assert "found lora, expected a run without it for --training" in one_line(
        command("export", folder, tmp_path / "x.c", "--training", expect=2)
    )


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{rank: 0}", "lora.rank: found 0, expected an integer in [1, 2^31)"),
        ("{rank: 17}", "lora.rank: found 17, expected at most 16, the largest rank of a weight that it adapts (0.w"),
        ("{rank: 4, paths: 2.weight}", "lora.rank: found 4, expected at most 3, the largest rank of a weight"),
        ("{paths: a}", "lora.rank: missing"),
        ("{rank: 2, paths: [0.weight, 0.bias]}",
         "lora.paths: found 0.bias, which matches no weight of a linear layer (known: 0.weight, 2.weight)"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_one_line(tmp_path: Path, lora: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.build.model(load(tmp_path, f"lora={lora}"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
