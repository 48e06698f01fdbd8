"""Checks of a model before it is trained: :func:`validate`."""

from sar.models.validation.report import Finding, ModuleRow, Validation
from sar.models.validation.validate import validate

__all__ = ["Finding", "ModuleRow", "Validation", "validate"]
