"""A trained network as C that needs only the C library.

- `network` writes the equations of an evaluation, and of a training step, as statements (`statements`); `int8` does so
  in int8.
- `code` holds the statements of a function, places their values in memory, and finds the functions of `kernels/export/`
  that they call.
- `source` fills the templates `network.c.j2` and `network.h.j2`, and compiles the file for this machine, or for
  WebAssembly.
"""
