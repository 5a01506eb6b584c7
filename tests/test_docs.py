"""The documents are complete, and name only what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from adtrain.cli.main import COMMANDS
from adtrain.config.specs import FAMILIES

ROOT = Path(__file__).parent.parent


def test_every_name_of_a_config_is_documented() -> None:
    named = set(re.findall(r"`([\w-]+)`", (ROOT / "docs/config.md").read_text()))
    assert {kind for family in FAMILIES.values() for kind in family} - named == set()


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"adtrain {name}" not in readme] == []


TUTORIAL = "docs/python.md"
PLUGINS = "docs/your-own.md"
"""Its programs are plug-ins, which `test_docs_your_own.py` runs."""
DOCUMENTS = [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]]
FRAGMENTS = {"docs/add-an-op.md": 6}
"""The documents with snippets that are no complete programs, and the number of these snippets."""


def snippets(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def programs(document: str) -> list[str]:
    """The snippets that begin with an import, and all snippets of the tutorial, where one continues the other."""
    return [code for code in snippets(document) if document == TUTORIAL or code.startswith(("import ", "from "))]


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if programs(name) and name != PLUGINS])
def test_the_python_programs_of_a_document_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippet"}
    for number, code in enumerate(programs(document), 1):
        exec(compile(code, f"{document}, program {number}", "exec"), names)
    if document == "README.md":
        assert float(names["loss"]) < 1e-3


def test_snippets_that_are_no_programs_are_counted() -> None:
    counts = {name: len(snippets(name)) - len(programs(name)) for name in DOCUMENTS}
    assert {name: count for name, count in counts.items() if count} == FRAGMENTS


def test_links_and_files_named_in_documents_exist() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = document.read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
        assert [link for link in links if not (document.parent / link).exists()] == []
        files = re.findall(r"`((?:core|ops|nn|optim|config|data|training|bench|cli|tests|examples)/[\w/]+\.py)`", text)
        assert [f for f in files if not ((ROOT / f).exists() or (ROOT / "adtrain" / f).exists())] == []
