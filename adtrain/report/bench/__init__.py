"""A result of `adtrain bench` as a page of HTML, made of its JSON alone.

text = report.bench.page.render(json.loads(Path("result.json").read_text()))
"""

from __future__ import annotations

from adtrain.report.bench import page

__all__ = ["page"]
