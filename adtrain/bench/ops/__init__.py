"""Times single operations, and the kernel candidates for them."""
