from __future__ import annotations

import graphlib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import Result
from report_runs import command

from adtrain import config, graph
from adtrain.core.program import Program

LAYERS = """\
name: net
data: {path: nowhere, batch_size: 8}
model:
  input: [1, 8, 8]
  layers:
    - conv2d: {out_channels: 4, kernel_size: 3}
    - batch_norm2d
    - residual:
        body:
          - conv2d: {out_channels: 6, kernel_size: 3, padding: 1}
        shortcut:
          - conv2d: {out_channels: 6, kernel_size: 1}
    - residual:
        - relu
    - concat:
        - [relu]
        - [tanh]
    - flatten
    - linear: 10
loss: cross_entropy
optimizer: adam
training: {epochs: 1}
"""
BLOCK = "    - residual: [conv2d: {out_channels: 4, kernel_size: 3, padding: 1}, batch_norm2d, relu]\n"
needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")


def run(*arguments: str, expect: int = 0) -> Result:
    return command("graph", *arguments, expect=expect)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "net.yaml").write_text(LAYERS)
    return str(tmp_path / "net.yaml")


def written(path: str, *options: str, name: str = "net.dot") -> str:
    """The text that the command writes for the config, into the file `name` next to it."""
    output = Path(path).parent / name
    run(path, "-o", str(output), *options)
    return output.read_text()


class Picture:
    """A parsed DOT text."""

    def __init__(self, text: str) -> None:
        self.nodes: dict[str, str] = dict(re.findall(r"^ *(n\d+) \[label=(.*)\]$", text, re.MULTILINE))
        self.edges: list[tuple[str, str, str]] = re.findall(r"^ *(n\d+) -> (n\d+) \[(.*)\]$", text, re.MULTILINE)
        self.frames: list[str] = re.findall(r'subgraph cluster_\d+ {\n *graph \[label="([^"]*)"', text)

    def label(self, node: str) -> str:
        return self.nodes[node].split('"')[1].replace("\\n", " ")

    def named(self, start: str) -> str:
        """The only node whose label begins with `start`."""
        (found,) = [node for node, rest in self.nodes.items() if rest.startswith(f'"{start}')]
        return found

    def arrows(self) -> set[tuple[str, str, str]]:
        """(maker, reader, label) of all visible arrows."""
        found = set()
        for tail, head, rest in self.edges:
            if "invis" not in rest and "arrowhead" not in rest:
                ends = (head, tail) if 'dir="back"' in rest else (tail, head)
                found.add((*ends, rest.split('"')[1]))
        return found


def test_each_layer_is_a_node_with_kind_shape_and_parameters(path: str) -> None:
    picture = Picture(written(path))
    assert sorted(picture.label(node) for node in picture.nodes) == sorted(
        [
            "input",
            "0 conv2d 4x6x6 40 parameters",
            "1 batch_norm2d 4x6x6 8 parameters",
            "2.body.0 conv2d 6x6x6 222 parameters",
            "2.shortcut.0 conv2d 6x6x6 30 parameters",
            "+",
            "3.body.0 relu 6x6x6",
            "+",
            "4.0.0 relu 6x6x6",
            "4.1.0 tanh 6x6x6",
            "concat",
            "5 flatten 432",
            "6 linear 10 4,330 parameters",
            "loss cross_entropy",
        ]
    )


def test_arrows_have_shapes_and_containers_are_frames(path: str) -> None:
    text = written(path)
    picture = Picture(text)
    arrows = {(picture.label(a).split()[0], picture.label(b).split()[0], shape) for a, b, shape in picture.arrows()}
    assert {
        ("input", "0", "1x8x8"),
        ("1", "2.body.0", "4x6x6"),
        ("1", "2.shortcut.0", "4x6x6"),
        ("2.shortcut.0", "+", "6x6x6"),
        ("+", "+", "6x6x6"),
        ("concat", "5", "12x6x6"),
        ("6", "loss", "10"),
    } <= arrows
    assert picture.frames == ["2 residual: 252 parameters", "3 residual: 0 parameters", "4 concat: 0 parameters"]
    assert 'label="net: 4,630 parameters, float32"' in text


def test_a_network_as_text_is_a_table_of_layers(path: str) -> None:
    lines = [line.split() for line in written(path, name="net.txt").splitlines()]
    assert lines[0] == ["layer", "kind", "output", "parameters"]
    assert ["2.body.0", "conv2d", "6x6x6", "222"] in lines
    assert lines[-2:] == [["loss", "cross_entropy"], ["total", "4,630"]]


def test_overrides_change_the_picture(path: str) -> None:
    assert "6 linear\\n7\\n" in written(path, "--set", "model.layers.6.linear.out_features=7")


def program_of(path: str, after: str) -> Program:
    return graph.step_program(config.load(path), after)


def test_a_program_as_text(path: str) -> None:
    for after in ("trace", "remove_dead_code"):
        assert written(path, "--program", "--after", after, name="p.txt") == f"{program_of(path, after)}\n"
    assert len(program_of(path, "trace").equations) > len(program_of(path, "remove_dead_code").equations)


def test_every_equation_is_a_node_in_its_layers_frame(path: str) -> None:
    program = program_of(path, "trace")
    text = written(path, "--program", "--after", "trace")
    picture = Picture(text)
    assert {"0.conv2d", "2.residual", "body.0.conv2d", "shortcut.0.conv2d", "loss", "optimizer"} <= set(picture.frames)
    for equation in program.equations:
        if equation.scope != "optimizer":
            results = ", ".join(program.names[v] for v in equation.outputs)
            node = picture.named(f'{results} = {equation.primitive.name}"')
            assert ('fillcolor="#E69F00"' in picture.nodes[node]) == (equation.phase == "backward")
            for v in equation.inputs:
                assert f"{program.names[v]}: {v.type}" in text


def test_arrows_match_the_inputs_of_the_equations(path: str) -> None:
    program = program_of(path, "trace")
    picture = Picture(written(path, "--program", "--after", "trace"))
    reads = {(program.names[v], program.names[e.outputs[0]]) for e in program.equations for v in e.inputs}
    drawn = 0
    for maker, reader, label in picture.arrows():
        results = picture.label(reader).split(" = ")[0].split(", ")[0]
        if re.match(r"v\d+$", results):
            name = label.split(":")[0]
            assert (name, results) in reads
            assert name in picture.label(maker).split(" = ")[0].split(", ")
            drawn += 1
    assert drawn > 100


def test_only_arrows_of_values_saved_for_backward_are_thick(path: str) -> None:
    program = program_of(path, "trace")
    phases = {program.names[v]: e.phase for e in program.equations for v in e.outputs}
    picture = Picture(written(path, "--program", "--after", "trace"))
    seen = set()
    for tail, head, rest in picture.edges:
        ends = [
            picture.label(node).split(" = ")[0].split(", ")[0] for node in (tail, head) if " = " in picture.nodes[node]
        ]
        if len(ends) == 2 and "invis" not in rest and "arrowhead" not in rest:
            saved = [phases[end] for end in ends] == ["forward", "backward"]
            assert ("penwidth" in rest) == saved
            seen.add(saved)
    assert seen == {True, False}
    assert re.search(r"<B>v\d+: [^<]* saved by ", "".join(picture.nodes.values()))


def test_phases_differ_in_more_than_colour(path: str) -> None:
    picture = Picture(written(path, "--program"))
    looks = [
        re.sub(r'fillcolor="[^"]*"', "", picture.nodes[picture.named(f'{phase}"')]) for phase in graph.program.PHASES
    ]
    assert len({look.partition('"')[2].partition('"')[2] for look in looks}) == 3


@pytest.mark.parametrize("after", ["trace", "remove_dead_code", None])
def test_the_graph_has_no_cycle(path: str, after: str | None) -> None:
    picture = Picture(written(path, "--program", *(["--after", after] if after else [])))
    order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()  # before 3.11 it takes no [str] at run time
    for tail, head, _ in picture.edges:
        order.add(head, tail)
    order.prepare()  # CycleError


def test_an_optimizer_with_many_equations_is_one_node(path: str) -> None:
    picture = Picture(written(path, "--program", "--after", "trace"))
    count = sum(e.scope == "optimizer" for e in program_of(path, "trace").equations)
    assert count > graph.program.LEAST_GROUPED
    picture.named(f"{count} equations\\n")


@pytest.mark.parametrize("options", [[], ["--program"]])
def test_the_text_does_not_depend_on_the_hash_seed(path: str, options: list[str]) -> None:
    text = written(path, *options)
    other = Path(path).parent / "other.dot"
    command = [
        sys.executable,
        "-c",
        "from adtrain.cli.main import main; main()",
        "graph",
        path,
        "-o",
        str(other),
        *options,
    ]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "77"})
    assert other.read_text() == text


def test_an_unknown_pass_is_refused_with_the_nearest_name(path: str, tmp_path: Path) -> None:
    result = run(path, "-o", str(tmp_path / "x.dot"), "--program", "--after", "remove_ded_code", expect=2)
    (line,) = result.stderr.splitlines()
    assert "unknown pass 'remove_ded_code'; did you mean remove_dead_code?" in line
    assert not (tmp_path / "x.dot").exists()


def test_after_is_refused_without_program(path: str, tmp_path: Path) -> None:
    assert "--after needs --program" in run(path, "-o", "x.dot", "--after", "trace", expect=2).stderr


@pytest.mark.parametrize("name", ["net.png", "net", "dot"])
def test_an_unknown_extension_is_a_one_line_error(path: str, name: str) -> None:
    (line,) = run(path, "-o", name, expect=2).stderr.splitlines()
    assert line.startswith(f"adtrain: error: {name}: unknown extension ")
    assert line.endswith("expected .svg, .dot or .txt")


def test_a_file_that_cannot_be_written_is_a_one_line_error(path: str, tmp_path: Path) -> None:
    (line,) = run(path, "-o", str(tmp_path / "absent" / "net.dot"), expect=2).stderr.splitlines()
    assert line == f"adtrain: error: {tmp_path}/absent/net.dot: cannot be written (No such file or directory)"


def test_a_layer_that_does_not_fit_is_a_one_line_error(path: str, tmp_path: Path) -> None:
    result = run(path, "-o", str(tmp_path / "x.dot"), "--set", "model.layers.0.conv2d.kernel_size=9", expect=2)
    assert len(result.stderr.splitlines()) == 1


def test_without_graphviz_an_existing_svg_is_unchanged(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "net.svg"
    old.write_text("old")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    (line,) = run(path, "-o", str(old), expect=2).stderr.splitlines()
    assert "apt install graphviz" in line
    assert ".dot" in line
    assert old.read_text() == "old"


def test_a_failure_of_graphviz_is_a_one_line_error(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho 'Error: no room\nand more' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (line,) = run(path, "-o", str(tmp_path / "net.svg"), expect=2).stderr.splitlines()
    assert line == "adtrain: error: dot: Error: no room"


@needs_graphviz
@pytest.mark.parametrize("options", [[], ["--program"]])
def test_graphviz_draws_fifty_layers(path: str, options: list[str]) -> None:
    Path(path).write_text(LAYERS.replace("    - residual:\n        body", f"{BLOCK * 12}    - residual:\n        body"))
    root = ElementTree.fromstring(written(path, *options, name="net.svg"))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert ({"13.body.1 batch_norm2d"} if not options else {"13.residual", "optimizer", "legend"}) <= texts


@needs_graphviz
def test_special_characters_of_dot_are_escaped() -> None:
    text = 'a "b" \\N <c> & d \\'
    dot = graph.dot.Dot(text)
    dot.node(text, text)
    found = [element.text for element in ElementTree.fromstring(graph.svg(dot.text())).iter()]
    assert found.count(text) == 3
