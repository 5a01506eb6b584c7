"""A trained network as C that needs only the C library.

- `network` writes the equations of an evaluation as statements (`statements`); `int8` does so in int8, and `training`
  for a training step.
- `code` holds the statements of a function and places their values in memory.
- `source` makes the files: `header`, `body`, `main_program`. The functions that are called are those of
  `kernels/export/`, which `library` reads.
- `compiled` compiles the file for this machine; `wasm` for WebAssembly, and `page` puts that into a page.
"""
