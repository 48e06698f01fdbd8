"""Checks of arguments, whose errors all read "NAME: got .., expected ..".

Another type is a ``TypeError``, another value a ``ValueError``. Each function returns what it was
given, so that a check stands where the value is taken::

    self.k = expect.integer(k, "k", at_least=1)
    self.method = expect.one_of(method, "method", ("uniform", "per_source"))
    self.rows = expect.tensor(rows, "rows", floating=True, shape=(num_nodes, "D"))

Where all ranks have to raise what one of them finds, checks stand inside
``with group.agreed("the call"):`` before anything is sent; :func:`problem` gives the error as a
value. Importing this module imports nothing else: the command line uses it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def integer(
    value: Any, name: str, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """An int, but no bool, within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(value, name, "an int")
    if (at_least is not None and value < at_least) or (at_most is not None and value > at_most):
        raise ValueError(f"{name}: got {value}, expected an int {_range(at_least, at_most)}")
    return value


def number(
    value: Any,
    name: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> float:
    """An int or a float, but no bool, within bounds; NaN is within none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(value, name, "a number")
    if above is not None and not value > above:
        raise ValueError(f"{name}: got {value}, expected more than {above}")
    if (at_least is not None and not value >= at_least) or (
        at_most is not None and not value <= at_most
    ):
        raise ValueError(f"{name}: got {value}, expected a number {_range(at_least, at_most)}")
    return value


def boolean(value: Any, name: str) -> bool:
    return instance(value, name, bool, "a bool")


def one_of(value: T, name: str, known: Iterable[T]) -> T:
    """``value``, if it is one of the ``known`` ones."""
    options = tuple(known)
    if not any(value is one or (type(value) is type(one) and value == one) for one in options):
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(str, options))}")
    return value


def instance(value: Any, name: str, kind: type[T], expected: str) -> T:
    """An object of a class, which the message calls ``expected`` ("a torch.nn.Module")."""
    if not isinstance(value, kind):
        raise wrong_type(value, name, expected)
    return value


def tensor(
    value: Any,
    name: str,
    *,
    floating: bool = False,
    dtypes: Sequence[torch.dtype] = (),
    shape: Sequence[int | str | EllipsisType] | None = None,
) -> torch.Tensor:
    """A tensor, ``floating``: of any floating point type, or of one of ``dtypes``, of a ``shape``
    whose words stand for any size (``(n, "D")``), a last ``...`` for more of them."""
    import torch  # here, as the command line starts without it

    if not isinstance(value, torch.Tensor):
        raise wrong_type(value, name, "a tensor")
    if floating and not value.is_floating_point():
        raise TypeError(f"{name}: got {value.dtype}, expected a floating point tensor")
    if dtypes and value.dtype not in dtypes:
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: got {value.dtype}, expected {words}")
    if shape is not None and not _fits(tuple(value.shape), shape):
        sizes = ", ".join(".." if size is ... else str(size) for size in shape)
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected [{sizes}]")
    return value


def dense(value: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor whose numbers lie in memory as they are, which kernels read."""
    if str(value.layout) != "torch.strided" or value.is_quantized or value.is_nested:
        raise TypeError(f"{name}: got {value.dtype} of {value.layout}, expected a dense tensor")
    return value


def indices(values: torch.Tensor, name: str, what: str, count: int) -> torch.Tensor:
    """Integers from 0 to ``count`` - 1, which the message calls ``what``."""
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < count:
        raise ValueError(
            f"{name}: got {what} from {int(values.min())} to {int(values.max())}, "
            f"expected 0 to {count - 1}"
        )
    return values


def wrong_type(value: Any, name: str, expected: str) -> TypeError:
    return TypeError(f"{name}: got {type(value).__name__}, expected {expected}")


def problem(check: Callable[..., Any], *args: Any, **options: Any) -> Exception | None:
    """The error that ``check(*args, **options)`` raises, or ``None``."""
    try:
        check(*args, **options)
    except Exception as error:  # noqa: BLE001 - whoever asks raises it
        return error
    return None


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return f"of at least {least}"
    return f"of at most {most}" if least is None else f"from {least} to {most}"


def _fits(sizes: tuple[int, ...], shape: Sequence[int | str | EllipsisType]) -> bool:
    fixed = [size for size in shape if size is not ...]
    if len(sizes) < len(fixed) or (len(sizes) > len(fixed) and len(fixed) == len(shape)):
        return False
    return all(isinstance(known, str) or size == known for size, known in zip(sizes, fixed))
