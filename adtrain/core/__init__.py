"""Values, primitives, traces, derivatives, Programs and the registry of kernels; no operation and no device code."""
