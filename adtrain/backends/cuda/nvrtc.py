"""NVRTC, called by ctypes; and the program of a process that compiles: `python nvrtc.py LIBRARY`.

The process imports nothing of the package, so that it starts fast. In one process, NVRTC's front end takes one source
at a time, so several processes compile faster than several threads.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys

Request = tuple[str, str, list[tuple[str, str]], list[str]]
"""The arguments of `Nvrtc.compile`."""


class NvrtcError(Exception):
    """A call of NVRTC failed, for another reason than an error in the source."""


class Nvrtc:
    """The library in the file `path`. Raises OSError if it cannot be loaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library = ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.builtins: list[ctypes.CDLL] = []

    def version(self) -> str:
        """The version, such as "13.0"."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def compile(
        self, text: str, name: str, headers: list[tuple[str, str]], options: list[str]
    ) -> tuple[bytes | None, str]:
        """The cubin, or None if the source has an error; and the compiler's log. `headers` are names and texts."""
        names, texts, words = (
            (ctypes.c_char_p * len(given))(*(x.encode() for x in given))
            for given in ([name for name, _ in headers], [text for _, text in headers], options)
        )
        self._load_builtins()
        program = ctypes.c_void_p()
        given = text.encode(), name.encode(), len(headers), texts, names
        self._check(self.library.nvrtcCreateProgram(ctypes.byref(program), *given))
        try:
            failed = self.library.nvrtcCompileProgram(program, len(options), words)
            log = self._output(program, "ProgramLog").decode(errors="replace").rstrip("\0\n ")
            return None if failed else self._output(program, "CUBIN"), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _load_builtins(self) -> None:
        """Load the library of built-in functions. NVRTC opens it by its name alone and misses it in a wheel."""
        if not self.builtins:
            folder = os.path.dirname(os.path.realpath(self.path))
            path = os.path.join(folder, f"libnvrtc-builtins.so.{self.version()}")
            self.builtins = [ctypes.CDLL(path)] if os.path.exists(path) else [self.library]

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, code: int) -> None:
        if code:
            raise NvrtcError(self.library.nvrtcGetErrorString(code).decode())


def serve(path: str) -> None:
    """Answer pickled requests on stdin by pickled results on stdout, until stdin is closed."""
    nvrtc = Nvrtc(path)
    while True:
        try:
            request: Request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(nvrtc.compile(*request), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
