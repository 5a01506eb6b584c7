"""Pictures of Programs, functions and layers: what is drawn, and where."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_networks
import random_programs
import training_runs
from browser import LAYOUT_PROBLEMS, SCHEMES, WIDTHS, Browser
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import adtrain as ad
from adtrain import config, graphs, nn, ops, training
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda import H200
from adtrain.core.kernel import Target
from adtrain.graphs.details import FIRST, statistics
from adtrain.graphs.ladder import MOST_SCALARS, NO_FOLDS, Ladder, Roles, folds
from adtrain.graphs.network import network_picture
from adtrain.graphs.picture import FORMATS, Box, Graph, Picture
from adtrain.graphs.step import ladder_picture, program_graph
from adtrain.passes import SIMPLIFY
from adtrain.training.loop import batches_of

SVG = "{http://www.w3.org/2000/svg}"
CONFIGS = ("mlp", "lenet5", "resnet")
LAST = "readers_first"


def shown(graph: Graph) -> Picture:
    return graph.pictures[graph.shown]


@cache
def step(name: str, after: str = graphs.SIMPLIFIED, detail: bool = False) -> Graph:
    return graphs.step_graph(config.load(name), after, detail)


def box(picture: Picture, title: str, kind: str = "") -> Box:
    (found,) = [box for box in picture.boxes if " + ".join(box.title) == title and kind in box.kind]
    return found


def assert_drawn_well(picture: Picture) -> None:
    """Boxes lie apart, everything is inside the picture, and arrows begin and end at the borders of their boxes."""
    for a, b in combinations(picture.boxes, 2):
        apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
        assert apart, (a, b)
    points = [point for arrow in picture.arrows for point in arrow.points]
    points += [(box.x + box.width, box.y + box.height) for box in picture.boxes]
    assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in points)
    boxes = {box.id: box for box in picture.boxes}
    for arrow in picture.arrows:
        head, (x, y) = boxes[arrow.head], arrow.points[-1]
        assert head.x - 0.1 <= x <= head.x + head.width + 0.1
        assert head.y - 0.1 <= y <= head.y + head.height + 0.1


@given(random_programs.graphs.graphs(), st.booleans())
def test_each_value_that_another_box_reads_is_an_arrow(graph: Any, fused: bool) -> None:
    program = random_programs.program_of(graph)
    for apply in (*SIMPLIFY, *cpu_fusions()) if fused else ():
        program = apply(program)
    roles = Roles(program, [f"x{i}" for i in range(len(program.inputs))])
    ladder = Ladder(roles, {}, roles.rows, False)
    assert_drawn_well(ladder_picture(ladder, "random", ""))
    home = {e: node for node in ladder.nodes for e in node.equations}
    assert home.keys() == set(program.equations)
    computed = {v for e in program.equations for v in e.outputs}
    read = {
        (home[maker], home[e], ladder.viewed.get(v, v))
        for maker in program.equations
        for v in maker.outputs
        if ladder.viewed.get(v, v) in computed
        for e in program.readers.get(v, ())
        if home[maker] is not home[e]
    }
    drawn = {(flow.tail, flow.head, ladder.viewed.get(v, v)) for flow in ladder.flows for v in flow.values}
    assert drawn == read


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_kept_for_backward_are_those_of_forward_values_that_gradients_read(name: str) -> None:
    experiment = training.outline(config.load(name))
    program = experiment.step_program(passes=())
    roles = Roles(program, experiment.step_inputs)
    behind = {v: v for e in program.equations if e.phase == "forward" for v in e.outputs}
    for e in program.equations:
        if e.primitive.view and e.inputs:
            behind[e.outputs[0]] = behind.get(e.inputs[0], e.inputs[0])
    computed = {v for e in program.equations if e.phase == "forward" and not e.primitive.view for v in e.outputs}
    kept = {behind[v] for e in program.equations if e.phase == "backward" for v in e.inputs if v in behind} & computed
    expected = sum(v.size * v.type.dtype.itemsize for v in kept if v.size > MOST_SCALARS)
    assert Ladder(roles, {}, roles.rows, False).stored == expected


@pytest.mark.parametrize(
    ("name", "after"), [*((name, LAST) for name in CONFIGS), ("mlp", "trace"), ("lenet5", graphs.SIMPLIFIED)]
)
def test_a_step_has_a_box_for_each_layer_and_phase_and_every_equation_is_in_one(name: str, after: str) -> None:
    graph = step(name, after)
    assert_drawn_well(shown(graph))
    count = int(shown(graph).note.split()[0])
    details = [line for box in shown(graph).boxes for line in box.details.splitlines() if not line.startswith(" ")]
    assert len(details) == len(set(details)) == count
    assert len(shown(graph).boxes) <= 3 * len(nn.describe(*model_of(name))) + 5


def model_of(name: str) -> tuple[nn.Module, nn.Shape]:
    cfg = config.load(name)
    return config.build.model(cfg), cfg.model.input_shape


def test_values_have_the_names_that_users_know() -> None:
    graph = step("mlp")
    assert "images 60000×1×28×28" in ", ".join(box(shown(graph), "input").text)
    assert "0.weight 512×784, 0.bias 512" in box(shown(graph), "0 linear", "forward").text
    assert "0.linear.matmul: float32[128, 512] = matmul(input, 0.weight" in graph.text
    assert re.search(r"0.weight.grad: .* = matmul\(1.relu.grad_input, input", graph.text)
    assert re.search(r"adam.exp_avg.0.weight.new: .* = add\(optimizer.mul\w*, ", graph.text)
    assert not re.search(r"\b(v|in|c)\d+\b", graph.text)


def test_what_a_layer_keeps_is_a_horizontal_line_with_its_bytes() -> None:
    picture = shown(step("mlp"))
    kept = {arrow.label: arrow for arrow in picture.arrows if arrow.kind == "kept"}
    assert {"input, 401 kB", "1.relu, 262 kB", "3.relu, 131 kB"} <= kept.keys()
    assert all(len({y for _, y in arrow.points}) == 1 for arrow in kept.values())
    boxes = {box.id: box for box in picture.boxes}
    assert {(boxes[a.tail].kind, boxes[a.head].kind) for a in kept.values()} == {("forward", "backward")}


def test_fused_layers_share_a_box_and_a_page_has_each_pass_that_changes_the_program() -> None:
    graph = step("mlp", LAST)
    assert box(shown(graph), "0 linear + 1 relu").text[-1].endswith("FLOPs")
    counts = [int(picture.note.split()[0]) for picture in graph.pictures]
    assert counts[0] == 186
    assert counts[-1] == 22
    assert counts == sorted(counts, reverse=True)


def test_detail_draws_each_equation_before_the_update() -> None:
    picture = shown(step("mlp", detail=True))
    assert_drawn_well(picture)
    assert [box.title for box in picture.boxes].count(["matmul"]) == 8


def two_layers(params: Any, x: Any, labels: Any, rate: float = 0.1) -> Any:
    model = nn.Sequential(nn.Linear(4), nn.Tanh())
    grads = ad.grad(lambda params: ops.cross_entropy(model(params, x), labels))(params)
    return ad.tree.map(lambda p, g: p - rate * g, params, grads)


ARGUMENTS = (nn.Sequential(nn.Linear(4)).init(3)[0], np.zeros((2, 3), np.float32), np.zeros(2, np.int64))


def test_a_function_is_drawn_with_the_names_of_its_arguments(tmp_path: Path) -> None:
    graph = ad.graph(ad.jit(two_layers, static_argnames="rate"), *ARGUMENTS, rate=0.5)
    picture = shown(graph)
    assert_drawn_well(picture)
    assert picture.title == "two_layers(params, x, labels)"
    assert "x 2×3, params.0.weight 4×3" in ", ".join(box(picture, "0 linear", "forward").text)
    assert [heading.text for heading in picture.headings[:3]] == ["forward ↓", "backward ↑", "after backward"]
    assert sum("returned" in ", ".join(box.text) for box in picture.boxes) == 2
    assert "lr" not in graph.text
    assert "1.tanh, 32 B" in {arrow.label for arrow in picture.arrows if arrow.kind == "kept"}
    assert graph._repr_svg_() == graph.svg
    graph.save(tmp_path / "f.svg")
    assert (tmp_path / "f.svg").read_text() == graph.svg


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ad.graph(3), "jit: found 3, expected a function"),  # type: ignore[arg-type]
        (lambda: ad.graph(ops.sin, 1.0, after="fuse"), "unknown pass 'fuse'; "),
        (lambda: ad.graph(ops.sin, object()), "jit: found an argument of type object, expected arrays"),
        (lambda: ad.graph(ops.sin, 1.0).save("sin.jpg"), "sin.jpg: found the extension .jpg, expected .svg, .png, "),
    ],
)
def test_a_wrong_call_is_a_one_line_error(call: Any, message: str) -> None:
    with pytest.raises(ad.AdtrainError) as error:
        call()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("function", [lambda x: x, lambda x: ops.zeros(3), ops.sin])
def test_a_function_of_few_equations_is_drawn(function: Any) -> None:
    for convert in FORMATS.values():
        assert convert(ad.graph(function, 1.0))


@given(random_networks.samples.flatmap(lambda shape: st.tuples(st.just(shape), random_networks.networks(shape))))
def test_layers_of_any_network_are_drawn(drawn: Any) -> None:
    shape, model = drawn
    for horizontal in (False, True):
        picture = network_picture(model, shape, horizontal)
        assert_drawn_well(picture)
        drawn_layers = [box.title[0] for box in picture.boxes if box.details]
        names = [title.split()[0] for title in drawn_layers]
        owners = dict.fromkeys(  # the layers of a transformer layer are in its box
            f"{row.name} {row.kind}"
            if row.name in names
            else next(t for t in drawn_layers if row.name.startswith(f"{t.split()[0]}."))
            for row in nn.describe(model, shape)
        )
        assert list(owners) == drawn_layers


NET = """\
name: net
data: {path: nowhere, batch_size: 8}
model:
  input: [1, 8, 8]
  layers:
    - conv2d: {out_channels: 4, kernel_size: 3, padding: 1, bias: false}
    - relu
    - residual: [batch_norm2d]
    - concat:
        - [relu]
        - [max_pool2d: {kernel_size: 3, stride: 1, padding: 1}]
    - flatten
    - linear: 10
loss: cross_entropy
optimizer: adam
training: {epochs: 1}
"""


def test_a_layer_has_its_kind_options_and_parameters_and_arrows_have_changed_shapes(tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text(NET)
    picture = shown(graphs.network_graph(config.load(str(tmp_path / "net.yaml"))))
    assert [(box.kind, *box.title, *box.text) for box in picture.boxes] == [
        ("end", "input"),
        ("convolution", "0 conv2d", "3×3, 1 → 4, pad 1, no bias", "36 parameters"),
        ("activation", "1 relu"),
        ("normalisation", "2.body.0 batch_norm2d", "8 parameters"),
        ("end", "+"),
        ("activation", "3.0.0 relu"),
        ("pooling", "3.1.0 max_pool2d", "3×3, stride 1, pad 1"),
        ("end", "‖"),
        ("other", "4 flatten"),
        ("linear", "5 linear", "512 → 10", "5,130 parameters"),
        ("end", "cross_entropy loss"),
    ]
    assert [arrow.label for arrow in picture.arrows if arrow.label] == ["1×8×8", "4×8×8", "8×8×8", "512", "10"]
    assert [frame.title for frame in picture.frames] == ["2 residual, 8 parameters", "3 concat"]
    assert picture.note == "5,174 parameters, float32"


def test_text_in_an_svg_and_a_page_is_escaped() -> None:
    bad = '<script>alert("x")</script> & \u202e'
    picture = Picture(bad, bad, 100, 100, [Box("b0", "end", [bad], [bad], 0, 0, 50, 20, details=bad)], [])
    graph = Graph([picture], 0, "")
    texts = {element.text for element in ElementTree.fromstring(graph.svg).iter(f"{SVG}text")}
    assert texts == {bad.replace("\u202e", "\\u202e")}
    assert "<script>alert" not in graph.html


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("mlp", WIDTHS[0], SCHEMES[0]), pytest.param("resnet", WIDTHS[1], SCHEMES[1], marks=pytest.mark.exhaustive)],
)
def test_a_page_shows_equations_on_a_click_and_passes_on_a_slider(
    name: str, width: int, scheme: str, browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "step.html"
    step(name).save(page)
    browser.open(page, width, scheme)
    assert browser.run(LAYOUT_PROBLEMS) + browser.low_contrasts() == []
    visible = "document.querySelector('.view:not([hidden])')"
    background = browser.run(f"getComputedStyle({visible}.querySelector('.paper')).fill")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")

    details = "document.getElementById('details')"
    title = "forward" in browser.run(f"{visible}.querySelector('.box').getAttribute('class')")
    assert title
    assert browser.run(f"{details}.hidden")
    browser.run(f"{visible}.querySelector('.box').dispatchEvent(new MouseEvent('click'))")
    assert "take(order, log.position" in browser.run(f"{details}.textContent")
    assert browser.run(LAYOUT_PROBLEMS) == []
    browser.run(f"{visible}.querySelector('.box').focus()")
    for key, hidden in (("Enter", True), (" ", False), ("Escape", True)):
        pressed = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}})"
        browser.run(f"document.activeElement.dispatchEvent({pressed})")
        assert browser.run(f"{details}.hidden") == hidden

    counts = []
    slider = "document.getElementById('pass')"
    for i in range(browser.run(f"Number({slider}.max)") + 1):
        browser.run(f"{slider}.value = {i}; {slider}.dispatchEvent(new Event('input'))")
        counts.append(int(browser.run("document.querySelector('output').textContent.match(/(\\d+) equations/)[1]")))
        assert browser.run("document.querySelectorAll('.view:not([hidden])').length") == 1
    assert counts == [int(picture.note.split()[0]) for picture in step(name).pictures]
    assert counts[-1] < counts[0] / 4
    assert browser.run(LAYOUT_PROBLEMS) == []
    assert browser.errors() == []


@given(
    hnp.arrays(
        np.float32, hnp.array_shapes(max_dims=3), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
    )
)
def test_statistics_are_those_of_numpy(x: np.ndarray) -> None:
    found, finite = statistics(x), x[np.isfinite(x)].astype(np.float64)
    assert (found.nan, found.infinite) == (np.isnan(x).sum(), np.isinf(x).sum())
    assert found.zeros == np.mean(x == 0)
    assert sum(found.histogram) == finite.size
    if finite.size:
        assert (found.low, found.high) == (finite.min(), finite.max())
        assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * np.abs(finite).max())
        assert found.deviation == pytest.approx(finite.std(), rel=1e-6, abs=1e-7 * np.abs(finite).max())
    assert len(found.first) == min(x.size, FIRST)


def with_values(tmp_path: Path, *overrides: str) -> tuple[training.Experiment, Graph]:
    cfg = config.load(training_runs.write_config(tmp_path), list(overrides))
    return training.prepare(cfg), graphs.step_graph(cfg, values=graphs.first_batch_inputs)


def test_arrows_have_the_statistics_of_the_first_batch(tmp_path: Path) -> None:
    experiment, graph = with_values(tmp_path)
    arrows = shown(graph).arrows
    assert all(arrow.values for arrow in arrows)
    found = {name: x for arrow in arrows for name, x in arrow.values}
    batch = next(iter(batches_of(experiment, 1)))
    images = (experiment.train.images[batch] / experiment.network.scale - experiment.network.mean[0]) / (
        experiment.network.std[0]
    )
    assert found["input"].mean == pytest.approx(images.mean(), abs=1e-6)
    assert found["input"].low == pytest.approx(images.min())
    assert {"0.weight.grad", "1.relu"} <= found.keys()
    assert not any(arrow.wrong for arrow in arrows)


def test_an_arrow_with_nan_is_marked(tmp_path: Path) -> None:
    x = np.array([0.0, -1.0], np.float32)
    program, _ = ad.jit(lambda x: ops.exp(ops.log(x))).trace(ad.array(x))
    graph = program_graph(program, ["x"], "", {}, graphs.SIMPLIFIED, False, arguments=lambda: [x])
    (arrow,) = (arrow for arrow in shown(graph).arrows if arrow.values)
    assert arrow.wrong
    assert 'class="line flow wrong"' in graph.svg


@pytest.mark.parametrize("target", [None, H200], ids=["cpu", "gpu"])
def test_every_computed_equation_has_the_text_of_its_kernel(target: Target | None) -> None:
    graph = graphs.step_graph(config.load("mlp-small"), target=target)
    numbers = {number for box in graph.pictures[-1].boxes for number in box.kernels}
    found = graph.make_kernels()
    assert numbers == set(range(len(found)))
    assert all("{" in kernel.text for kernel in found)
    titles = "\n".join(kernel.title for kernel in found)
    assert ("row_fused" if target else "gemm_float32") in titles


def test_a_box_has_the_passes_that_change_its_equations() -> None:
    passes = box(shown(step("mlp")), "0 linear", "forward").passes
    assert passes == ["trace: 3 equations", "fuse_loops: 2 equations", "fuse_product: 1 equation"]


def test_a_page_shows_values_kernels_and_zoom(browser: Browser, tmp_path: Path) -> None:
    _, graph = with_values(tmp_path)
    graph.save(tmp_path / "values.html")
    for width, scheme in zip(WIDTHS, SCHEMES, strict=True):
        browser.open(tmp_path / "values.html", width, scheme)
        visible, details = "document.querySelector('.view:not([hidden])')", "document.getElementById('details')"
        browser.run(f"{visible}.querySelector('.edge').dispatchEvent(new MouseEvent('click'))")
        assert "zeros" in browser.run(f"{details}.textContent")
        assert browser.run(f"{details}.querySelectorAll('svg rect').length") > 0
        browser.run(f"[...{visible}.querySelectorAll('.box')].at(1).dispatchEvent(new MouseEvent('click'))")
        assert "static" in browser.run(f"{details}.querySelector('.kernel').textContent")
        drawn = f"{visible}.querySelector('svg').getBoundingClientRect().width"
        before = browser.run(drawn)
        browser.run("document.querySelector('[data-zoom=\"1.25\"]').click()")
        assert browser.run(drawn) > before
        browser.run("document.querySelector('[data-zoom=\"\"]').click()")
        assert browser.run(drawn) <= browser.run(f"{visible}.clientWidth") + 1
        assert browser.run(LAYOUT_PROBLEMS) + browser.errors() == []


BLOCKS = """
name: blocks
data: {dataset: mnist, batch_size: 4}
model:
  input: [1, 28, 28]
  layers: [{reshape: [16, 49]}, {linear: 8}, BLOCKS, flatten, {linear: 10}]
loss: cross_entropy
optimizer: {sgd: {lr: 0.1}}
training: {epochs: 1}
"""


@pytest.mark.parametrize(
    ("widths", "drawn"),
    [
        ([16] * 4, ["2…5.norm1 layer_norm"]),
        pytest.param([16] * 2, ["2.norm1 layer_norm", "3.norm1 layer_norm"], marks=pytest.mark.exhaustive),
        pytest.param([16, 16, 16, 24], ["2…4.norm1 layer_norm", "5.norm1 layer_norm"], marks=pytest.mark.exhaustive),
    ],
    ids=["equal", "two", "of another width"],
)
def test_equal_blocks_are_drawn_once(widths: list[int], drawn: list[str], tmp_path: Path) -> None:
    layers = ", ".join(
        f"{{transformer_encoder_layer: {{nhead: 2, dim_feedforward: {width}, dropout: 0}}}}" for width in widths
    )
    (tmp_path / "blocks.yaml").write_text(BLOCKS.replace("BLOCKS", layers))
    cfg = config.load(str(tmp_path / "blocks.yaml"))
    graph = graphs.step_graph(cfg)
    for picture in graph.pictures:
        assert_drawn_well(picture)
    picture = shown(graph)
    found = [box.title[0] for box in picture.boxes if "norm1" in box.title[0] and box.kind == "forward"]
    assert found == drawn
    first = next(box for box in picture.boxes if box.title[0] == drawn[0])
    assert first.details.count("standardize") >= len(widths) - len(drawn) + 1


def test_layers_in_a_row_are_no_blocks() -> None:
    assert folds(training.outline(config.load("mlp")).step_program(passes=())) == NO_FOLDS
