from __future__ import annotations

from hypothesis import settings

# The same examples on every run, and none judged by its time: machines differ.
settings.register_profile("adtrain", derandomize=True, deadline=None)
settings.load_profile("adtrain")
