"""Pages show any text as text: names in runs, data and results never become tags or attributes."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup, escape

import adtrain
from adtrain import config
from adtrain.bench import compare as bench_compare
from adtrain.bench import page as bench_page
from adtrain.metrics import ByClass
from adtrain.report import Predictions, Record, pages
from adtrain.templates import environment
from adtrain.text import visible
from adtrain.training import ClassScore, Epoch, Summary
from adtrain.training.progress import Stopped
from adtrain.training.summary import BestEpoch, Memory, OperationTime, Span, StepTimes

PAYLOAD = """ " onx='1' <script>&lt;"""
KEYS = ("kind", "over")
"""Fields of results that are names of other fields."""
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PACKAGE = Path(adtrain.__file__).parent


class Found(HTMLParser):
    """The tags, names of attributes, and all text of a page, with the texts of attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_is_text(content: str) -> None:
    found = Found(content)
    assert "script" not in found.tags
    assert "onx" not in found.attributes
    assert PAYLOAD.strip() in found.text


def hostile(value: Any) -> Any:
    """The value, with PAYLOAD at the end of each text in it."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: hostile(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, dict):
        return {key: item if key in KEYS else hostile(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if isinstance(value, ClassScore) else type(value)(map(hostile, value))
    return value + PAYLOAD if isinstance(value, str) else value


texts = st.text(st.characters(exclude_categories=["Cs"]))  # Hypothesis takes 2 s to find the characters of st.text()


@given(texts, texts, st.floats(0, 1))
def test_values_are_escaped_and_characters_that_browsers_obey_are_shown(text: str, other: str, number: float) -> None:
    template = environment().from_string('<i title="{{ a }}">{{ b }}</i>{{ "%.2f" | format(c) }}{{ d }}')
    shown, tooltip = ("\n".join(map(visible, x.split("\n"))) for x in (text, other))
    expected = f'<i title="{escape(tooltip)}">{escape(shown)}</i>{number:.2f}<b>'
    assert template.render(a=other, b=text, c=number, d=Markup("<b>")) == expected


def test_every_text_of_a_run_is_shown_as_text() -> None:
    score = ClassScore(0.5, 0.5)
    row = OperationTime("matmul", "0.linear", "forward", 1, 0.5, 1.0, 8, 8, 1.0, 1.0)
    summary = Summary(
        config={}, device="cpu", device_name="A CPU", precision="float32", seed=0, parameters=9, ended="finished",
        best=BestEpoch("train_loss", 0.5, 1), model_epoch=1, epochs=1, steps=5, batch_size=4, train_seconds=1.0,
        total_seconds=2.0, spans=(Span("data", 0.0, 1.0),),
        images_per_second=9.0, step_ms=StepTimes(1.0, 1.0, 1.0), memory=Memory(1, 1), train=score,
        validation=None, test=score,
        metrics={"f1": ByClass(0.5, {"cat" + PAYLOAD: 0.5})}, ops=(row,) * 20,
        ops_sum_ms=9.0, ops_to_step_ratio=0.5, versions={"adtrain": "0"},
    )  # fmt: skip
    images, labels = np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 1, 1])
    predictions = Predictions(images, labels, ("cat" + PAYLOAD, "dog" + PAYLOAD), np.eye(2)[[0, 0, 1]])
    lines = [Epoch(1, 5, score, None, 1.0, 1.0), hostile(Stopped("interrupted", 1, 5))]
    finished = Record(Path("run" + PAYLOAD), config.load("smoke"), lines, hostile(summary))
    content = pages.run_page(finished, predictions)
    assert_is_text(content)
    for name in ("cpu", "A CPU", "0.linear", "forward", "adtrain 0", "data", "finished", "cat", "dog", "run"):
        assert f"{name}{PAYLOAD}" in Found(content).text, name
    assert_is_text(pages.run_page(replace(finished, summary=None), "no model" + PAYLOAD))


@pytest.mark.parametrize(
    "name", ["cpu-step-smoke", "cpu-operations", "cpu-mlp-small-64-sgd", "gpu-analysis", "gpu-candidates"]
)
def test_every_text_of_a_result_is_shown_as_text(name: str) -> None:
    values = hostile(json.loads((RESULTS / f"{name}.json").read_text()))
    assert_is_text(bench_page.render(bench_compare.parse(values, name)))


def test_html_is_written_only_in_templates() -> None:
    """No string of the modules has a closing tag, and no text is declared to be Markup."""
    sources = [path for folder in ("report", "bench", "api") for path in (PACKAGE / folder).glob("*.py")]
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.search(r"</[a-z]+>", node.value), node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Markup":
            assert not node.args, ast.unparse(node)
