"""Logs that a person reads: one record per line, numbers behind their names.

    step:918/1530 train_loss:4.8076 train_time:148221ms          modded-nanogpt
    s:0 trl:10.9656                                              llm.c, main.log
    step   10/18865 | loss 7.2 (+0.1z)| norm 1.9 | lr 6.00e-05   llm.c, standard output
    iter 100: loss 6.2, time 12.1ms                              nanoGPT
    iteration 7000/ 159576 | lm loss: 6.44E+00 | grad norm: 9.8  Megatron-LM
    validation loss at iteration 7000 | lm loss value: 7.17E+00  Megatron-LM
    100 2.7464                                                   torchtitan: step and loss

A number belongs to the words before it, back to the last number or delimiter. Where only blanks
part the two, the last of the words must be one that says loss, norm, rate or step, or an identifier
that does, such as ``train_loss``: prose about a step is no record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from auditor.explain.logs.columns import Columns, role_of
from auditor.explain.logs.log import Log, Progress, as_number, as_step, excerpt, lines_of

NO_RECORD: Final = "lines that are no records"
NO_STEP: Final = "records without a step"

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:"
    r"(?:nan|inf(?:inity)?)(?=(?:ms|s|%)?(?![A-Za-z0-9_]))"
    r"|\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])"
    r"|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
    r")",
    re.IGNORECASE,
)
_LETTER = re.compile(r"[A-Za-z]")
_UNIT = re.compile(r"[A-Za-z%µ]+(?:/[A-Za-z]+)?")
_BRACKETED = re.compile(r"\([^()]*\)")
_DELIMITER = re.compile(r"[|,;(){}\[\]<>:=\t]")
_HELD_OUT = re.compile(r"\b(?:validation|valid|val|evaluation|eval)\b", re.IGNORECASE)
_STEP_WORDS: Final = frozenset(
    ("step", "steps", "iter", "iteration", "global_step", "num_updates", "update")
)
_SPOKEN: Final = frozenset(("loss", "norm", "lr", "rate"))
"""Words that a number may follow without a mark between."""

_TWO_COLUMNS = re.compile(r"\s*\d+[\s,]+[-+]?(?:nan|inf|[\d.]+(?:e[-+]?\d+)?)\s*", re.IGNORECASE)


def read_text(path: Path, columns: Columns, progress: Progress | None = None) -> Log:
    """Read lines of ``name: number``, ``name=number`` or ``name number`` with a step in each."""
    log = Log(path, "text")
    for number, line in lines_of(path, progress):
        if not line.strip():
            continue
        step, values = _record(_ANSI.sub("", line), columns)
        if step is not None and values:
            log.add(step, values)
        elif values and any(role_of(name) for name in values):
            log.skip(NO_STEP, f"line {number}: {excerpt(line)}")
        else:
            log.skip(NO_RECORD, f"line {number}: {excerpt(line)}")
    return log


def are_two_columns(line: str) -> bool:
    """Whether a line is a whole number and a number, without names."""
    return _TWO_COLUMNS.fullmatch(line) is not None


def read_two_columns(path: Path, columns: Columns, progress: Progress | None = None) -> Log:
    """Read lines of step and loss without names; ``columns`` has no say."""
    log = Log(path, "two-columns")
    for number, line in lines_of(path, progress):
        if not line.strip():
            continue
        cells = re.split(r"[\s,]+", line.strip())
        step, loss = as_step(cells[0]), as_number(cells[-1])
        if len(cells) == 2 and step is not None and loss is not None:
            log.add(step, {"loss": loss})
        else:
            log.skip(NO_RECORD, f"line {number}: {excerpt(line)}")
    return log


@dataclass(frozen=True)
class _Number:
    start: int
    spelled: str
    name: str  # empty where no word belongs to it
    is_marked: bool  # by a colon or an equals sign
    has_unit: bool


def _record(line: str, columns: Columns) -> tuple[int | None, dict[str, float]]:
    """The step of a line, and its other numbers by name."""
    step: int | None = None
    values: dict[str, float] = {}
    numbers = list(_numbers(line))
    # What a line says of all its numbers at its head, no name of theirs need say again.
    is_held_out = bool(numbers) and _HELD_OUT.search(line[: numbers[0].start]) is not None
    for one in numbers:
        if _is_step(one, columns):
            step = as_step(one.spelled) if step is None else step
        elif one.name and (one.is_marked or _is_spoken(one.name, columns)):
            value = as_number(one.spelled)
            if value is not None:
                says_so = _HELD_OUT.search(one.name.replace("_", " ").replace("/", " "))
                name = f"validation {one.name}" if is_held_out and not says_so else one.name
                values[name] = value
    return step, values


def _numbers(line: str) -> Iterator[_Number]:
    end = 0
    for match in _NUMBER.finditer(line):
        if match.start() < end:
            continue
        name, is_marked = _named(line[end : match.start()])
        unit = _UNIT.match(line, match.end())
        end = unit.end() if unit else match.end()
        yield _Number(
            start=match.start(),
            spelled=match.group().replace(",", ""),
            name=name,
            is_marked=is_marked,
            has_unit=unit is not None,
        )


@lru_cache(4096)  # the lines of a log have the same words
def _named(between: str) -> tuple[str, bool]:
    """The name at the end of what stands before a number, and whether a mark follows it."""
    between = between.rstrip(" '\"")
    words = _BRACKETED.sub(" ", between.rstrip(":= '\""))
    name = " ".join(_DELIMITER.split(words)[-1].strip(" '\"-*#`/").split())
    return name if _LETTER.search(name) else "", between.endswith((":", "="))


def _is_spoken(name: str, columns: Columns) -> bool:
    """Whether a number may follow a name without a mark between."""
    last = name.split()[-1]
    if last.lower() in _SPOKEN or last in columns.signals.values():
        return True
    return any(mark in last for mark in "_/.") and role_of(last) is not None


def _is_step(number: _Number, columns: Columns) -> bool:
    if not number.name or number.has_unit:  # "iteration 3k"
        return False
    if columns.step is not None:
        return number.name == columns.step
    last = number.name.split()[-1].rsplit("/", 1)[-1].lower()
    return last in _STEP_WORDS or number.name == "s"
