"""Forms: the kinds of kernels that compute several equations on a GPU, and what each may join.

`lower.py` imports all modules here, which define them.
"""
