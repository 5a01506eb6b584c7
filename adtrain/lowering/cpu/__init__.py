"""The C functions that compute each primitive on the CPU."""
