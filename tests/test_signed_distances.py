"""Meshes: files, points on their surfaces, and signed distances; a network that learns these."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from command_line import command, invoke
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import train

from adtrain.data import DataError, meshes
from adtrain.training.equations import distance_samples, signed_distances

pytestmark = pytest.mark.unfused

SIDES = np.array([0.8, 1.0, 0.4])
CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * SIDES / 2
FACES = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
"""A box around the origin, whose faces have four corners."""
TRIANGLES = np.array([CORNERS[list(face)] for a, b, c, d in FACES for face in ((a, b, c), (a, c, d))])


def obj(faces: list[str]) -> str:
    lines = [f"v {x} {y} {z} 1.0" for x, y, z in CORNERS]
    return "\n".join(["# a box", "o box", *lines, "vn 0 0 1", "", *faces]) + "\n"


def distances(points: np.ndarray) -> np.ndarray:
    """From the box, by its closed form."""
    beyond = np.abs(points) - SIDES / 2
    found: np.ndarray = np.linalg.norm(np.maximum(beyond, 0), axis=1) + np.minimum(beyond.max(axis=1), 0)
    return found


@pytest.mark.parametrize(
    "corner", [lambda i: f"{i + 1}", lambda i: f"{i - 8}", lambda i: f"{i + 1}/{i + 1}/1", lambda i: f"{i + 1}//1"]
)
def test_faces_of_an_obj_file_are_divided_into_triangles(corner: object, tmp_path: Path) -> None:
    assert callable(corner)
    (tmp_path / "box.obj").write_text(obj(["f " + " ".join(map(corner, face)) for face in FACES]))
    np.testing.assert_array_equal(meshes.read_mesh(tmp_path / "box.obj"), TRIANGLES)


def test_both_kinds_of_stl_files_have_the_triangles(tmp_path: Path) -> None:
    body = b"".join(struct.pack("<12fH", 0, 0, 0, *x.ravel(), 0) for x in TRIANGLES)
    (tmp_path / "box.stl").write_bytes(b"solid box".ljust(80) + struct.pack("<I", len(TRIANGLES)) + body)
    facets = [
        "facet normal 0 0 0 outer loop\n" + "".join(f"vertex {x} {y} {z}\n" for x, y, z in corners) + "endloop endfacet"
        for corners in TRIANGLES
    ]
    (tmp_path / "text.stl").write_text("\n".join(["solid box", *facets, "endsolid box"]))
    for name in ("box.stl", "text.stl"):
        np.testing.assert_allclose(meshes.read_mesh(tmp_path / name), TRIANGLES, rtol=1e-7)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.obj", "v 0 0 0\nf 1 2 3\n", "line 2: found the vertex 2, expected 1 to 1"),
        ("a.obj", "v 0 0 0\nf 0 1 1\n", "line 2: found the vertex 0"),
        ("a.obj", "v 0 0 0\nf 1 1\n", "line 2: found a face of 2 corners, expected at least 3"),
        ("a.obj", "v 0 0 0\nf a b c\n", "line 2: found the corner 'a', expected the number of a vertex"),
        ("a.obj", "v 0 x 0\n", "line 1: found '0 x 0', expected the numbers x, y and z"),
        ("a.obj", "v 0 0 0\n", "found no faces"),
        ("a.obj", "v 0 0 0\nv 1 1 1\nf 1 2 2\n", "found no triangle with an area"),
        ("a.obj", "v 0 0 nan\nv 1 1 1\nv 1 0 1\nf 1 2 3\n", "found a coordinate that is not finite"),
        ("a.stl", "solid\nvertex 1 2 3\n", "found 1 lines with a vertex, expected 3 for each triangle"),
        ("a.stl", "ply", "found 3 bytes, expected a binary STL file"),
        ("a.ply", "ply", "found the extension '.ply', expected .obj or .stl"),
    ],
)
def test_damaged_meshes_are_one_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as error:
        meshes.read_mesh(tmp_path / name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=10)
@given(st.integers(0, 999), st.sampled_from([1, -1]), st.floats(-50, 50))
def test_distances_from_a_box_are_its_closed_form(seed: int, orientation: int, shift: float) -> None:
    points = np.random.default_rng(seed).uniform(-1, 1, (60, 3))
    found = signed_distances(TRIANGLES[:, ::orientation] + shift, points + shift)
    np.testing.assert_allclose(found, distances(points), atol=1e-5)


def test_a_mesh_may_have_holes() -> None:
    points = np.random.default_rng(0).uniform(-0.15, 0.15, (50, 3))
    assert (signed_distances(TRIANGLES[1:], points) < 0).all()


def test_samples_are_on_the_surface_near_it_and_in_the_box() -> None:
    low, high = -np.ones(3), np.ones(3)
    found = distance_samples(TRIANGLES, low, high, 4000, seed=0)
    points, given = found[:, :3], found[:, 3]
    np.testing.assert_allclose(given, distances(points), atol=1e-6)
    on = given == 0
    assert on.sum() == 1000
    assert (np.abs(given) < 0.1).mean() > 0.7
    assert ((points >= low) & (points <= high)).all()
    top = np.isclose(points[on, 2], SIDES[2] / 2, atol=1e-9)  # a face that has 0.8 of 3.04 of the area
    assert top.mean() == pytest.approx(0.8 / 3.04, abs=0.04)


CONFIG = """\
name: box
data:
  points: {x: [-1, 1], y: [-1, 1], z: [-1, 1]}
  sdf: FOLDER/box.obj
  sdf_points: 2048
  measurements_weight: 100
  batch_size: 256
  steps_per_epoch: 40
  test_points: 729
model: {input: [x, y, z], output: [d], layers: [{linear: 16}, tanh, {linear: 16}, tanh, {linear: 1}]}
loss:
  - {equation: "d_x^2 + d_y^2 + d_z^2 - 1"}
optimizer: {adam: {lr: 0.01}}
training: {epochs: 5}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "box.obj").write_text(obj(["f " + " ".join(str(i + 1) for i in face) for face in FACES]))
    (tmp_path / "box.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    return tmp_path


def test_a_network_learns_the_signed_distance_and_its_page_shows_a_slice(folder: Path) -> None:
    run = train(folder / "box.yaml", folder / "run")
    assert json.loads((run / "summary.json").read_text())["test"]["error"] < 0.3
    command("report", run)
    page = (run / "report.html").read_text()
    assert re.findall(r"<figcaption><strong>(.*?)</strong>", page)[-3:] == [
        "d",
        "error of d",
        "d_x^2 + d_y^2 + d_z^2 - 1",
    ]
    assert page.count("z = 0, ") == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ["data.points.z=[-0.1, 1]"],
            "data.points: z: found [-0.1, 1], expected an interval that contains [-0.2, 0.2]",
        ),
        (["data.reference=x"], "no reference together with sdf, which has both"),
        (
            ["model.output=[d, e]", "model.layers.4.linear=2"],
            "data.sdf: found 3 variables and 2 outputs, expected",
        ),
        (["data.sdf=null"], "sdf together with sdf_points"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(override: list[str], message: str, folder: Path) -> None:
    overrides = [word for each in override for word in ("--set", each)]
    found = invoke("train", folder / "box.yaml", *overrides, "--output-dir", folder / "run")
    assert found.exit_code == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1


def test_the_example_writes_a_closed_knot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import knot_mesh

    vertices, faces = knot_mesh.tube(24, 6)
    edges = [tuple(sorted(edge)) for a, b, c, d in faces for edge in ((a, b), (b, c), (c, d), (d, a))]
    assert {edges.count(edge) for edge in edges} == {2}
    corners = vertices[faces]
    triangles = np.concatenate([corners[:, [0, 1, 2]], corners[:, [0, 2, 3]]])
    assert (signed_distances(triangles, knot_mesh.centres(np.arange(5.0))) < 0).all()
