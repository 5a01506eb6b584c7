"""In float64, every peer has the same losses as adtrain at every step, up to rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import training_runs
from npz_files import write_npz
from peer_marks import crossed, marked, quick

from adtrain import nn, optim
from adtrain.bench.peers import jobs, numpy_system
from adtrain.bench.peers.jobs import Job
from adtrain.bench.peers.systems import Unsupported

__all__ = ["quick"]

FORMS = marked("torch-eager", "jax-scan", "numpy")

IMAGES = "[{conv2d: {out_channels: 4, kernel_size: 3}}"
LAYERS = {
    "dense": "[{linear: 16}, tanh, {linear: {out_features: 8, bias: false}}, sigmoid, relu, {linear: 3}]",
    "convolution": f"{IMAGES}, relu, {{max_pool2d: 2}}, flatten, {{linear: 3}}]",
    "strides": "[{conv2d: {out_channels: 4, kernel_size: [3, 2], stride: [2, 1], "
    "padding: [1, 0]}}, {conv2d: {out_channels: 4, kernel_size: 2, padding: same, groups: 2, dilation: 2}}, "
    "flatten, {linear: 3}]",
    "pools": f"{IMAGES}, {{avg_pool2d: {{kernel_size: 3, stride: 1, padding: 1}}}}, "
    "{max_pool2d: {kernel_size: 3, stride: 2, padding: 1}}, {adaptive_avg_pool2d: 1}, flatten, {linear: 3}]",
    "norms": f"{IMAGES}, batch_norm2d, {{group_norm: 2}}, {{layer_norm: [4, 4]}}, flatten, batch_norm1d, layer_norm, "
    "{linear: 3}]",
    "containers": f"{IMAGES}, {{residual: [{{conv2d: {{out_channels: 4, kernel_size: 3, padding: 1}}}}, "
    "batch_norm2d]}, {residual: {body: [{conv2d: {out_channels: 6, kernel_size: 1}}], "
    "shortcut: [{conv2d: {out_channels: 6, kernel_size: 1}}]}}, {concat: [[relu], [tanh]]}, {add: [[relu], [silu]]}, "
    "flatten, {linear: 3}]",
    "activations": "[{reshape: [4, 9]}, {select: [3, 0, 1]}, flatten, {linear: 12}, leaky_relu, {elu: 0.7}, gelu, "
    "{gelu: tanh}, silu, softplus, squared_relu, {soft_cap: 2.0}, softmax, log_softmax, {linear: 3}]",
    "gates": f"{IMAGES}, {{instance_norm2d: {{affine: true}}}}, {{batch_norm2d: {{affine: bias}}}}, "
    "{multiply: [[prelu], [{adaptive_max_pool2d: 1}, hardswish]]}, {upsample: 2}, {adaptive_max_pool2d: [4, 2]}, "
    "flatten, {scale: 0.5}, {rms_norm: {eps: 0.001}}, {linear: 3}]",
    "bilinear": f"{IMAGES}, {{upsample: {{scale_factor: [2, 3], mode: bilinear}}}}, flatten, {{linear: 3}}]",
    "sequences": "[{reshape: [4, 9]}, {conv1d: {out_channels: 4, kernel_size: 3, stride: 2, padding: 1, groups: 2}}, "
    "{conv1d: {out_channels: 3, kernel_size: 4, dilation: 1, padding: same}}, flatten, {linear: 3}]",
    "tokens": "[{reshape: [1, 6, 6]}, {patches: [3, 2]}, {linear: 8}, positional_embedding, "
    "{multihead_attention: {num_heads: 2, causal: true}}, "
    "{transformer_encoder_layer: {nhead: 2, dim_feedforward: 5, dropout: 0.0, activation: gelu, norm_first: true}}, "
    "{transformer_encoder_layer: {nhead: 4, dim_feedforward: 5, dropout: 0.0}}, class_token, "
    "{decoder_layer: {num_heads: 2, activation: swiglu, norm: rms_norm}}, {decoder_layer: {num_heads: 4}}, mean, "
    "{linear: 3}]",
    "queries": "[{reshape: [3, 12]}, {multihead_attention: {num_heads: 2, num_key_value_heads: 1, rotary_base: 10000, "
    "causal: true}}, {decoder_layer: {num_heads: 3, rotary_base: 100, qk_norm: true, bias: false}}, mean, {linear: 3}]",
    "recurrent": "[{reshape: [4, 9]}, {lstm: {hidden_size: 5, num_layers: 2, bidirectional: true, output: all}}, "
    "{gru: {hidden_size: 4, bias: false, output: all}}, {rnn: {hidden_size: 3, nonlinearity: relu, output: all}}, "
    "{rnn: 5}, {linear: 3}]",
    "waves": "[{linear: 3}, {fourier_features: {frequencies: 4, scale: 0.1}}, {sine: 8}, {linear: 3}]",
    "grids": "[{linear: 3}, {hash_grid: {levels: 3, log2_table_size: 6, base_resolution: 2, finest_resolution: 9}}, "
    "{linear: 3}]",
    "transposed": f"{IMAGES}, {{conv_transpose2d: {{out_channels: 2, kernel_size: 3, stride: 2, output_padding: 1}}}}, "
    "flatten, {linear: 3}]",
}
OPTIMIZERS = (
    "sgd: {lr: 0.1}",
    "sgd: {lr: 0.1, momentum: 0.9, weight_decay: 0.01}",
    "sgd: {lr: 0.05, momentum: 0.9, nesterov: true}",
    "adam: {lr: 0.01, betas: [0.8, 0.99], weight_decay: 0.01}",
    "adamw: {lr: 0.01, weight_decay: 0.1}",
    "lion: {lr: 0.001, weight_decay: 0.1}",
    "rmsprop: {lr: 0.01, weight_decay: 0.01}",
    "rmsprop: {lr: 0.01, momentum: 0.5}",
    "muon: {lr: 0.05, momentum: 0.9, weight_decay: 0.1}",
    "muon: {lr: 0.05, momentum: 0.6, ns_steps: 3, adjust_lr_fn: none, normalize_weights: true, rest_paths: 2.weight}",
    "muon: {lr: 0.05, momentum: 0, nesterov: false, adjust_lr_fn: match_rms_adamw, rest: {sgd: {lr: 0.1}}}",
)
MUON = {each for each in OPTIMIZERS if each.startswith("muon")}
GROUPS = (
    "[no_decay, {paths: 0.*, lr_factor: 3}, {paths: 2.bias, weight_decay: 0.5}]",
    "[{paths: 0.*, trainable: false}]",
)
WEIGHTED = (
    "{cross_entropy: {weight: [1, 2, 0.5]}}",
    "{binary_cross_entropy_with_logits: {weight: [1, 2, 1], pos_weight: [1, 2, 3]}}",
)
LOSSES = (
    "cross_entropy",
    "{cross_entropy: {label_smoothing: 0.1}}",
    "mse",
    "l1",
    "{huber: {delta: 0.3}}",
    "binary_cross_entropy_with_logits",
    *WEIGHTED,
)
PLAIN = "[{linear: 16}, relu, {linear: 3}]"
DROPPING = "[{reshape: [6, 6]}, {decoder_layer: {num_heads: 2, dropout: 0.5}}, flatten, {linear: 3}]"
LACKING = {
    "numpy": {*LAYERS} - {"dense", "convolution"} | {*LOSSES} - {"cross_entropy"} | MUON | {*GROUPS},
    "jax-scan": {"transposed", "bilinear", "sequences", "queries", "grids", *WEIGHTED, *MUON, *GROUPS},
    "torch-eager": {"lion: {lr: 0.001, weight_decay: 0.1}"},
}


def job(folder: Path, layers: str = PLAIN, *overrides: str) -> Job:
    shape = "model.input=[1, 6, 6]" if "conv2d" in layers else "model.input=[36]"
    fixed = "training.precision=float64", shape
    return Job(training_runs.prepare(folder, *fixed, *overrides, layers=layers), "cpu")


def losses(name: str, given: Job) -> list[float]:
    """The losses of all steps of three calls."""
    runner = jobs.runner(name, given)
    return [x for _ in range(3) for x in runner.losses()]


def check(name: str, given: Job, case: str) -> None:
    if case in LACKING[name]:
        with pytest.raises(Unsupported, match=r"^no counterpart of .+ in (plain NumPy|numpy|JAX|jax\.numpy|PyTorch)"):
            losses(name, given)
        return
    np.testing.assert_allclose(losses(name, given), losses("adtrain", given), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch's warning about speed
@pytest.mark.parametrize(("name", "case"), crossed(FORMS, LAYERS))
def test_layers_of_peers_agree_with_adtrain(tmp_path: Path, name: str, case: str) -> None:
    check(name, job(tmp_path, LAYERS[case]), case)


@pytest.mark.parametrize(("name", "optimizer"), crossed(FORMS, OPTIMIZERS))
def test_optimizers_of_peers_agree_with_adtrain(tmp_path: Path, name: str, optimizer: str) -> None:
    check(name, job(tmp_path, PLAIN, f"optimizer={{{optimizer}}}"), optimizer)


@pytest.mark.parametrize("optimizer", ["adamw: {lr: 0.01, weight_decay: 0.1}", "muon: {lr: 0.05}"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", FORMS)
def test_parameter_groups_agree(tmp_path: Path, name: str, groups: str, optimizer: str) -> None:
    check(name, job(tmp_path, PLAIN, f"optimizer={{{optimizer}}}", f"parameter_groups={groups}"), groups)


@pytest.mark.parametrize(("name", "loss"), crossed(FORMS, LOSSES))
def test_losses_of_peers_agree_with_adtrain(tmp_path: Path, name: str, loss: str) -> None:
    check(name, job(tmp_path, PLAIN, f"loss={loss}"), loss)


@pytest.mark.parametrize("name", marked("torch-eager", "jax-scan"))
def test_nll_of_log_probabilities_agrees(tmp_path: Path, name: str) -> None:
    check(name, job(tmp_path, "[{linear: 3}, log_softmax]", "loss=nll"), "nll")


@pytest.mark.parametrize(("name", "clip"), crossed(FORMS, ["clip_norm=0.05", "clip_value=0.01"]))
def test_clipping_of_peers_agrees_with_adtrain(tmp_path: Path, name: str, clip: str) -> None:
    check(name, job(tmp_path, PLAIN, f"training.{clip}", "optimizer={sgd: 0.5}"), clip)


@pytest.mark.parametrize("name", FORMS)
def test_losses_on_float32_data_agree(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    write_npz(tmp_path / "rows.npz", {"X": rng.normal(3, 2, (40, 36)).astype(np.float32), "y": np.arange(40) % 3})
    check(name, job(tmp_path, PLAIN, f"data={{path: {tmp_path}/rows.npz, test: 0.2, batch_size: 8}}"), "dense")


@pytest.mark.parametrize("name", marked("torch-eager", "jax-scan"))
def test_losses_of_embedded_integers_agree(tmp_path: Path, name: str) -> None:
    tokens = np.arange(200).reshape(40, 5) ** 2 % 11
    write_npz(tmp_path / "tokens.npz", {"X": tokens.astype(np.float32), "y": np.arange(40) % 3})
    layers = "[{embedding: {num_embeddings: 11, embedding_dim: 4}}, mean, {linear: 3}]"
    data = f"data={{path: {tmp_path}/tokens.npz, test: 0.2, batch_size: 8, normalize: false}}"
    check(name, job(tmp_path, layers, data, "model.input=[5]"), "embedding")


@pytest.mark.parametrize("name", marked("torch-eager", "jax-scan"))
def test_losses_of_a_text_agree(tmp_path: Path, name: str) -> None:
    (tmp_path / "book.txt").write_text("abcdacbd" * 60)
    layers = "[{embedding: {num_embeddings: 4, embedding_dim: 8}}, {linear: 4}]"
    data = f"data={{path: {tmp_path}/book.txt, length: 9, test: 0.2, batch_size: 8}}"
    check(name, job(tmp_path, layers, data, "model.input=[9]"), "text")


@pytest.mark.needs_jax
def test_jit_and_scan_agree(tmp_path: Path) -> None:
    given = job(tmp_path)
    np.testing.assert_allclose(losses("jax-jit", given), losses("jax-scan", given), rtol=1e-12)


def test_every_layer_optimizer_and_loss_is_covered() -> None:
    text = " ".join(LAYERS.values())
    apart = {"embedding", "dropout", "dropout2d"}  # an embedding does not take pixels; others draw random numbers
    assert [kind for kind in {*nn.LAYERS, "residual", "concat", "add", "multiply"} - apart if kind not in text] == []
    of_equations = {"lbfgs", "sequence"}  # peers train on examples
    assert {each.partition(":")[0] for each in OPTIMIZERS} == set(optim.OPTIMIZERS) - of_equations
    assert {each.strip("{").partition(":")[0] for each in LOSSES} | {"nll"} == set(nn.LOSSES)


@pytest.mark.parametrize("name", FORMS)
def test_averages_are_unsupported(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unsupported, match=r"^no counterpart of an average of the weights "):
        losses(name, job(tmp_path, PLAIN, "training.average=ema"))


@pytest.mark.parametrize("layers", ["[{linear: 16}, {dropout: 0.5}, {linear: 3}]", DROPPING])
def test_dropout_is_unsupported(tmp_path: Path, layers: str) -> None:
    given = job(tmp_path, layers)
    with pytest.raises(Unsupported, match="dropout draws other random numbers"):
        jobs.runner("numpy", given)
    assert jobs.runner("adtrain", given).losses()


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_reduced_precision_is_unsupported_in_numpy(tmp_path: Path, precision: str) -> None:
    given = Job(training_runs.prepare(tmp_path, f"training.precision={precision}"), "cpu")
    with pytest.raises(Unsupported, match=f"no counterpart of precision {precision}"):
        jobs.runner("numpy", given)


@pytest.mark.parametrize("peer", ["torch-eager", "jax-scan"])
def test_mixed_precision_of_other_systems_starts_from_the_same_loss(tmp_path: Path, peer: str) -> None:
    pytest.importorskip(peer.partition("-")[0])
    precisions = (f"training.precision={name}" for name in ("bfloat16", "float32"))
    first, expected = (jobs.runner(peer, job(tmp_path, LAYERS["dense"], x)).losses()[0] for x in precisions)
    assert first != expected
    assert first == pytest.approx(expected, rel=2e-2)


def test_a_call_continues_the_training_of_the_call_before(tmp_path: Path) -> None:
    one, other = (jobs.runner("numpy", job(tmp_path)) for _ in range(2))
    several = [x for _ in range(4) for x in one.losses()]
    other.losses()
    assert other.run(3) == pytest.approx(several[-1], rel=1e-12)


@pytest.mark.compiled
@pytest.mark.parametrize("case", ["dense", "convolution"])
def test_naive_loops_agree_with_plain_numpy(tmp_path: Path, case: str) -> None:
    given = job(tmp_path, LAYERS[case], "training.precision=float32")
    step = numpy_system.naive_step(given.experiment)
    at = given.orders[0, 0]
    plain = numpy_system.stepper(given, numpy_system.PLAIN)
    np.testing.assert_allclose([step() for _ in range(5)], [plain(at) for _ in range(5)], rtol=1e-4)
