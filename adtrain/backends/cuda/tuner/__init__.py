"""Measures candidate kernels and keeps the fastest."""
