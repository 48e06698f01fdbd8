"""Saying that something is not supported."""

from sar.errors import NotSupportedError

not_supported = NotSupportedError  # whoever calls a layer of DGL's puts its name in front
