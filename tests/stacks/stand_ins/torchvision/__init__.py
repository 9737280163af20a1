"""Stands in for torchvision, which MosaicML Streaming imports for its image datasets alone.

The real one must be built for the very build of torch that is installed, which an index without
CPU builds cannot promise.
"""

from . import datasets, transforms

__all__ = ["datasets", "transforms"]
