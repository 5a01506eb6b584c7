"""The CUDA kernels that compute each primitive, and the rules that choose among them."""
