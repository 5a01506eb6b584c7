"""Hooks of mkdocs.yml: the README is the site's first page, and files of the repository that pages link to are copied.

A link is relative to the file that contains it, as on a code host. Files outside of docs/ are copied to repository/.
The text of `adtrain COMMAND --help` replaces HELP.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from adtrain.cli.main import cli

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"""(\]\(|src="|srcset=")((?!https?:|#)[^)#"\s]+)""")
PAGES = {"README.md": "index.md"}
HELP = "<!-- help -->"


def address(path: str) -> str:
    """Where the site has a file of the repository."""
    inside = path.removeprefix("docs/")
    return PAGES.get(path, inside if inside != path else f"repository/{path}")


def targets(path: str) -> list[str]:
    """The files that a Markdown file links to, by their paths in the repository."""
    folder = PurePosixPath(path).parent
    found = (os.path.normpath(folder / match[2]) for match in LINK.finditer((ROOT / path).read_text()))
    return [target for target in found if (ROOT / target).is_file()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and all files outside of docs/ that the pages lead to."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    while waiting:
        path = waiting.pop()
        if address(path) not in files.src_uris:
            files.append(File.generated(config, address(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting += [target for target in targets(path) if address(target) not in files.src_uris]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between files of the site."""
    own = PurePosixPath(page.file.src_uri)
    path = next((path for path, name in PAGES.items() if name == str(own)), None)
    path = path or (str(own).removeprefix("repository/") if own.parts[0] == "repository" else f"docs/{own}")
    folder = PurePosixPath(path).parent

    def moved(match: re.Match[str]) -> str:
        target = address(os.path.normpath(folder / match[2]))
        return match[1] + os.path.relpath(target, own.parent)

    return LINK.sub(moved, markdown).replace(HELP, "".join(help_texts(cli, "adtrain")))


def help_texts(command: click.Command, called: str) -> Iterator[str]:
    """A section for the command and each of its subcommands."""
    context = click.Context(command, info_name=called, terminal_width=90)
    yield f"\n## {called}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (subcommand := command.get_command(context, name)) is not None:
                yield from help_texts(subcommand, f"{called} {name}")
