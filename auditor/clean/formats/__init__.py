"""Formats of shards: how the rows of each are read, counted and copied.

A format is a module with the same three functions:

    rows(path, reading, findings) -> Iterator[Row]   in order; ``ShardError`` for what is damaged
    copy(path, out, keep, reading) -> None           the kept rows, whole or not at all
    count(path, reading) -> int
"""
