"""Measures speed: of operations and training steps, against other systems, and on the CPU against the GPU.

`timing` takes samples; `ops`, `steps`, `analysis` and `peers` make results, which are plain JSON; `compare` finds
changes between two results; `text` and `page` show a result in a terminal and as HTML.
"""
