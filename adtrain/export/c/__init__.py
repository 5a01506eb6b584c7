"""A trained network as C that needs only the C library.

- `network` adds the calls of layers (`layers`, `recurrent`) to a program (`writer`); `int8` does so in int8.
- `memory` places the values of these calls in one array.
- `source` makes the files: `header`, `body`, `main_program`. The functions that are called are those of
  `kernels/export/`, which `library` reads.
- `training` writes a training step.
- `compiled` compiles the file for this machine; `wasm` for WebAssembly, and `page` puts that into a page.
"""
