"""What recording under a Trainer exchanges on it while it trains, and waits for when it saves."""

from __future__ import annotations

import contextlib
from typing import Any, Final

SAVE_WAIT_S: Final = 0.5
"""How long a checkpoint waits at most until what was recorded before it is written: a training that
is resumed from it builds on that."""


def exchange(undo: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute on this one object; ``undo`` puts back what was there, if ours still is."""
    attributes = vars(owner)
    previous = attributes.get(name)

    def put_back() -> None:
        if attributes.get(name) is replacement:
            del attributes[name]
            if previous is not None:
                attributes[name] = previous

    attributes[name] = replacement
    undo.callback(put_back)
