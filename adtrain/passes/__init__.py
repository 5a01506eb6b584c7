"""Passes: functions from a Program to a better Program that computes the same. One file each."""

from adtrain.passes.common_subexpressions import merge_common_subexpressions
from adtrain.passes.dead_code import remove_dead_code
from adtrain.passes.fold_constants import fold_constants

SIMPLIFY = (fold_constants, merge_common_subexpressions, remove_dead_code)
"""The passes that leave out work without changing any number."""

__all__ = ["SIMPLIFY", "fold_constants", "merge_common_subexpressions", "remove_dead_code"]
