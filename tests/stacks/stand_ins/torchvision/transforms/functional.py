"""Names that are imported and never used."""

from typing import NoReturn


def to_tensor(image: object) -> NoReturn:
    raise NotImplementedError
