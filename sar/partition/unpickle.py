"""Reading pickles that hold numbers and nothing that could run.

Loaders of data sets call ``pickle.load`` on files that came from somewhere, directly or through
``numpy.load``. Inside :func:`plain_pickles` that reads arrays of numpy and scipy, and containers of
them and of plain values; a pickle that names anything else is refused before it is built.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sar._private import NUMPY_MAKERS, NUMPY_MODULES

_PLAIN = {
    "builtins": {
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
        "object", "range", "set", "slice", "str", "tuple",
    },
    "collections": {"OrderedDict", "defaultdict"},
    "copyreg": {"_reconstructor"},
    "_codecs": {"encode"},
    "numpy": {"dtype", "ndarray", "matrix"},
}  # fmt: skip
_OLD = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of Python 2
_SPARSE = {f"{kind}_{what}" for kind in ("bsr", "coo", "csc", "csr", "dia", "lil") for what in
           ("matrix", "array")}  # fmt: skip


class NotPlainError(pickle.UnpicklingError):
    """A pickle that holds more than numbers and containers of them."""


class PlainUnpickler(pickle.Unpickler):
    """Reads plain data; raises :class:`NotPlainError` at the name of anything else."""

    def __init__(self, file: Any, *, name: str = "a pickle", **options: Any) -> None:
        super().__init__(file, **options)
        self._name = os.fspath(getattr(file, "name", name))

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names."""
        return super().find_class(*_plain(module, name, self._name))


@contextlib.contextmanager
def plain_pickles() -> Iterator[None]:
    """Inside, nobody in this process unpickles anything but plain data.

    Raises :class:`NotPlainError` where the pickle is read; and at the end, where somebody caught
    that and went on: DGL then makes anew, or downloads, what it could not read.
    """
    refused: list[NotPlainError] = []

    class Plain(PlainUnpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return super().find_class(module, name)
            except NotPlainError as error:
                refused.append(error)
                raise

    def load(file: Any, **options: Any) -> Any:
        return Plain(file, **options).load()

    def loads(data: Any, /, **options: Any) -> Any:
        return Plain(io.BytesIO(data), **options).load()

    try:
        with mock.patch.multiple(pickle, load=load, loads=loads, Unpickler=Plain):
            yield
    finally:
        if refused:
            raise refused[0]


def _plain(module: str, name: str, file: str) -> tuple[str, str]:
    """Where plain data's class or function is now; older files say where it was."""
    module = _OLD.get(module, module)
    if module.startswith("scipy.sparse") and name in _SPARSE:
        return "scipy.sparse", name
    if name in _PLAIN.get(module, ()) or (module in NUMPY_MODULES and name in NUMPY_MAKERS):
        return module, name
    raise NotPlainError(
        f"{file}: names {module}.{name}, expected arrays of numbers and containers of them; "
        "not read, as it could run a program"
    )
