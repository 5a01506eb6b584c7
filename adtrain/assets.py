"""Where the folders that travel with the package are: `kernels/`, `configs/` and `datasets/`.

In an installed wheel they lie in `adtrain/_assets/`; in a checkout they stand at the repository's top.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from adtrain.core.errors import AdtrainError

PACKAGE = Path(__file__).parent

Folder = Literal["kernels", "configs", "datasets"]


def asset_path(folder: Folder) -> Path:
    """The absolute path of one of the folders; AdtrainError when the installation lacks it."""
    candidates = [PACKAGE / "_assets" / folder, PACKAGE.parent / folder]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    places = " and ".join(str(candidate) for candidate in candidates)
    raise AdtrainError(f"the folder {folder}/ is missing (looked for {places}); reinstall adtrain")
