"""A trained network as C that needs nothing else.

- `network` adds the calls of a network's layers (`layers`, `recurrent`, `attention`) to a `Writer`.
- `memory` places the values of these calls in one array.
- `source` makes the file and its header; the functions that it calls are those of `kernels/export/`.
- `compare` compiles the file and compares it with the network on the test images.
"""
