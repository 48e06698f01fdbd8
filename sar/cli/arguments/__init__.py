"""The options of each command, in modules that import nothing: a typo is told at once."""
