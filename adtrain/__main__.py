"""`python -m adtrain`: the same commands and exit codes as the `adtrain` script."""

from __future__ import annotations

from adtrain.cli.startup import main

if __name__ == "__main__":
    main()
