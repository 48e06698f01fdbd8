"""The logger ``"sar"`` and the function of old scripts that makes it visible."""

from __future__ import annotations

import logging

from sar.comm.legacy import with_old_names

logger = logging.getLogger("sar")

_HANDLER = "sar.logging_setup"


@with_old_names
def logging_setup(
    log_level: int | str, rank: int = -1, world_size: int = -1, log_file: str | None = None
) -> None:
    """Show the library's log messages, each with this rank's number (from 1) and the ranks.

    Args:
        log_level: lowest level shown, as the ``logging`` module names it (``logging.INFO``).
        rank, world_size: shown in front of every message.
        log_file: written anew; without it messages go to the standard error stream.

    Called again, it replaces what the call before had set. Raises ``ValueError`` for an unknown
    level and ``OSError`` when the file cannot be written.
    """
    handler: logging.Handler
    handler = logging.StreamHandler() if log_file is None else logging.FileHandler(log_file, "w")
    handler.set_name(_HANDLER)
    handler.setFormatter(
        logging.Formatter(f"{rank + 1} / {world_size} - %(name)s - %(levelname)s - %(message)s")
    )
    logger.setLevel(log_level)
    for old in [one for one in logger.handlers if one.get_name() == _HANDLER]:
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.propagate = False  # or the root logger's handlers would show every message again
