"""The first import of the package. Ctrl-C during the others ends `python -m adtrain` as it ends the script."""

from __future__ import annotations

import sys

import adtrain.core.timeline  # noqa: F401  (imports count from here)
from adtrain_script import end_at_interrupt

if sys.argv[:1] == ["-m"] and "adtrain" in sys.orig_argv:  # Python has not found the module to run yet
    end_at_interrupt()
