"""ops.attention: values and gradients against PyTorch's, blocks of odd lengths, no array of queries by keys."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from compiled_parity import TOLERANCE, Function, check_all
from test_cpu_running import run_on

import adtrain as ad
from adtrain import ops
from adtrain.backends.cpu.compiled_program import CompiledProgram
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.ops.attention import composed
from adtrain.passes import ALL

RNG = ops.rng_state(5, 2)
TEXT: Any = "2"  # of a wrong type
DOCUMENTS = (3, 40, 65, 22)
"""The lengths of documents that share a sequence."""
LENGTHS = [(0, 3), (1, 1), (1, 65), (65, 1), (16, 16), (17, 63), (64, 64), (65, 129), (130, 130)]


def drawn(*shapes: tuple[int, ...], dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def with_gradients(q: Any, k: Any, v: Any, ct: Any, **options: Any) -> Any:
    out, pullback = ad.vjp(lambda *x: ops.attention(*x, **options), q, k, v)
    return out, pullback(ct)


def arguments(queries: int, keys: int, width: int, batch: int = 3, dtype: str = "float64") -> list[np.ndarray]:
    """q, k, v and a cotangent."""
    of_q, of_k = (batch, queries, width), (batch, keys, width)
    return drawn(of_q, of_k, of_k, of_q, dtype=dtype)


def key_mask(batch: int, keys: int) -> np.ndarray:
    return np.random.default_rng(1).random((batch, keys)) < 0.6


def documents(batch: int, length: int) -> np.ndarray:
    """The position at which the document of each position begins: int32 (batch, length)."""
    begins = np.random.default_rng(2).random((batch, length)) < 4 / length
    return np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1).astype(np.int32)


@pytest.mark.needs_torch
@pytest.mark.parametrize(("causal", "masked", "scale"), [(False, False, None), (True, False, 0.3), (False, True, None)])
def test_values_and_gradients_equal_pytorchs(causal: bool, masked: bool, scale: float | None) -> None:
    torch = pytest.importorskip("torch")
    q, k, v, ct = drawn(*[(2, 3, 9, 5)] * 4)
    mask = key_mask(2, 9) if masked else None
    given = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *given, torch.tensor(mask)[:, None, None] if masked else None, is_causal=causal, scale=scale
    )
    out.backward(torch.tensor(ct))
    per_head = mask[:, None] if mask is not None else None
    found, grads = with_gradients(q, k, v, ct, causal=causal, mask=per_head, scale=scale)
    np.testing.assert_allclose(found, out.detach().numpy(), rtol=1e-12, atol=1e-14)
    for mine, theirs in zip(grads, given, strict=True):
        np.testing.assert_allclose(mine, theirs.grad.numpy(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_equal_those_of_the_composition_with_dropout_and_mask(causal: bool) -> None:
    """With the random numbers of `ops.dropout`. Query 0 has no key if it is causal."""
    q, k, v, ct = arguments(9, 9, 4)
    mask = key_mask(3, 9)
    mask[:, 0] = False
    params: Any = {"causal": causal, "scale": 0.5, "dropout": 0.3, "stream": 4, "precision": "full"}
    expected, pullback = ad.vjp(lambda *x: composed(*x, ad.array(mask), RNG, **params), q, k, v)
    found, grads = with_gradients(q, k, v, ct, causal=causal, scale=0.5, mask=mask, dropout=0.3, rng=RNG, stream=4)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    for mine, theirs in zip(grads, pullback(ad.array(ct)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-13)
    assert not causal or not found.numpy()[:, 0].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "window"), [(1, 1), (7, 1), (7, 2), (8, 2), (9, 2), (12, 3), (9, 4), (9, 20)])
def test_a_window_is_a_band_of_the_scores(causal: bool, length: int, window: int) -> None:
    """Values and gradients, where the scores are computed in blocks, with a rest or without, and where they are not."""
    q, k, v, ct = arguments(length, length, 4)
    distance = np.arange(length)[:, None] - np.arange(length)
    near = (np.abs(distance) < window) & ((distance >= 0) | (not causal))

    def expected(q: Any, k: Any, v: Any) -> Any:
        scores = ops.where(ad.array(near), ops.matmul(q, k, transpose_b=True) * 0.5, -1e30)
        return ops.matmul(ops.softmax(5.0 * ops.tanh(scores / 5.0) + ops.where(ad.array(near), 0.0, -1e30)), v)

    out, pullback = ad.vjp(expected, q, k, v)
    found, grads = with_gradients(q, k, v, ct, causal=causal, window=window, soft_cap=5.0)
    np.testing.assert_allclose(found, out, rtol=1e-11, atol=1e-13)
    for mine, theirs in zip(grads, pullback(ad.array(ct)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.compiled
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("function", [ops.attention, ops.self_attention])
def test_compiled_blocks_of_documents_equal_the_reference(function: Any) -> None:
    """The blocks have several documents, and the documents several blocks."""
    starts = np.repeat(np.cumsum(DOCUMENTS) - DOCUMENTS, DOCUMENTS).astype(np.int32)
    q, k, v, ct = arguments(sum(DOCUMENTS), sum(DOCUMENTS), 6, batch=2)
    given = (q, k, v) if function is ops.attention else (np.concatenate([q, k, v], axis=-1),)

    def derivatives(ct: Any, *x: Any) -> Any:
        more = {} if function is ops.attention else {"heads": 2}
        out, pullback = ad.vjp(lambda *x: function(*x, **more, causal=True, starts=ad.array(starts)), *x)
        return out, pullback(ct)

    found = ad.tree.leaves(stage(derivatives, ALL)(ct, *given))
    for mine, expected in zip(found, ad.tree.leaves(derivatives(ad.array(ct), *map(ad.array, given))), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.compiled
@pytest.mark.usefixtures("quick_compiler")
def test_blocks_of_keys_that_a_mask_excludes_are_not_read() -> None:
    q, k, v, _ = arguments(3, 200, 5)
    mask = np.arange(200) >= 128
    expected = ops.attention(q, k[:, 128:], v[:, 128:]).numpy()
    k[:, :128] = v[:, :128] = np.nan
    found = stage(lambda q, k, v: ops.attention(q, k, v, mask=mask), ALL)(q, k, v)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-14)
    nothing = stage(lambda q, k, v: ops.attention(q, k, v, mask=np.zeros(200, np.bool_)), ALL)(q, k, v)
    assert not nothing.numpy().any()


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"soft_cap": 2.0}], ids=str)
def test_documents_that_share_a_sequence_have_the_values_and_derivatives_of_separate_ones(
    options: dict[str, Any],
) -> None:
    length, ends = sum(DOCUMENTS), np.cumsum(DOCUMENTS)
    starts = np.repeat(ends - DOCUMENTS, DOCUMENTS).astype(np.int32)
    arrays = arguments(length, length, 6, batch=2)

    def derivatives(*x: Any, **more: Any) -> Any:
        """The value and the gradient, and the gradient of a function of the gradient."""

        def first(*x: Any) -> Any:
            return with_gradients(*x, **{"causal": True, **options, **more})

        found, pullback = ad.vjp(first, *x)
        return found, pullback(ad.tree.map(ops.sin, found))

    whole = ad.tree.leaves(derivatives(*map(ad.array, arrays), starts=ad.array(starts)))
    for begin, end in zip(ends - DOCUMENTS, ends, strict=True):
        alone = ad.tree.leaves(derivatives(*(ad.array(x[:, begin:end]) for x in arrays)))
        for mine, separate in zip(whole, alone, strict=True):
            np.testing.assert_allclose(mine.numpy()[:, begin:end], separate, rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("dtype", "taken", "code"),
    [
        pytest.param("float32", (0,), "quick_compiler", id="float32"),
        pytest.param("float32", (2, 4), "optimised", id="float32, optimised", marks=pytest.mark.exhaustive),
        pytest.param("float64", (1, 3), "quick_compiler", id="float64", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_blocks_of_all_lengths_equal_the_reference(
    dtype: str, taken: tuple[int, ...], code: str, request: pytest.FixtureRequest
) -> None:
    """Of five functions that follow one another, plain pytest compiles one."""
    request.getfixturevalue(code)
    functions: dict[str, Function] = {}
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "dropout": {"dropout": 0.3, "rng": RNG},
        "causal": {"causal": True},
    }
    for (queries, keys), (name, given) in product(LENGTHS, options.items()):
        if name == "causal" and queries != keys:
            continue
        for width in (1, 16, 33) if queries < 100 else (256,):
            for masked in (False, True):
                more = given | ({"mask": key_mask(3, keys)} if masked else {})
                functions[f"{queries} {keys} {width} {name} {masked}"] = (
                    lambda *x, more=more: with_gradients(*x, **more),
                    arguments(queries, keys, width, dtype=dtype),
                )
    chosen = {name: function for i, (name, function) in enumerate(functions.items()) if i % 5 in taken}
    check_all(chosen, TOLERANCE[dtype], largest=True)


@pytest.mark.compiled
@pytest.mark.parametrize(("batch", "causal"), [(1, False), (4, True)])
def test_results_have_the_same_bits_on_any_number_of_threads(batch: int, causal: bool) -> None:
    """Whether there are fewer heads than threads or more."""
    given = [ad.array(x) for x in arguments(150, 150, 20, batch, "float32")]
    program = stage(lambda *x: with_gradients(*x, causal=causal), ()).program(*given)
    compiled = CompiledProgram(program)
    compiled.run([x.numpy() for x in given])
    one, *others = (run_on(compiled, program, threads) for threads in (1, 2, 5))
    assert others == [one, one]


def test_no_value_of_a_program_has_an_element_for_each_query_and_key() -> None:
    given = [ad.array(x) for x in arguments(100, 120, 4, 1)]
    program = stage(with_gradients, ALL).program(*given)
    assert max(v.size for e in program.equations for v in e.outputs) == 120 * 4


def test_nan_and_infinity_reach_the_outputs_of_their_query_only() -> None:
    q, k, v, _ = arguments(3, 70, 5, 1, "float32")
    q[0, 0, 1], q[0, 2, 2] = np.nan, np.inf
    for attend in (ops.attention, ad.jit(ops.attention)):
        out = attend(ad.array(q), ad.array(k), ad.array(v)).numpy()
        assert np.isnan(out[0, [0, 2]]).all()
        assert np.isfinite(out[0, 1]).all()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 4, 8)), "found shape (2, 4, 8) and 2 heads, expected (..., length, 3 heads width)"),
        (np.zeros((2, 0, 12)), "found shape (2, 0, 12) and 2 heads, expected"),
        (np.zeros((1, 6 * 257)), "found width 257, expected 1 to 256; use more heads"),
    ],
)
def test_one_array_that_does_not_divide_is_refused_in_one_line(x: np.ndarray, message: str) -> None:
    with pytest.raises(AdtrainError) as caught:
        ops.self_attention(x, 2)
    assert str(caught.value).startswith(f"self_attention: {message}")


X, WIDE = np.zeros((2, 4, 8), np.float32), np.zeros((2, 300))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.attention(X, X, X[:, :3]), "found q, k, v of shapes (2, 4, 8), (2, 4, 8), (2, 3, 8), expected"),
        (lambda: ops.attention(X, X[..., :4], X[..., :4]), "found q, k, v of shapes"),
        (lambda: ops.attention(X, X[:, :3], X[:, :3], causal=True), "found 4 queries and 3 keys, expected equal"),
        (lambda: ops.attention(X, X[:, :0], X[:, :0]), "found k of shape (2, 0, 8), expected at least one key"),
        (lambda: ops.attention(WIDE, WIDE, WIDE), "found width 300, expected 1 to 256; use more heads"),
        (lambda: ops.attention(X, X, X, mask=np.ones((2, 4))), "found a mask of float64, expected bool"),
        (lambda: ops.attention(X, X, X, mask=np.ones((2, 3), bool)), "found a mask of shape (2, 3), expected (2, 4)"),
        (lambda: ops.attention(X, X, X, mask=np.ones((4, 4), bool)), "found a mask of shape (4, 4), expected (2, 4)"),
        (lambda: ops.attention(X, X, X, dropout=0.5), "found dropout without rng"),
        (lambda: ops.attention(X, X, X, dropout=1.0, rng=RNG), "dropout is 1.0, expected a number in [0, 1)"),
        (lambda: ops.attention(X, X, X, causal=TEXT), "causal is '2', expected True or False"),
        (lambda: ops.attention(X, X, X, scale=TEXT), "scale is '2', expected a number in [-3.4e38, 3.4e38]"),
        (lambda: ops.attention(X, X, X, dropout=TEXT), "dropout is '2', expected a number in [0, 1)"),
        (lambda: ops.attention(WIDE > 0, WIDE > 0, WIDE > 0), "found bool, expected float32 or float64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(AdtrainError) as caught:
        call()
    assert str(caught.value).startswith(f"attention: {message}")
    assert "\n" not in str(caught.value)


def test_options_that_are_text_or_traced_are_refused() -> None:
    with pytest.raises(AdtrainError, match=r"^self_attention: heads is '2', expected an integer"):
        ops.self_attention(WIDE, TEXT)
    with pytest.raises(AdtrainError, match=r"^dropout: stream is '2', expected an integer"):
        ops.dropout(X, 0.5, RNG, stream=TEXT)
    with pytest.raises(AdtrainError, match=r"^random_normal: stream is '2', expected an integer"):
        ops.random_normal(RNG, (2,), stream=TEXT)
    with pytest.raises(AdtrainError, match="the jitted function needs the value of a float argument"):
        ad.jit(lambda scale: ops.attention(X, X, X, scale=scale))(0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_members_of_self_attention_are_computed_by_one_equation_without_dropout(dropout: float) -> None:
    rng = np.random.default_rng(0)
    x = ad.array(rng.standard_normal((3, 2, 5, 12)))
    starts = np.tile(np.array([0, 0, 2, 2, 2], np.int32), (2, 1))
    more: dict[str, Any] = {"dropout": dropout, "rng": RNG} if dropout else {"starts": starts}

    def loss(x: ad.Array) -> Any:
        return (ops.self_attention(x, 2, causal=True, **more) ** 2).sum()

    both = ad.vmap(ad.value_and_grad(loss))
    values, grads = both(x)
    for i in range(3):
        value, grad = ad.value_and_grad(loss)(x[i])
        np.testing.assert_array_equal(values[i].numpy(), value.numpy())
        np.testing.assert_array_equal(grads[i].numpy(), grad.numpy())
    names = [equation.primitive.name for equation in stage(both, ()).program(x).equations]
    assert names.count("self_attention") == names.count("self_attention_grad") == (3 if dropout else 1)
