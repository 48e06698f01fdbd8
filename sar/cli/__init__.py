"""Sub-commands of `sar`; each module has `add_parser(subparsers)` and `run(args) -> status`."""
