"""Restore efficiency and never-worse, on the real model and the real disk: ``cacheflow bench``.

make bench-restore
"""

from __future__ import annotations

import sys

from cacheflow.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    main()
