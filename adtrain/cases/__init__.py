"""The case table: test inputs for every operation.

Gradcheck, the comparison of backends, and the tests of shapes, transposes and staging use it. The inputs keep a
distance from kinks (relu at 0, ties of max), so tolerances need no allowance for them.
"""

from adtrain.cases import arrays, networks  # noqa: F401  fill the table
from adtrain.cases.table import CASES, Case

__all__ = ["CASES", "Case"]
