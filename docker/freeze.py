"""Prints constraints that keep installed packages at their versions: those named, or --all."""

import sys
from importlib.metadata import distributions

names = {name.lower().replace("_", "-") for name in sys.argv[1:]}
for found in sorted({(it.metadata["Name"] or "", it.version) for it in distributions()}):
    if found[0] and ("--all" in names or found[0].lower().replace("_", "-") in names):
        print(f"{found[0]}=={found[1]}")
