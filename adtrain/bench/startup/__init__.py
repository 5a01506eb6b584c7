"""The time from a command to the trained network, and that of peers from their import to their first steps."""
