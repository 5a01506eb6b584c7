"""Compares the CPU with the GPU: operations, training steps and launch shapes."""
