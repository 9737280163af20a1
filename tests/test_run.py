"""Run directories as readers meet them: running, torn, older, newer, foreign, partly copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from auditor import AuditedSampler, GradeMonitor, Run, schema
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.errors import RunError, SchemaVersionError
from auditor.explain.pipeline import explain
from auditor.show.produce import produce
from auditor.tables import polars_schema


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short real run."""
    run = tmp_path_factory.mktemp("recorded") / "run"
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randint(0, 256, (240, 33)))
    loader = AuditedSampler(DataLoader(data, batch_size=8), run=run)
    monitor = GradeMonitor(
        model, run=run, every=2, probe=torch.randint(0, 256, (4, 33)), probe_loss=next_byte_loss
    )
    for number, (batch,) in enumerate(loader):
        if number == 12:
            loader.flush()  # so that the ledger has frames of two moments
        optimizer.zero_grad()
        loss = next_byte_loss(model, batch)
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        optimizer.step()
    monitor.close()
    return run


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_tables_have_the_columns_and_types_of_the_schema(run: Path) -> None:
    opened = Run.open(run)
    for table, columns in (
        ("exposures", schema.EXPOSURES_JOINED),
        ("samples", schema.SAMPLES),
        ("signals", schema.SIGNALS),
    ):
        frame = opened.scan(table).collect()
        assert frame.height > 0
        assert dict(frame.schema) == dict(polars_schema(columns)), table
    explain(opened)
    for table, columns in (
        ("composition", schema.COMPOSITION),
        ("grades", schema.GRADES),
        ("events", schema.EVENTS),
        ("suspects", schema.SUSPECTS),
    ):
        assert dict(opened.scan(table).collect().schema) == dict(polars_schema(columns)), table


def test_derived_tables_and_report_rebuild_identically(run: Path) -> None:
    first = produce(Run.open(run))
    files = {path: path.read_bytes() for path in (run / "derived").rglob("*.*")}
    assert first.html in files
    shutil.rmtree(run / "derived")
    produce(Run.open(run))
    assert {path: path.read_bytes() for path in (run / "derived").rglob("*.*")} == files


def test_a_notebook_shows_what_a_run_is_and_what_is_missing(run: Path) -> None:
    shown = Run.open(run)._repr_html_()
    for told in (
        f"<th scope='row'>folder</th><td>{run}</td>",
        "<th scope='row'>attempts</th><td>1</td>",
        "<th scope='row'>ranks</th><td>1</td>",
        "<td>exposures, samples, signals</td>",
        f"nothing yet: auditor report {run}",
        "<th scope='row'>gaps</th><td>none known</td>",
    ):
        assert told in shown, told
    explain(Run.open(run))
    note = next(run.glob("attempts/rank-*/attempt-*.json"))
    noted = json.loads(note.read_text())
    note.write_text(json.dumps({**noted, "counts": {"<script>": 2}}))
    shown = Run.open(run)._repr_html_()
    assert "<td>composition, grades, events, suspects, drifts</td>" in shown
    assert "2 &lt;script&gt;" in shown
    assert repr(Run.open(run)) == f"Run({str(run)!r})"


def test_torn_tail_is_dropped_counted_and_reported(run: Path) -> None:
    ledger = run / "exposures/rank-00000/attempt-0000.ledger"
    whole = Run.open(run).scan("exposures").collect().height
    ledger.write_bytes(ledger.read_bytes()[:-7])
    opened = Run.open(run)
    table = opened.scan("exposures").sort("step").collect()
    assert table.height == whole  # the torn frame held the scores of the last batches
    assert any("attempt-0000.ledger" in gap and "torn" in gap for gap in opened.gaps())
    assert table["repetition"].head(13 * 8).null_count() == 0
    assert table["repetition"].tail(17 * 8).null_count() == 17 * 8


def test_growing_run_is_read_again(run: Path) -> None:
    ledger = run / "exposures/rank-00000/attempt-0000.ledger"
    content = ledger.read_bytes()
    ledger.write_bytes(content[: len(content) // 2])
    before = Run.open(run).scan("exposures").collect().height
    ledger.write_bytes(content)
    assert Run.open(run).scan("exposures").collect().height > before > 0


def test_run_on_a_read_only_disk_is_explained(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("auditor.run._write_parquet", refuse)
    monkeypatch.setattr("auditor.run.write_json", refuse)
    assert explain(Run.open(run)).n_steps == 30


def test_missing_and_newer_and_broken_runs_are_refused_with_what_to_do(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"nowhere: not a run directory.*run="):
        Run.open(tmp_path / "nowhere")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "schema_version": 99}))
    with pytest.raises(SchemaVersionError, match=r"version 99.*reads 2.*Upgrade"):
        Run.open(run)
    (run / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"cannot be read"):
        Run.open(run)


def test_unknown_table_and_view_are_named(run: Path) -> None:
    opened = Run.open(run)
    with pytest.raises(ValueError, match="'batches'"):
        opened.scan("batches")
    with pytest.raises(ValueError, match="'latest'"):
        opened.scan("exposures", view="latest")  # type: ignore[arg-type]
    with pytest.raises(RunError, match="auditor report"):
        opened.scan("events")


@pytest.mark.parametrize("missing", ["signals", "exposures", "samples"])
def test_partly_copied_run_is_explained_as_far_as_it_goes(run: Path, missing: str) -> None:
    shutil.rmtree(run / missing)
    explanation = explain(Run.open(run))
    assert explanation.n_steps == 30
    assert explanation.culprit is None
    report = produce(Run.open(run))
    assert report.html is not None
    assert report.html.stat().st_size > 1000


def test_ranks_are_read_together_and_a_missing_one_is_reported(run: Path) -> None:
    for table in ("exposures", "samples", "signals", "attempts"):
        shutil.copytree(run / table / "rank-00000", run / table / "rank-00002")
    attempt = run / "attempts/rank-00002/attempt-0000.json"
    attempt.write_text(json.dumps({**json.loads(attempt.read_text()), "rank": 2}))
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "world_size": 3}))
    opened = Run.open(run)
    table = opened.scan("exposures").collect()
    assert table["rank"].unique().sort().to_list() == [0, 2]
    composition = explain(opened).composition
    assert composition.filter(pl.col("step") == 0)["n_samples"].sum() == 16
    assert any("ranks [1] of 3" in gap for gap in opened.gaps())


@pytest.mark.parametrize("content", [b"", b'{"attempt": 0, "ra', b"\xff\xfe", b"[]", b"{}"])
def test_run_whose_attempt_file_is_damaged_is_read_and_the_gap_told(
    run: Path, content: bytes
) -> None:
    whole = Run.open(run).scan("exposures").collect()
    (run / "attempts/rank-00000/attempt-0000.json").write_bytes(content)
    opened = Run.open(run)
    assert opened.scan("exposures").collect().equals(whole)
    assert opened.attempts == []
    (gap,) = opened.gaps()
    assert gap.startswith("attempt 0, rank 0: its attempt-0000.json is damaged")
    assert explain(opened).gaps == [gap]


def test_files_that_are_no_attempts_are_left_alone(run: Path) -> None:
    for folder in ("attempts", "exposures", "samples", "signals"):
        for path in (run / folder / "rank-00000").glob("attempt-0000.*"):
            shutil.copy(path, path.with_name(f"attempt-copy{path.suffix}"))
            shutil.copy(path, path.with_name(f"attempt-0000 (1){path.suffix}"))
    opened = Run.open(run)
    assert [one["attempt"] for one in opened.attempts] == [0]
    assert opened.scan("exposures").collect().height == 240
    loader = AuditedSampler(DataLoader(list(range(4))), run=run)
    loader.close()
    assert [one["attempt"] for one in Run.open(run).attempts] == [0, 1]


@pytest.mark.parametrize("damage", ["cut", "emptied", "overwritten"])
def test_damaged_copies_of_the_facts_are_made_again(run: Path, damage: str) -> None:
    tables = ("exposures", "samples", "signals")
    whole = {table: Run.open(run).scan(table).collect() for table in tables}
    for table in tables:
        copy = run / "derived" / table / "rank-00000" / "attempt-0000.parquet"
        content = copy.read_bytes()
        middle = len(content) // 2
        copy.write_bytes(
            {
                "cut": content[:middle],
                "emptied": b"",
                "overwritten": content[:4] + bytes(middle) + content[4 + middle :],
            }[damage]
        )
    for table in tables:
        assert Run.open(run).scan(table).collect().equals(whole[table])


def test_damaged_derived_table_names_the_file_and_what_to_do(run: Path) -> None:
    explain(Run.open(run))
    (run / "derived/events.parquet").write_bytes(b"garbage")
    with pytest.raises(RunError, match=r"events\.parquet: cannot be read.*Delete .*derived"):
        Run.open(run).scan("events")
    explain(Run.open(run))
    assert Run.open(run).scan("events").collect().is_empty()


def test_run_that_may_not_be_written_is_refused_with_what_to_do(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("auditor.attempt.write_json", refuse)
    with pytest.raises(RunError, match=r"cannot be written \(Permission denied\).*writable folder"):
        AuditedSampler(DataLoader(list(range(4))), run=run)
