"""Names that are imported and never used."""

from . import functional

__all__ = ["functional"]
