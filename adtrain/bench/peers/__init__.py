"""PyTorch, JAX and plain NumPy at the same work, each in a process of its own: results are compared before times."""
