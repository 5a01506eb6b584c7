"""The paths of the package's data folders: `kernels/`, `configs/` and `datasets/`.

An installed wheel has them in `adtrain/_assets/`, a checkout in the root of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from adtrain.core.errors import AdtrainError

PACKAGE = Path(__file__).parent

Folder = Literal["kernels", "configs", "datasets"]


def asset_path(folder: Folder) -> Path:
    """The absolute path of one of the folders. Raises AdtrainError if the installation lacks it."""
    candidates = [PACKAGE / "_assets" / folder, PACKAGE.parent / folder]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    places = " and ".join(str(candidate) for candidate in candidates)
    raise AdtrainError(f"the folder {folder}/ is missing (looked for {places}); reinstall adtrain")
