"""Count the samples of PyTorch's OpInfo that are equal, refused and wrong: `python tests/opinfo_report.py [SAMPLES]`.

SAMPLES is the largest number of samples of an entry and type, by default all of them, and 400 reference samples.
"""

from __future__ import annotations

import sys
from collections import Counter

import opinfo_compare
from opinfo_table import CALLS, MISSING


def main(limit: int | None) -> None:
    entries = opinfo_compare.entries()
    compared: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    print(f"{'entry':45}{'equal':>8}{'refused':>9}{'wrong':>7}  causes of refusals")
    for name, call in CALLS.items():
        found = [opinfo_compare.count(name, entries[name], limit)]
        found.append(opinfo_compare.count(name, entries[name], limit or 400, reference=True))
        refused = sum((part.by_cause(call.refused) for part in found), Counter())
        wrong = [difference for part in found for difference in part.wrong]
        equal = sum(part.equal for part in found)
        listed = ", ".join(f"{cause!r} {number}" for cause, number in refused.items())
        print(f"{name:45}{equal:8,}{refused.total():9,}{len(wrong):7}  {listed}")
        print(*(f"    {difference}" for difference in wrong), sep="\n", end="\n" if wrong else "")
        totals.update(equal=equal, refused=refused.total(), wrong=len(wrong))
        causes.update(refused)
        for part in found:
            compared.update(part.compared)
    print(f"{'total':45}{totals['equal']:8,}{totals['refused']:9,}{totals['wrong']:7}")
    print("\ncompared: " + ", ".join(f"{what} {number:,}" for what, number in compared.items()))
    print("refused by cause: " + "; ".join(f"{cause} {number:,}" for cause, number in causes.most_common()))
    print(f"entries compared: {len(CALLS)} of {len(entries)}")
    print("operations that adtrain does not have: " + ", ".join(MISSING))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
