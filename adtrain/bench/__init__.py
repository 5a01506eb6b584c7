"""Measures speed: of operations, training steps, starts and whole trainings, also against other systems and devices.

Each command is a module of its name, which makes a result with a view (`view`). `result` writes a view as text, `page`
as HTML. `sampling` takes times, `machine` says where; `peers` has the other systems.
"""
