"""Writes the pages of the site, of which `zensical build` makes HTML: docs/ and the README, into build/pages.

A link is relative to the file that contains it, as on a code host. Files outside of docs/ that pages link to are copied
to repository/. The README is the first page. The text of `adtrain COMMAND --help` replaces HELP.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click

from adtrain.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"""(\]\(|src="|srcset=")((?!https?:|#)[^)#"\s]+)""")
FIRST = "README.md"
HELP = "<!-- help -->"


def address(path: str) -> str:
    """Where the site has a file of the repository."""
    inside = path.removeprefix("docs/")
    return "index.md" if path == FIRST else inside if inside != path else f"repository/{path}"


def targets(path: str, text: str) -> list[str]:
    """The files that a Markdown file links to, by their paths in the repository."""
    folder = PurePosixPath(path).parent
    found = (os.path.normpath(folder / match[2]) for match in LINK.finditer(text))
    return [target for target in found if (ROOT / target).is_file()]


def page(path: str, text: str) -> str:
    """The text of a page: links between files of the repository become links between files of the site."""
    folder, own = PurePosixPath(path).parent, PurePosixPath(address(path)).parent

    def moved(match: re.Match[str]) -> str:
        return match[1] + os.path.relpath(address(os.path.normpath(folder / match[2])), own)

    return LINK.sub(moved, text).replace(HELP, "".join(help_texts(cli, "adtrain")))


def help_texts(command: click.Command, called: str) -> Iterator[str]:
    """A section for the command and each of its subcommands."""
    context = click.Context(command, info_name=called, terminal_width=90, show_default=True)  # as that of `adtrain`
    yield f"\n## {called}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (subcommand := command.get_command(context, name)) is not None:
                yield from help_texts(subcommand, f"{called} {name}")


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    tools = ROOT / "docs" / "tools"
    found = [path for path in (ROOT / "docs").rglob("*") if path.is_file() and tools not in path.parents]
    waiting = [FIRST, *(path.relative_to(ROOT).as_posix() for path in found)]
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        written = PAGES / address(path)
        written.parent.mkdir(parents=True, exist_ok=True)
        if not path.endswith(".md"):
            shutil.copyfile(ROOT / path, written)
            continue
        text = (ROOT / path).read_text()
        written.write_text(page(path, text))
        new = set(targets(path, text)) - known
        known |= new
        waiting += new


if __name__ == "__main__":
    main()
