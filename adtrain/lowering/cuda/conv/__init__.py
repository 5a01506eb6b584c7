"""Convolutions on the GPU."""
