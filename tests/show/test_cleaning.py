"""What cleaning prints: pairs side by side, differences marked, nothing from data live."""

from __future__ import annotations

import gzip
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explanations import HOSTILE
from rich.cells import cell_len
from rich.console import Console

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.lookup import look_up, samples_of
from auditor.clean.manifest import Manifest
from auditor.show.cleaning import (
    found_as_json,
    print_found,
    print_manifest,
    print_samples,
    samples_as_json,
    warnings,
)
from auditor.show.differences import CONTEXT, WINDOW, differences, excerpt

WORDS = [f"word{i}" for i in range(200)]
LOREM = " ".join(WORDS)
NEAR = LOREM.replace("word100", "CHANGED")


def cleaned(folder: Path, rows: list[dict[str, Any]], **config: Any) -> Manifest:
    folder.mkdir(exist_ok=True)
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dedupe([path], folder / "out", config=DedupeConfig(**config), dry_run=True)


def printed(show: Any, *arguments: Any, width: int = 80, **settings: Any) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, highlight=False, **settings), *arguments)
    return out.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_differences_are_the_words_that_differ() -> None:
    found = differences("one two three four", "one 2 three four five")
    assert [(p.text, p.differs) for p in found.left] == [
        ("one", False),
        ("two", True),
        ("three four", False),
    ]
    assert [(p.text, p.differs) for p in found.right] == [
        ("one", False),
        ("2", True),
        ("three four", False),
        ("five", True),
    ]
    assert (found.begin, found.first, found.unit) == (0, 1, "word")


def test_long_contents_show_where_they_begin_to_differ() -> None:
    found = differences(LOREM, NEAR)
    assert (found.begin, found.first) == (100 - CONTEXT, 100)
    shown = " ".join(piece.text for piece in found.left)
    assert shown == " ".join(["…", *WORDS[90 : 90 + WINDOW], "…"])
    (changed,) = [piece.text for piece in found.right if piece.differs]
    assert changed == "CHANGED"


def test_very_long_contents_are_compared_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Counting(differences.__globals__["SequenceMatcher"]):  # type: ignore[misc]
        def __init__(self, junk: Any, a: Any, b: Any, autojunk: bool) -> None:
            sizes.append(max(len(a), len(b)))
            super().__init__(junk, a, b, autojunk)

    monkeypatch.setitem(differences.__globals__, "SequenceMatcher", Counting)
    differences("a " * 200_000 + "x", "a " * 200_000 + "y")
    differences("x" * 1_000_000, "x" * 999_999 + "y")
    assert sizes == [CONTEXT + 1, CONTEXT + 1]


def test_scripts_without_spaces_are_compared_by_character() -> None:
    poem = "慈母手中线,游子身上衣。临行密密缝,意恐迟迟归。"
    found = differences(poem, poem.replace("游", "旅"))
    assert found.unit == "character"
    assert [piece.text for piece in found.left if piece.differs] == ["游"]
    assert "".join(piece.text for piece in found.right) == poem.replace("游", "旅")


def test_tokens_are_compared_by_id() -> None:
    found = differences(np.array([1, 2, 3]), np.array([1, 5, 3]))
    assert (found.unit, found.first) == ("token", 1)
    assert [piece.text for piece in found.right if piece.differs] == ["5"]


def test_equal_contents_have_no_first_difference() -> None:
    assert differences("a  b\n", "a b").first is None
    assert differences("", "").left == ()
    assert differences("a", "a b").first == 1


def test_excerpt_is_the_beginning() -> None:
    assert excerpt("a\nb") == "a b"
    assert excerpt(LOREM) == " ".join(WORDS[:WINDOW]) + " …"


def test_dry_run_shows_pairs_side_by_side_by_reason(tmp_path: Path) -> None:
    rows = [{"text": LOREM}, {"text": NEAR}, {"text": "  " + LOREM}, {"text": "buy now " * 40}]
    manifest = cleaned(tmp_path, rows)
    text = printed(print_samples, manifest, samples_of(manifest, 3))
    for told in (
        "exact: 1 row, ",
        "near: 1 row, ",
        "repetition: 1 row, ",
        "a.jsonl:1",
        "a.jsonl:0",
    ):
        assert told in text
    # Five of the 196 shingles of either are gone.
    assert f"Jaccard {191 / 201:.3f}, computed again {191 / 201:.3f}, from word 90 on" in text
    assert "[-CHANGED-]" in text
    assert "{+word100+}" in text
    assert "no difference but in whitespace" in text
    assert "buy now buy now" in text
    assert max(map(cell_len, text.splitlines())) <= 80


def test_differences_are_coloured_where_there_are_colours(tmp_path: Path) -> None:
    manifest = cleaned(tmp_path, [{"text": LOREM}, {"text": NEAR}])
    text = printed(
        print_samples,
        manifest,
        samples_of(manifest, 1),
        force_terminal=True,
        color_system="standard",
    )
    assert "\x1b[1;31mCHANGED\x1b[0m" in text
    assert "\x1b[1;32mword100\x1b[0m" in text
    assert "[-" not in text


def test_samples_as_json_carry_places_and_excerpts(tmp_path: Path) -> None:
    manifest = cleaned(tmp_path, [{"id": "x", "text": LOREM}, {"id": "y", "text": NEAR}])
    (sample,) = json.loads(json.dumps(samples_as_json(samples_of(manifest, 3))))
    assert (sample["reason"], sample["sample_id"], sample["keeper_row"]) == ("near", "y", 0)
    assert sample["content"]["first_difference"] == 100
    assert "CHANGED" in sample["content"]["row"]
    assert "CHANGED" not in sample["content"]["keeper"]


def test_explain_tells_all_of_a_row(tmp_path: Path) -> None:
    rows = [{"id": "x", "text": LOREM, "source": "web"}, {"id": "y", "text": NEAR}, {"id": "z"}]
    manifest = cleaned(tmp_path, rows)
    text = flat(printed(print_found, look_up(manifest, "y")))
    for told in (
        "Row a.jsonl:1 id y",
        "Source a",
        "Decision dropped: near, similar to a row that stays",
        "Keeper a.jsonl:0, Jaccard 0.950, computed again 0.950",
        "Cluster 0: 2 rows kept a.jsonl:0 id x near a.jsonl:1 id y",
        "[-CHANGED-]",
    ):
        assert told in text
    kept = flat(printed(print_found, look_up(manifest, "x")))
    assert "Decision kept Cluster" in kept
    (row,) = found_as_json(look_up(manifest, "y"))["rows"]
    assert (row["reason"], row["keeper"]["sample_id"], row["cluster_size"]) == ("near", "x", 2)


def test_soft_cleaning_tells_the_weight(tmp_path: Path) -> None:
    manifest = cleaned(tmp_path, [{"text": LOREM}, {"text": NEAR}], soft=True)
    assert "Weight 0.5" in flat(printed(print_found, look_up(manifest, "a.jsonl:1")))


def test_hostile_data_is_inert(tmp_path: Path) -> None:
    rows = [
        {"id": f"{evil[:1000]}{i}", "source": evil[:1000], "text": f"{LOREM} {evil} {i}"}
        for i, evil in enumerate(HOSTILE)
    ]
    manifest = cleaned(tmp_path, rows)
    samples = samples_of(manifest, 20)
    assert len(samples) > 8
    texts = [
        printed(print_samples, manifest, samples),
        printed(
            print_found, [found for i in range(12) for found in look_up(manifest, f"a.jsonl:{i}")]
        ),
        printed(print_manifest, manifest, None),
        "\n".join(warnings(manifest, unknown_ids=HOSTILE)),
    ]
    for text in texts:
        assert not any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in text if c != "\n")
        assert not any(c in text for c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068")
        assert len(text) < 60_000
    assert "[red]markup[/red]" in texts[0]


def test_output_of_an_ascii_log_is_ascii(tmp_path: Path) -> None:
    manifest = cleaned(tmp_path, [{"text": LOREM + " año"}, {"text": NEAR + " año"}])
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=file, width=80)
    print_samples(console, manifest, samples_of(manifest, 1))
    print_found(console, look_up(manifest, "a.jsonl:1"))
    print_manifest(console, manifest, None)
    file.flush()
    assert "CHANGED" in raw.getvalue().decode("ascii")


def test_warnings_count_findings_by_kind_and_show_the_first(tmp_path: Path) -> None:
    rows = [{"text": "x"}, *[{"text": None}] * 6, {"text": 5}]
    told = list(warnings(cleaned(tmp_path, rows)))
    assert told[0] == "7 findings about the shards:"
    assert told[1].split(maxsplit=1) == ["6", "'text' is null or missing"]
    assert [line.split()[0] for line in told[2:5]] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert told[5].split(maxsplit=1) == ["1", "'text' is a number, not text"]
    assert list(warnings(cleaned(tmp_path, [{"text": "x"}]))) == []


def test_numbers_in_findings_make_no_kinds_and_names_with_digits_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": \n{"text": "y" 1}\n{"text": "\xff"}\n{"te')
    config = DedupeConfig(on_error="skip")
    told = list(warnings(dedupe([path], tmp_path / "out", config=config, dry_run=True)))
    kinds = [line.split(maxsplit=1) for line in told[1:] if "a.jsonl:" not in line]
    assert all("UTF-8" in kind for _, kind in kinds)
    assert "Expecting value at character 11" in told[2]


def test_a_column_to_keep_by_that_rows_lack_is_told(tmp_path: Path) -> None:
    rows = [{"text": "x", "score": 1}, {"text": "x", "score": 2}, {"text": "y"}]
    found = {
        column: list(warnings(cleaned(tmp_path / column, rows, keep=f"highest:{column}")))
        for column in ("score", "scoer")
    }
    assert found == {
        "score": ["--keep highest:score: 1 row without a number there come last"],
        "scoer": ["--keep highest:scoer: no row has a number there, so the first ones stay"],
    }


def test_a_shard_that_is_not_read_to_its_end_is_told_beside_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    data = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(9999)))
    path.write_bytes(data[: len(data) // 2])
    config = DedupeConfig(on_error="skip")
    manifest = dedupe([path], tmp_path / "out", config=config, dry_run=True)
    assert 0 < manifest.counts["rows_in"] < 9999
    assert manifest.counts["n_shards_cut_off"] == 1
    assert "1 shard could not be read to the end" in printed(print_manifest, manifest, None)
    assert "not read to its end" in list(warnings(manifest))[1]


def test_a_source_that_lost_all_rows_is_repeated_without_end(tmp_path: Path) -> None:
    rows = [{"text": LOREM, "source": "a"}, {"text": LOREM, "source": "b"}]
    manifest = cleaned(tmp_path, rows)
    assert manifest.document["sources"]["b"]["projected_epochs_at_old_weight"] is None
    (line,) = (one for one in printed(print_manifest, manifest, None).splitlines() if " b " in one)
    assert line.split()[:5] == ["b", "1", "0", "50.0%", "-"]
    nothing = cleaned(tmp_path / "repetitive", [{"text": "buy now " * 40}])
    assert "No row stays" in printed(print_manifest, nothing, None)


def test_shards_of_one_name_that_are_one_source_are_told(tmp_path: Path) -> None:
    for name in ("x/a.jsonl", "y/a.jsonl", "x/b.jsonl", "y/b.jsonl"):
        row = {"text": name, **({"source": "own"} if "b" in name else {})}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    manifest = dedupe([tmp_path / "x", tmp_path / "y"], tmp_path / "out", dry_run=True)
    assert list(warnings(manifest)) == [
        "the source a is that of x/a.jsonl, y/a.jsonl; rows can name their own"
    ]


def test_names_that_match_nothing_are_told(tmp_path: Path) -> None:
    manifest = cleaned(
        tmp_path,
        [{"text": "x", "source": "web"}],
        prefer=("web", "wiki"),
        protect_sources=("exams",),
        thresholds={"code": 0.9},
    )
    assert list(warnings(manifest, unknown_ids={"b", "a"})) == [
        "--prefer: no row is of source wiki",
        "--protect-source: no row is of source exams",
        "--source-threshold: no row is of source code",
        "--protect-ids: no row has the id a, b",
    ]


def test_of_many_sources_the_largest_are_printed(tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "source": f"s{i % 40}"} for i in range(79)]
    text = printed(print_manifest, cleaned(tmp_path, rows), None)
    assert "and 10 more sources, in manifest.json" in text
    assert " s0 " in text
    assert " s39 " not in text  # the one with a single row
