"""The command that shows all of it."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.cli.command import console


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-run"),
    show_default=True,
    help="A new folder, or that of an earlier demo, which is replaced.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of data and model."
)
@click.option("--steps", type=int, help="Steps per training run, at least 260.  [default: 420]")
@click.option("--quick", is_flag=True, help="300 steps.")
@click.option("--clean", is_flag=True, help="Plant nothing.")
@click.option("--lr-spike", is_flag=True, help="Plant nothing; raise the learning rate instead.")
def demo(out: Path, seed: int, steps: int | None, quick: bool, clean: bool, lr_spike: bool) -> None:
    """Train, report, clean and train again on real text.

    Trains a small GPT on four sources, one of which begins to repeat itself; reports which; cleans
    the shards; trains again, and once more with as many samples removed at random.

    \b
    Examples:
      auditor demo
      auditor demo --quick --seed 3
      auditor demo --lr-spike --out spike/      an event that no data caused
    """
    from auditor.demo.story import MIN_STEPS, QUICK_STEPS, STEPS, tell

    if steps is None:
        steps = QUICK_STEPS if quick else STEPS
    if steps < MIN_STEPS:
        raise click.UsageError(f"the demo needs at least {MIN_STEPS} steps, got {steps}")
    tell(out, console(), seed=seed, steps=steps, plant=not (clean or lr_spike), lr_spike=lr_spike)
