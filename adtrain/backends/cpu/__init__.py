"""The CPU backend: `cpu_backend.CpuBackend`."""
