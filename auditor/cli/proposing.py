"""The command that says what to change about the data, in the words of the training stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from auditor.cli.command import GroupedCommand, as_json_option, checking, console, option_under

if TYPE_CHECKING:
    from auditor.clean.proposal import Proposal, Stage
    from auditor.explain.explanation import Explanation
    from auditor.run import Run

_FORMATS: Final = (
    *("neutral", "megatron", "mosaicml", "hf", "energon", "olmo-core", "nanotron", "litdata"),
    "webdataset",
)
"""Named here so that help is instant; a test holds them against those that can be written."""

_SKIP_FORMS: Final = ("json", "megatron", "lightning")

_mix = option_under("Mix")
_skipping = option_under("Skip list")


@click.command(cls=GroupedCommand)
@click.argument("run", type=click.Path(path_type=Path))
@_mix(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    help="Write the mix in this format instead of printing the proposal.",
)
@_mix(
    "--paths",
    multiple=True,
    metavar="SOURCE=PATH",
    help="Where a source lies, as the format wants it: prefix, folder, pattern or URL; repeatable. "
    " [default: the source's name]",
)
@_mix(
    "--ramp",
    "ramp_steps",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Go from the recorded mix to the proposed one over so many steps.",
)
@_mix(
    "--max-factor",
    type=click.FloatRange(1.0),
    default=2.0,
    show_default=True,
    help="Most that the weight of a source changes by, up or down.",
)
@_mix(
    "--max-epochs",
    type=click.FloatRange(0.0, min_open=True),
    default=4.0,
    show_default=True,
    help="Repetition budget of a source.",
)
@_skipping(
    "--skip-list",
    "skip_form",
    type=click.Choice(_SKIP_FORMS),
    help="Write the implicated batches: RUN/derived/skip.json for AuditedSampler(skip=), "
    "Megatron's --iterations-to-skip on standard output, or RUN/derived/skip_batches.json.",
)
@click.option(
    "--from-step",
    type=click.IntRange(0),
    metavar="STEP",
    help="Step from which training goes on: where a ramp begins, and from which batches are "
    "counted.  [default: after the last step; the beginning of the attempt]",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to write.")
@as_json_option
def propose(
    run: Path,
    form: str | None,
    paths: tuple[str, ...],
    ramp_steps: int | None,
    max_factor: float,
    max_epochs: float,
    skip_form: str | None,
    from_step: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Propose what to change about the data: deduplicate, reweight, or nothing.

    Follows the verdict of auditor report: where no source is blamed, nothing is proposed, and the
    mix is written as it is. Nothing is changed. Formats: neutral (JSON), megatron (--data-path;
    with --out FILE.json, a list for each split), mosaicml, energon, olmo-core, nanotron (YAML), hf,
    litdata, webdataset (a Python module).

    \b
    Examples:
      auditor propose run/
      auditor propose run/ --ramp 2000
      auditor propose run/ --format neutral --out mix.json
      auditor propose run/ --format megatron --paths novels=data/novels_text_document
      auditor propose run/ --format nanotron --ramp 2000 --out stages.yaml
      auditor propose run/ --skip-list json --from-step 9000
      auditor propose run/ --json | jq '.changes[0]'
    """
    _check_usage(form, paths, ramp_steps, skip_form, from_step, out, as_json)

    from auditor.clean.proposal import propose as proposal_of
    from auditor.clean.proposal import ramp
    from auditor.explain.pipeline import explain
    from auditor.run import Run

    opened = Run.open(run)
    explained = explain(opened)
    if skip_form is not None:
        _skip(opened, explained, skip_form, from_step, out)
        return
    proposal = proposal_of(
        explained.suspects, explained.composition, max_factor=max_factor, max_epochs=max_epochs
    )
    first = proposal.next_step if from_step is None else from_step
    stages = ramp(proposal, ramp_steps or 0, first)
    if form is not None:
        _write(opened, proposal, stages, form, _paths(paths, proposal), out)
        if ramp_steps is not None:
            _tell_of_ramp(form, proposal)
        return
    from auditor.show.proposal import print_proposal, proposal_as_json

    if as_json:
        document = proposal_as_json(opened.run_id, explained.verdict, proposal, stages)
        click.echo(json.dumps(document, indent=2))
    else:
        print_proposal(console(), opened.run_id, explained.verdict, proposal, stages)


def _check_usage(
    form: str | None,
    paths: tuple[str, ...],
    ramp_steps: int | None,
    skip_form: str | None,
    from_step: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    if sum((form is not None, skip_form is not None, as_json)) > 1:
        raise click.UsageError("--format, --skip-list and --json exclude each other")
    if paths and form is None:
        raise click.UsageError("--paths goes with --format")
    if out is not None and form is None and skip_form is None:
        raise click.UsageError("--out goes with --format or --skip-list")
    if ramp_steps is not None and skip_form is not None:
        raise click.UsageError("--ramp goes with a mix, not with --skip-list")
    if from_step is not None and ramp_steps is None and skip_form is None and form is None:
        raise click.UsageError("--from-step goes with --ramp, --format or --skip-list")


def _paths(given: tuple[str, ...], proposal: Proposal) -> dict[str, str]:
    """Paths by source; the name of a source may hold an equals sign itself."""
    found: dict[str, str] = {}
    for one in given:
        names = [name for name in proposal.weights_now if one.startswith(f"{name}=")]
        if not names:
            known = ", ".join(map(repr, proposal.weights_now))
            raise click.UsageError(f"--paths {one!r} names no source; the run has {known}")
        name = max(names, key=len)
        if name in found:
            raise click.UsageError(f"--paths names {name!r} twice")
        found[name] = one[len(name) + 1 :]
    return found


def _write(
    run: Run,
    proposal: Proposal,
    stages: list[Stage],
    form: str,
    paths: dict[str, str],
    out: Path | None,
) -> None:
    from auditor.clean.mix_formats import write_mix
    from auditor.errors import RunError
    from auditor.show.text import clean

    if not proposal.weights_now:
        raise RunError(
            "no exposures were recorded, so there is no mix to write",
            path=run.path,
            remedy="Record with AuditedSampler",
        )
    per_split = out is not None and out.suffix == ".json"
    with checking():
        text = write_mix(
            form, proposal, stages, paths=paths, run_id=run.run_id, per_split=per_split
        )
    _deliver(text, out)
    if not proposal.weights:
        click.echo(f"{proposal.summary} The mix is written as it is.", err=True)
    if form != "neutral" and (missing := [n for n in proposal.weights_now if n not in paths]):
        names = ", ".join(map(clean, missing))
        click.echo(f"No path given for {names}: written under the source's name.", err=True)


def _tell_of_ramp(form: str, proposal: Proposal) -> None:
    from auditor.clean.mix_formats import STAGED

    if proposal.weights and form not in STAGED:
        click.echo(
            f"{form} has no stages: the proposed mix is written, without the ramp. --format "
            f"{' or '.join(sorted(STAGED))} writes the weights per range of steps.",
            err=True,
        )


def _skip(
    run: Run, explained: Explanation, form: str, from_step: int | None, out: Path | None
) -> None:
    from auditor.clean.proposal import NO_CHANGE
    from auditor.explain.stretches import blamed_stretches, skip_list
    from auditor.show.proposal import skip_as_json

    stretches = blamed_stretches(explained.events, explained.suspects, explained.composition)
    by_step = form == "megatron"
    with checking():
        skipped = skip_list(stretches, run.exposures, from_step)
    n = len(skipped.steps) if by_step else len(skipped.batches)
    if by_step:
        words = ["--iterations-to-skip", *map(str, skipped.steps)] if n else []
        text = " ".join(words) + "\n" if words else ""
    else:
        document: Any = list(skipped.batches)
        text = json.dumps(skip_as_json(run.run_id, skipped) if form == "json" else document) + "\n"
        name = "skip.json" if form == "json" else "skip_batches.json"
        out = run.derived / name if out is None else out
    _deliver(text, out)
    where = "" if out is None else f"{out}: "
    what = "iterations" if by_step else "batches"
    ranges = ", ".join(f"{low} to {high}" for low, high in skipped.stretches)
    if n:
        click.echo(f"{where}{n} {what}, of steps {ranges}", err=True)
    else:
        reason = NO_CHANGE if not stretches else f"Nothing after step {from_step} is implicated."
        click.echo(f"{where}nothing to skip. {reason}", err=True)


def _deliver(text: str, out: Path | None) -> None:
    """To a file that is whole or not there, else to standard output."""
    if out is None:
        click.echo(text, nl=False)
        return
    from auditor.files import atomic

    with atomic(out) as file:
        file.write(text.encode())
