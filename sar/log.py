"""What the library tells its user while it works."""

from __future__ import annotations

import logging

_logger = logging.getLogger("sar")


def say(text: str) -> None:
    """Log as information; where nobody has set up logging, which would hide it, on standard error.

    ``logging.getLogger("sar").setLevel(..)`` silences it.
    """
    if _logger.hasHandlers():
        _logger.info(text)
    elif _logger.level <= logging.INFO:  # also NOTSET, which is 0
        where, nothing = ("", 0), ()
        record = _logger.makeRecord(_logger.name, logging.INFO, *where, text, nothing, None)
        logging.StreamHandler().emit(record)
