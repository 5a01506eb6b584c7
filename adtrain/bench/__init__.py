"""Measures speed: of operations, training steps, starts and whole trainings, also against other systems and devices.

Each command is a module of its name, which makes a result (`result.py`) with a view (`view.py`, values by `cells.py`).
`text` and `page` show a view in a terminal and as HTML. `timing` takes samples; `peers` has the other systems.
"""
