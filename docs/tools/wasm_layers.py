"""Compiles `kernels/export/wasm/layers.wasm`, the layers of exported networks as WebAssembly, which pages run.

The module is a part of the package, so that `adtrain export RUN FILE.html` needs no compiler. Run this after a change
of the C in `kernels/export/`; it needs clang and lld. `tests/test_export_page.py` fails where the module is older.
"""

from __future__ import annotations

from pathlib import Path

from adtrain.export.c.source import compiled_layers

TARGET = Path(__file__).parents[2] / "kernels" / "export" / "wasm" / "layers.wasm"

if __name__ == "__main__":
    TARGET.write_bytes(compiled_layers())
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
