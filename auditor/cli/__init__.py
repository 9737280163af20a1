"""The command line. Each command imports what it needs when it runs, so that help is instant.

Exit codes: 0 ok, 1 an error, 2 wrong usage, 3 a grade below ``--fail-below``, 130 interrupted.
"""

from __future__ import annotations

import click

from auditor.cli.cleaned import explain, restore, sketch, verify
from auditor.cli.cleaning import dedupe
from auditor.cli.command import Group
from auditor.cli.demo import demo
from auditor.cli.doctor import doctor
from auditor.cli.importing import import_
from auditor.cli.proposing import propose
from auditor.cli.reading import exposures, grade, replay_order, report, sites, watch
from auditor.cli.recovery import checkpoints, recover

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_COMMANDS = (
    *(report, watch, grade, sites, exposures, replay_order),
    *(recover, checkpoints, propose),
    import_,
    *(dedupe, verify, explain, restore, sketch),
    *(doctor, demo),
)


@click.group(cls=Group, context_settings=_SETTINGS)
@click.version_option(package_name="auditor", message="auditor %(version)s")
def main() -> None:
    """The flight recorder for LLM training data: which data did it?

    Record a training run with AuditedSampler and GradeMonitor (see the README), then:

    \b
      auditor report run/                       what happened, and which data was there
      auditor watch run/                        a dashboard while it trains
      auditor grade run/ --set watch_grade=5    grade a run again by other thresholds
      auditor sites package.module:factory      what the monitor finds in a model
      auditor exposures run/ --step 9500        what the model saw around a step
      auditor replay-order run/                 every sample in the order it was consumed
      auditor recover run/                      what to do after a drop, with numbers
      auditor checkpoints run/                  which checkpoints are from before the damage
      auditor propose run/ --format megatron    what to change about the data, as a mix
      auditor import train.log --out run/       a run directory of another tool's log
      auditor dedupe run/ --out cleaned/        cleaned shards and a manifest
      auditor verify cleaned/                   check the manifest against the files
      auditor explain cleaned/ novels-17        why a row was kept or dropped
      auditor restore cleaned/ --out dropped/   the dropped rows, as shards
      auditor sketch shards/ --out signatures/  sketches for training runs to look up
      auditor doctor --loader train:make_loader what would be recorded, before it is
      auditor demo                              all of it, on real text, in two minutes
    """


for _command in _COMMANDS:
    main.add_command(_command)
