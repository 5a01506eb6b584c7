"""Decisions that depend on a clock, a signal or one rank's numbers, made the same on all ranks.

All ranks call these functions in the same order. With one rank they return at once.
"""

from __future__ import annotations

import numpy as np

from adtrain.core import communicator


def of_first_rank(number: int) -> int:
    """Rank 0's number."""
    return number if communicator.current().size == 1 else int(communicator.all_gathered(np.array(number))[0])


def any_rank(answer: bool) -> bool:
    """Whether any rank's answer is True."""
    return answer if communicator.current().size == 1 else bool(communicator.all_gathered(np.array(answer)).any())


def largest(number: int) -> int:
    """The largest number of all ranks."""
    return number if communicator.current().size == 1 else int(communicator.all_gathered(np.array(number)).max())
