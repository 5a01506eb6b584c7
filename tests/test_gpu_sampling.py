"""Sampling on a GPU: token by token with caches, against whole sequences."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from test_sampling import CLASSES, LAYERS, LENGTH, model, trained

from adtrain import nn
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.staging import stage
from adtrain.nn import Mode
from adtrain.passes import ALL
from adtrain.training import sampling

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_a_token_after_the_other_has_the_outputs_of_the_whole_sequence(gpu: Any, options: dict[str, Any]) -> None:
    layers = model(**options)
    params, _ = tree.map(lambda x: x.to("gpu"), layers.init((LENGTH,), 0, np.float32))
    classes = np.random.default_rng(0).integers(0, CLASSES, (2, LENGTH))
    expected = layers.forward(params, {}, array(classes, device="gpu"), Mode(training=False))[0].numpy()
    cache = tree.map(lambda x: x.to("gpu"), layers.new_cache((LENGTH,), 2, np.dtype(np.float32)))

    def step(cache: Any, params: Any, token: Any, position: Any) -> Any:
        mode = Mode(training=False, token=nn.Token(position, LENGTH))
        return layers.forward(params, cache, token, mode)

    staged = stage(step, ALL, donate=(0,))
    for i in range(LENGTH):
        token, position = (array(x, device="gpu") for x in (classes[:, i : i + 1], np.array([i, i])))
        found, cache = staged(cache, params, token, position)
        np.testing.assert_allclose(found.numpy()[:, 0], expected[:, i], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("options", LAYERS[2:], ids=str)
def test_samples_are_those_of_the_cpu(gpu: Any, options: dict[str, Any]) -> None:
    on_cpu = trained(model(**options))
    on_gpu = trained(model(**options))
    object.__setattr__(on_gpu, "params", tree.map(lambda x: x.to("gpu"), on_gpu.params))
    prompts = [np.array([1], np.int32), np.array([2, 3, 4], np.int32)]
    for drawing in (sampling.Drawing(seed=3), sampling.Drawing(top_k=4, top_p=0.9)):
        of_cpu, of_gpu = (
            list(islice(sampling.sample(run, device, prompts, drawing), 3 * LENGTH))
            for run, device in ((on_cpu, "cpu"), (on_gpu, "gpu"))
        )
        np.testing.assert_array_equal(of_gpu, of_cpu)
