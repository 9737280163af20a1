"""The error tree.

    AuditorError
    +-- RunError            a run directory cannot be used
    |   +-- RunClaimedError     another live process writes this rank
    |   +-- SchemaVersionError  written by a newer auditor
    +-- IdentityError       which sample is which cannot be known
    +-- ShardError          a data file cannot be read or written
    +-- ManifestError       a manifest disagrees with the files it describes

Bad arguments raise the built-in ``ValueError`` with the offending value. The command line turns
every ``AuditorError`` into one message and exit code 1, in one place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class AuditorError(Exception):
    """Root of the tree: what is wrong, where, and what to do about it.

    ``path`` and ``row`` (0-based) locate the fault where there is one; ``remedy`` is an imperative
    sentence. All are part of the message.
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | str | None = None,
        row: int | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message = message
        self.path = path
        self.row = row
        self.remedy = remedy
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors come back from worker processes; those of subclasses take other arguments.
        return _again, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        where = "" if self.path is None else f"{self.path}"
        if self.row is not None:
            where += f", row {self.row}"
        located = f"{where}: {self.message}" if where else self.message
        return located if self.remedy is None else f"{located}. {self.remedy}"


def _again(kind: type[AuditorError], args: tuple[Any, ...], values: dict[str, Any]) -> AuditorError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(values)
    return error


class RunError(AuditorError):
    """A run directory is missing, incomplete for the question asked, or not a run directory."""


class RunClaimedError(RunError):
    """Another live process is recording this rank of this run."""


class SchemaVersionError(RunError):
    """The file is of another version of the format; carries ``found`` and ``expected``."""

    def __init__(self, what: str, *, path: Path | str, found: int, expected: int) -> None:
        self.found = found
        self.expected = expected
        super().__init__(
            f"{what} has schema version {found}, this auditor reads {expected}",
            path=path,
            remedy="Upgrade auditor" if found > expected else "Read it with the older auditor",
        )


class IdentityError(AuditorError):
    """A sample's identity cannot be known from the loader as given."""


class ShardError(AuditorError):
    """A shard cannot be read, or a cleaned shard cannot be written."""


class ManifestError(AuditorError):
    """A manifest is malformed or disagrees with the shards it describes."""
