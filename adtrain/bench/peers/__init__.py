"""Runs the same work in PyTorch, JAX and plain NumPy, each in its own process, and compares results, then times."""
