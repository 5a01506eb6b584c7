"""Forms: the kinds of kernels that compute several equations on a GPU, and what each may join.

`lower.py` imports the modules that define them.
"""
