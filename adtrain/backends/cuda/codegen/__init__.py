"""Code generators for GPUs."""
