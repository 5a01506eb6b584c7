"""PyTorch's recurrent layers with the output of adtrain's: all hidden states, or the last one of each direction."""

from __future__ import annotations

from typing import Any


def torch_recurrent(kind: str, output: Any = "last", **options: Any) -> Any:
    """A module whose arrays have the names of `torch.nn.RNN`, `LSTM` or `GRU`."""
    import torch

    base: Any = getattr(torch.nn, kind)

    class Recurrent(base):
        def forward(self, x: Any) -> Any:
            steps, states = super().forward(x)
            if output == "all":
                return steps
            hidden = states[0] if kind == "LSTM" else states
            return torch.cat(list(hidden[-2 if self.bidirectional else -1 :]), 1)

    return Recurrent(batch_first=True, **options)
