"""Other systems at the same work: PyTorch, JAX and plain NumPy, each in a process of its own, compared before timed."""
