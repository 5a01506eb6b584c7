"""The entry point of the command `adtrain`: what has to be done before NumPy and the commands are imported (0.5 s)."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from adtrain.cli import COMMANDS, EARLY
from adtrain.distributed.environment import has_rank
from adtrain.signals import end_with, interrupt_while_importing

ADDRESS_SPACE = 160 << 20
"""Bytes that NumPy and OpenBLAS take when they are imported. Without them OpenBLAS would end the process."""
NO_MEMORY = b"adtrain: error: too little memory to start; raise ulimit -v\n"
NO_FILES = b"adtrain: error: too many open files; raise ulimit -n\n"


def main() -> NoReturn:
    """Run the command. Ctrl-C during the imports ends the process with exit code 130 and no traceback.

    A lack of memory or of descriptors during the imports is one line.
    """
    try:
        require_address_space()
        _main()
    except (MemoryError, OSError, ImportError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            end_with(NO_FILES)
        # The dynamic linker says "failed to map segment" or "cannot allocate memory".
        if isinstance(error, MemoryError) or "failed to map" in str(error) or "annot allocate" in str(error):
            end_with(NO_MEMORY)
        raise


def require_address_space() -> None:
    """Raise MemoryError if the limit of the address space (ulimit -v) leaves too little for the imports."""
    try:
        mmap.mmap(-1, ADDRESS_SPACE).close()
    except OSError:
        raise MemoryError from None


def _main() -> NoReturn:
    with interrupt_while_importing(has_rank(os.environ)):
        if wants_gpu(sys.argv[1:], os.environ):
            with suppress(RuntimeError):  # the limit of threads, which is reported when NumPy is imported
                threading.Thread(target=create_context).start()
        gc.disable()  # imports leave no garbage; the command enables it
        # Plug-ins of pydantic observe validation. To find them, it would read the metadata of all installed packages.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        if sys.argv[1:2] and sys.argv[1] in EARLY:
            # The threads of NumPy's OpenBLAS wait actively for 2^26 clock cycles (30 ms), on each core, before they
            # sleep.
            os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
        from adtrain.cli.main import main as run

        if sys.argv[1:2] and sys.argv[1] in COMMANDS:
            import numpy  # noqa: F401  (OpenBLAS starts its threads)
    run()


def wants_gpu(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the command is one that will run on the GPU, as far as can be seen before it is parsed."""
    if not arguments or arguments[0] not in EARLY or has_rank(environment):
        return False
    words = {word.partition("=")[0] for word in arguments}
    if words & {"--help", "-h", "--dry-run", "--ranks"}:
        return False
    devices = [arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word == "--device"]
    devices += [word.partition("=")[2] for word in arguments if word.startswith("--device=")]
    return devices[-1:] != ["cpu"]


def create_context() -> None:
    """Create the first GPU's primary context, which takes a fifth of a second, during which imports go on.

    An error is not reported here: the backend makes the same calls again, and reports it.
    """
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


if __name__ == "__main__":
    main()
