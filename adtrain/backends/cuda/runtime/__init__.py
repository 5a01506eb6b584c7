"""Device, memory, launches, CUDA graphs."""
