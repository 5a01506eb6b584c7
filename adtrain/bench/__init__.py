"""Measuring: where the time of a step goes, how fast each operation is, and whether each gradient is right."""
