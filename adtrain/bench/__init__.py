"""Measures speed: of operations, training steps, starts and whole trainings, also against other systems and devices.

Each command is a module of its name, which makes a result (`result.py`) with a view (`view.py`). `text` and `page` show
a view in a terminal and as HTML. `sampling` takes times, `machine` says where; `peers` has the other systems.
"""
