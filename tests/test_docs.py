"""The documents are complete, and name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

from adtrain.cli.main import COMMANDS
from adtrain.config.specs import FAMILIES

ROOT = Path(__file__).parent.parent


def test_every_layer_loss_optimizer_and_schedule_is_documented() -> None:
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs/config.md").read_text()))
    assert {kind for family in FAMILIES.values() for kind in family} - named == set()


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"adtrain {name}" not in readme] == []


def test_the_python_code_of_the_readme_runs() -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        exec(block, names)
    assert float(names["loss"]) < 1e-3  # type: ignore[arg-type]


def test_links_and_files_named_in_documents_exist() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = document.read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
        assert [link for link in links if not (document.parent / link).exists()] == []
        files = re.findall(r"`((?:core|ops|nn|optim|config|data|training|bench|cli|tests|examples)/[\w/]+\.py)`", text)
        assert [f for f in files if not ((ROOT / f).exists() or (ROOT / "adtrain" / f).exists())] == []
