"""Arguments that several `bench` commands take: lists of numbers, and names of other systems."""

from __future__ import annotations

from typing import Any

import click

from adtrain.bench.peers.systems import PEERS
from adtrain.cli.options import NameOf
from adtrain.config.problems import shortened

PEER_LIST = NameOf([name for peer in PEERS for name in (peer.package, peer.name)], separator=",")
"""Names of other systems, separated by commas; received as a tuple."""


class Numbers(click.ParamType):
    """Whole numbers above 0, separated by commas; received as a tuple."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        words = value.split(",") if isinstance(value, str) else [str(x) for x in value]
        if not all(word.strip().isdecimal() and len(word) < 20 and 0 < int(word) < 2**29 for word in words):
            expected = "whole numbers above 0 with commas between them, below 2^29"
            self.fail(f"found {shortened(value)!r}, expected {expected}", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))
