"""Sub-commands of `sar`: `commands.py` is their table, and names the function that runs each."""
