"""What all commands share: errors as messages, help in groups, options that mean the same."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from auditor.errors import AuditorError

if TYPE_CHECKING:
    from rich.console import Console


_OTHER: Final = "Other options"

_INTERRUPTED: Final = 130


class Group(click.Group):
    """Turns our errors into one message and an exit code, here and nowhere else."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AuditorError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:  # the reader of our output has seen enough
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or error}") from error
        except KeyboardInterrupt:
            with interruptible():
                raise


class GroupedOption(click.Option):
    """An option that the help lists under a heading of its own."""

    def __init__(self, *args: Any, heading: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heading = heading


def option_under(heading: str) -> Callable[..., Callable[[Any], Any]]:
    """``click.option`` for options that the help lists under this heading."""
    return functools.partial(click.option, cls=GroupedOption, heading=heading)


class GroupedCommand(click.Command):
    """A command whose help lists its options by heading; those without one, last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                heading = getattr(parameter, "heading", _OTHER)
                groups.setdefault(heading, []).append(record)
        groups[_OTHER] = groups.pop(_OTHER)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


@contextmanager
def interruptible(words: str = "Stopped.") -> Iterator[None]:
    """Ctrl-C ends the command with these words and the exit code that shells know."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(words, err=True)
        sys.exit(_INTERRUPTED)


@contextmanager
def checking() -> Iterator[None]:
    """Arguments that the code below refuses are wrong usage; anything later would be a bug."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def console(*, stderr: bool = False) -> Console:
    """Where things are printed."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for machines and nothing else."
)
