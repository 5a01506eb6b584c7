"""Forms: the kinds of functions that compute several equations on the CPU, and what each may join."""
