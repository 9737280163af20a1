"""``auditor dedupe``, ``explain``, ``restore`` and ``verify`` as a user types them."""

from __future__ import annotations

import codecs
import json
import re
import sys
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
from click.testing import CliRunner, Result
from torch.utils.data import DataLoader

from auditor import AuditedSampler, GradeMonitor
from auditor.clean.decide import REASONS
from auditor.clean.engine import InProcess, Processes
from auditor.clean.formats import jsonl
from auditor.clean.shards import Shard
from auditor.cli import engines, main
from auditor.cli.progress import progress_bar
from auditor.demo.corpus import ShardRows, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.schema import ROWS

PAGE = Path(__file__).parents[1] / "docs" / "cleaning.md"
ELSEWHERE = "--shards --engine --address"
"""Options that the README and docs/cluster.md tell of."""

LOREM = " ".join(f"word{i}" for i in range(60))
NEAR = LOREM.replace("word59", "other")  # .965 of the shingles


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback is a bug
    return result


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    web = [("w0", LOREM, 1), ("w1", NEAR, 9), ("w2", "buy now " * 40, 0), ("w3", "alone", 5)]
    wiki = [("k0", LOREM + " at the very end", 3), ("k1", LOREM, 4), ("k2", "alone", 1)]
    for source, rows in (("web", web), ("wiki", wiki)):
        write(
            tmp_path / "corpus" / f"{source}.jsonl",
            [{"id": i, "text": t, "score": s, "source": source} for i, t, s in rows],
        )
    return tmp_path / "corpus"


def dropped(corpus: Path, *options: object) -> dict[str, str]:
    """Reason by sample id, of a command with these options."""
    out = corpus.parent / "out"
    result = run("dedupe", corpus, "--out", out, *options)
    assert result.exit_code == 0, result.output
    rows = pl.read_parquet(out / "rows.parquet").filter(pl.col("decision") == "dropped")
    return dict(rows.select("sample_id", "reason").iter_rows())


def test_dedupe_without_options(corpus: Path) -> None:
    assert dropped(corpus) == {
        "w1": "near",
        "w2": "repetition",
        "k0": "near",
        "k1": "exact",
        "k2": "exact",
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--threshold", "1"], {"w2", "k1", "k2"}),
        (
            ["--source-threshold", "web=0.99", "--source-threshold", "x=0.5"],
            {"w2", "k0", "k1", "k2"},
        ),
        (["--keep", "longest"], {"w0", "w1", "w2", "k1", "k2"}),
        (["--keep", "highest:score"], {"w0", "w2", "k0", "k1", "k2"}),
        (["--keep", "lowest:score"], {"w1", "w2", "k0", "k1", "w3"}),
        (["--prefer", "nobody", "--prefer", "wiki"], {"w0", "w1", "w2", "w3", "k1"}),
        (["--copies", "2"], {"w2", "k0", "k1"}),
        (["--soft"], {"w2"}),
        (["--protect-source", "web"], {"k0", "k1", "k2"}),
        (["--keep-repetitive"], {"w1", "k0", "k1", "k2"}),
        (["--repetitive-share", "1"], {"w1", "w2", "k0", "k1", "k2"}),
        (["--shingle", "char5", "--threshold", "0.99"], {"w2", "k1", "k2"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_policy_has_an_option(corpus: Path, options: list[str], expected: set[str]) -> None:
    assert set(dropped(corpus, *options)) == expected


def test_ids_to_protect_come_from_a_file(corpus: Path, tmp_path: Path) -> None:
    """One a line; a byte order mark is no part of the first."""
    (tmp_path / "ids.txt").write_bytes(codecs.BOM_UTF8 + b"k1\r\n\nw2\nnobody\n")
    found = dropped(corpus, "--protect-ids", tmp_path / "ids.txt")
    assert set(found) == {"w0", "w1", "k0", "k2"}  # k1 stays in the place of w0
    result = run(*("dedupe", corpus, "--dry-run", "--protect-ids", tmp_path / "ids.txt", "--json"))
    assert result.stderr == "--protect-ids: no row has the id nobody\n"
    assert json.loads(result.stdout)["parameters"]["protect_ids"] == ["k1", "nobody", "w2"]


def test_raw_tokens_need_their_type(tmp_path: Path) -> None:
    ids = [*range(20), 0, *range(30, 60), 0, *range(1, 20), 0]
    (tmp_path / "a.bin").write_bytes(b"".join(i.to_bytes(2, "little") for i in ids))
    assert "--dtype" in run("dedupe", tmp_path / "a.bin", "--out", tmp_path / "out").output
    result = run(
        *("dedupe", tmp_path / "a.bin", "--out", tmp_path / "out"),
        *("--dtype", "uint16", "--eot", "0", "--json"),
    )
    assert json.loads(result.stdout)["counts"]["rows_in"] == 4  # the first 0 ends an empty one


def test_manifest_only_writes_no_shards_and_still_serves(corpus: Path, tmp_path: Path) -> None:
    result = run("dedupe", corpus, "--out", tmp_path / "out", "--manifest-only")
    assert result.exit_code == 0
    assert "7 rows in, 2 rows kept" in result.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["manifest.json", "rows.parquet"]
    assert run("verify", tmp_path / "out").exit_code == 0
    assert "near" in run("explain", tmp_path / "out", "w1").output


def test_substrings_are_listed_on_request(tmp_path: Path) -> None:
    boilerplate = " ".join(f"legal{i}" for i in range(60))
    rows = [{"text": f"{' '.join(f'{i}x{j}' for j in range(300))} {boilerplate}"} for i in range(2)]
    write(tmp_path / "in" / "a.jsonl", rows)
    result = run("dedupe", tmp_path / "in", "--out", tmp_path / "out", "--substrings", "report")
    assert "1 substring duplicates found in 1 rows that stay" in " ".join(result.output.split())
    longer = ["--substrings", "report", "--substring-elements", "61"]
    result = run("dedupe", tmp_path / "in", "--dry-run", *longer)
    assert "0 substring duplicates found" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source-threshold", "web"], ["SOURCE=VALUE", "'web'"]),
        (["--source-threshold", "web=high"], ["SOURCE=VALUE", "'web=high'"]),
        (["--source-threshold", "web=2"], ["threshold", "web=2.0"]),
        (
            ["--source-threshold", "web=0.9", "--source-threshold", "web=0.5"],
            ["--source-threshold names 'web' twice: 0.9 and 0.5"],
        ),
        (["--keep", "best"], ["highest:COLUMN", "'best'"]),
        (["--copies", "0"], ["copies", "0"]),
        (["--soft", "--copies", "2"], ["copies must be 1"]),
        (["--max-exposures", "3"], ["--max-exposures", "run"]),
        (["--address", "auto"], ["--engine ray"]),
        (["--workers", "0"], ["--workers"]),
        (["--substring-elements", "0"], ["substring_elements"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_usage_is_a_message(corpus: Path, arguments: list[str], words: list[str]) -> None:
    result = run("dedupe", corpus, "--dry-run", *arguments)
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in " ".join(result.output.split())


def test_help_groups_the_options_and_the_rest_comes_last() -> None:
    text = run("dedupe", "--help").output
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "What counts as a duplicate:",
        "Which row stays:",
        "What else is dropped:",
        "How inputs are read:",
        "What is written:",
        "Where it runs:",
        "Other options:",
    ]
    options = {name for one in main.commands["dedupe"].params for name in one.opts if "--" in name}
    assert all(option in text for option in options)


def test_dry_run_shows_samples_and_writes_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = run("dedupe", "corpus", "--dry-run")
    assert result.exit_code == 0
    for told in (
        "near: 2 rows",
        "web.jsonl:1",
        "web.jsonl:0",
        "[-other-]",
        "rows would be written",
    ):
        assert told in result.output
    result = run("dedupe", "corpus", "--dry-run", "--samples", "1", "--json")
    document = json.loads(result.stdout)
    assert document["out"] is None
    assert [one["reason"] for one in document["samples"]] == ["exact", "near", "repetition"]
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_into_a_folder_in_use_is_refused_as_the_real_one_is(corpus: Path) -> None:
    assert run("dedupe", corpus, "--out", corpus, "--dry-run").exit_code == 1


def test_page_on_cleaning_names_every_option_reason_and_column() -> None:
    page = PAGE.read_text()
    for name in ("dedupe", "verify", "explain", "restore"):
        for parameter in main.commands[name].params:
            for option in (one for one in parameter.opts if one.startswith("--")):
                assert option in page + ELSEWHERE, option
    for name in (*ROWS, *filter(None, REASONS)):
        assert f"`{name}`" in page, name


def test_page_on_cleaning_gives_the_probability_that_a_pair_is_found() -> None:
    table = re.findall(r"^\| (0\.\d) \| ([\d.e -]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [row[0] for row in table] == ["0.5", "0.6", "0.7", "0.8", "0.9"]
    for s, said in table:
        one, _, less = said.partition(" - ")
        missed = (1 - float(s) ** 4) ** 32
        assert float(less or 1 - float(one)) == pytest.approx(missed, rel=0.3, abs=1e-9)


def test_findings_are_told_on_standard_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x"}, {"text": None}])
    result = run("dedupe", path, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["n_findings"] == 1
    assert "1 finding about the shards" in result.stderr
    assert "a.jsonl:1  'text' is null or missing" in result.stderr


def test_ctrl_c_says_that_the_same_command_goes_on_and_it_does(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = InProcess.map

    def stop(self: Any, stage: Any, tasks: Any, done: Any) -> Any:
        if stage.__name__ == "write_shard":
            raise KeyboardInterrupt
        return whole(self, stage, tasks, done)

    monkeypatch.setattr(InProcess, "map", stop)
    result = run("dedupe", corpus, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert result.output == "Stopped. The same command goes on where it stopped.\n"
    scanned = (tmp_path / "out/.incomplete/scan/000000.json").stat()
    assert scanned.st_size
    monkeypatch.setattr(InProcess, "map", whole)
    assert run("dedupe", corpus, "--out", tmp_path / "out").exit_code == 0
    assert run("verify", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("command", "place", "words"),
    [
        (["dedupe", "{corpus}", "--dry-run"], "dedupe.find_shards", "nothing was written"),
        (["restore", "{out}", "--out", "{out}2"], "restore.restore", "same command"),
        (["verify", "{out}"], "verify.verify", "Stopped."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_ctrl_c_is_a_line_and_an_exit_code(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    place: str,
    words: str,
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    known = {"corpus": corpus, "out": tmp_path / "out"}
    run("dedupe", corpus, "--out", known["out"])
    monkeypatch.setattr(f"auditor.clean.{place}", stop)
    result = run(*(word.format(**known) for word in command))
    assert result.exit_code == 130
    assert words in result.output
    assert result.output.count("\n") == 1


def test_several_workers_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    assert run("dedupe", corpus, "--out", tmp_path / "one").exit_code == 0
    result = run("dedupe", corpus, "--out", tmp_path / "two", "--workers", "2")
    assert result.exit_code == 0, result.output
    for name in ("manifest.json", "rows.parquet", "data/web.jsonl", "data/wiki.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_small_inputs_are_cleaned_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = []
    for i in range(3):
        path = write(tmp_path / f"{i}.jsonl", [{"text": "x"}])
        shards.append(Shard(path, path.name))
    monkeypatch.setattr(engines.os, "sched_getaffinity", lambda _: set(range(8)))

    def chosen(workers: int | None) -> Any:
        with engines.engine_for(shards, name="local", address=None, workers=workers) as engine:
            return engine

    assert isinstance(chosen(None), InProcess)
    assert isinstance(chosen(1), InProcess)
    assert isinstance(chosen(2), Processes)
    monkeypatch.setattr(engines, "_IN_PROCESS_BYTES", 20)
    large = chosen(None)
    assert isinstance(large, Processes)
    assert large._n_workers == 2  # with this process, one a shard


def test_ray_that_is_not_there_names_what_to_install(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run("dedupe", corpus, "--dry-run", "--engine", "ray")
    assert result.exit_code == 1
    assert "auditor[cluster]" in result.output


def test_progress_is_drawn_on_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_bar() as progress:
        assert progress is None
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar(quiet=True) as progress:
        assert progress is None
    with progress_bar() as progress:
        assert progress is not None
        for event in (("read", 0, 10), ("read", 10, 10), ("substrings: scan", 1, 2)):
            progress(*event)


def test_explain_of_ids_and_places(corpus: Path, tmp_path: Path) -> None:
    run("dedupe", corpus, "--out", tmp_path / "out")
    by_id = run("explain", tmp_path / "out", "w1")
    assert by_id.exit_code == 0
    for told in ("dropped: near", "web.jsonl:0", "[-other-]", "Cluster", "computed again"):
        assert told in by_id.output
    assert run("explain", tmp_path / "out", "web.jsonl:1").output == by_id.output
    (row,) = json.loads(run("explain", tmp_path / "out", "k1", "--json").stdout)["rows"]
    assert (row["reason"], row["keeper"]["sample_id"]) == ("exact", "w0")
    assert row["jaccard_recomputed"] == 1.0
    missing = run("explain", tmp_path / "out", "nobody")
    assert missing.exit_code == 1
    assert "'nobody'" in missing.output
    nothing = run("explain", tmp_path / "out", "nobody", "--json")
    assert (nothing.exit_code, json.loads(nothing.stdout)) == (1, {"rows": []})


def test_explain_and_verify_find_inputs_that_moved(corpus: Path, tmp_path: Path) -> None:
    run("dedupe", corpus, "--out", tmp_path / "out")
    corpus.rename(tmp_path / "moved")
    assert "not there any more" in " ".join(run("explain", tmp_path / "out", "w1").output.split())
    parents = ("--parents", tmp_path / "moved")
    assert "[-other-]" in run("explain", tmp_path / "out", "w1", *parents).output
    assert "not there to compare" in run("verify", tmp_path / "out").output
    assert "not there" not in run("verify", tmp_path / "out", *parents).output
    gone = run("restore", tmp_path / "out", "--out", tmp_path / "back")
    assert gone.exit_code == 1
    assert "--parents" in gone.output
    assert run("restore", tmp_path / "out", "--out", tmp_path / "back", *parents).exit_code == 0


def test_verify_says_that_inputs_behind_urls_are_not_compared(tmp_path: Path) -> None:
    """They are there, but would have to be fetched; cleaned shards are what matters."""
    fsspec.filesystem("memory").pipe("/verified/a.jsonl", b'{"text": "x"}\n')
    run("dedupe", "memory://verified", "--out", tmp_path / "out", "--workers", 1)
    result = run("verify", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "not compared, since behind a URL: memory:///verified/a.jsonl\n" in result.output


def test_restore_gives_rows_back(corpus: Path, tmp_path: Path) -> None:
    run("dedupe", corpus, "--out", tmp_path / "out")
    result = run("restore", tmp_path / "out", "--out", tmp_path / "back")
    assert result.exit_code == 0, result.output
    assert "5 rows from 2 shards" in result.output
    lines = (tmp_path / "back" / "web.jsonl").read_text().splitlines()
    assert lines == (corpus / "web.jsonl").read_text().splitlines()[1:3]
    result = run(
        *("restore", tmp_path / "out", "--out", tmp_path / "near"),
        *("--reason", "near", "--source", "wiki", "--json"),
    )
    assert json.loads(result.stdout)["by_shard"] == {"wiki.jsonl": 1}
    wrong = run("restore", tmp_path / "out", "--out", tmp_path / "x", "--reason", "dirty")
    assert wrong.exit_code == 2
    assert "'dirty'" in wrong.output


def test_restore_tells_of_rows_that_cannot_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is too long to be held in memory."""
    monkeypatch.setattr(jsonl, "MAX_BYTES", 200)
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in ("x", "long " * 50, "x")])
    run("dedupe", path, "--out", tmp_path / "out", "--on-error", "skip")
    result = run("restore", tmp_path / "out", "--out", tmp_path / "back")
    assert result.exit_code == 0, result.output
    assert "1 row from 1 shard" in result.output
    assert "1 row not given back: cannot be read" in result.output
    assert "1 in a.jsonl" in result.output
    result = run("restore", tmp_path / "out", "--out", tmp_path / "more", "--json")
    document = json.loads(result.stdout)
    assert (document["n_rows"], document["n_lost"]) == (1, 1)
    assert document["lost_by_shard"] == {"a.jsonl": 1}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained rows 0 and 1 three times, 2 once, and others not at all."""
    folder = tmp_path_factory.mktemp("recorded")
    rows = [
        {"id": f"r{i}", "text": f"{i} " + " ".join(f"{i}x{j}" for j in range(60))} for i in range(6)
    ]
    path = write(folder / "a.jsonl", [{**row, "source": "s"} for row in rows])
    loader = AuditedSampler(
        DataLoader(
            ShardRows([path]), batch_size=1, sampler=[0, 1, 2, 1, 0, 0, 1], collate_fn=collate
        ),
        run=folder / "run",
    )
    model = GPT(GPTConfig(n_positions=64))
    monitor = GradeMonitor(model, run=folder / "run", every=100)
    for batch in loader:
        loss = next_byte_loss(model, batch)
        loss.backward()
        monitor.step(loss)
        model.zero_grad()
    monitor.close()
    return folder / "run"


@pytest.mark.parametrize(("k", "expected"), [(1, [0, 1, 2]), (2, [0, 1]), (3, [0, 1]), (4, [])])
def test_rows_that_the_run_has_seen_often_enough_are_dropped(
    recorded: Path, tmp_path: Path, k: int, expected: list[int]
) -> None:
    result = run("dedupe", recorded, "--out", tmp_path / "out", "--max-exposures", k, "--json")
    assert result.exit_code == 0, result.output
    rows = pl.read_parquet(tmp_path / "out/rows.parquet").filter(pl.col("reason") == "exposure")
    assert rows["row"].to_list() == expected
    assert json.loads(result.stdout)["counts"]["exposure"] == len(expected)
    assert result.stderr == ""


def test_exposed_samples_that_the_shards_lack_are_told(recorded: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b.jsonl", [{"id": "r1", "text": "x"}, {"id": "q", "text": "y"}])
    result = run("dedupe", other, "--run", recorded, "--dry-run", "--max-exposures", "2")
    assert result.exit_code == 0, result.output
    assert "1 dropped: exposure" in " ".join(result.output.split())
    assert "1 of 2 samples that the run was trained on so often" in result.stderr
