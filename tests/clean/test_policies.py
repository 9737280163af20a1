"""Which of several like rows stays, and which rows stay whatever is like them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonl_files import write_jsonl

from auditor.clean.config import DedupeConfig
from auditor.clean.decide import Marked
from auditor.clean.dedupe import dedupe
from auditor.clean.manifest import Manifest
from auditor.clean.verify import verify

LOREM = " ".join(f"word{i}" for i in range(60))
NEAR = LOREM.replace("word59", "other")  # similarity 55 / 57 = .96
FAR = LOREM.replace("word50", "x").replace("word40", "y")  # similarity 46 / 66 = .70


def clean(tmp_path: Path, rows: list[Any], *, marked: Marked | None = None, **config: Any) -> Any:
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    manifest = dedupe([path], tmp_path / "out", config=DedupeConfig(**config), marked=marked)
    assert verify(tmp_path / "out").ok
    return manifest


def fates(manifest: Manifest) -> list[str]:
    """Of each row: kept, or the reason and the row it was dropped for."""
    return [
        "kept" if reason is None else reason if keeper is None else f"{reason} {keeper}"
        for reason, keeper in manifest.rows.select("reason", "keeper_row").iter_rows()
    ]


def test_the_row_with_the_best_number_stays(tmp_path: Path) -> None:
    rows = [{"text": LOREM, "score": 1}, {"text": NEAR, "score": 2.5}, {"text": LOREM}]
    best = clean(tmp_path / "highest", rows, keep="highest:score")
    assert fates(best) == ["near 1", "kept", "near 1"]
    worst = clean(tmp_path / "lowest", rows, keep="lowest:score")
    assert fates(worst) == ["kept", "near 0", "exact 0"]


@pytest.mark.parametrize("no_number", [None, "9", [9], float("nan"), 10**400])
def test_rows_whose_number_is_none_come_last(tmp_path: Path, no_number: Any) -> None:
    rows = [{"text": LOREM, "score": no_number}, {"text": NEAR, "score": -1e300}]
    for keep in ("highest:score", "lowest:score"):
        manifest = clean(tmp_path / keep.replace(":", "-"), rows, keep=keep)
        assert fates(manifest) == ["near 1", "kept"]


def test_a_column_inside_of_another_may_be_named(tmp_path: Path) -> None:
    rows = [{"text": LOREM, "meta": {"score": 1}}, {"text": NEAR, "meta": {"score": 2}}]
    assert fates(clean(tmp_path, rows, keep="highest:meta.score")) == ["near 1", "kept"]


def test_preferred_sources_go_before_what_keep_says(tmp_path: Path) -> None:
    rows = [
        {"text": LOREM + " at the end", "source": "web"},
        {"text": NEAR, "source": "wiki"},
        {"text": LOREM, "source": "books"},
    ]
    assert fates(clean(tmp_path / "a", rows, keep="longest")) == ["kept", "near 0", "near 0"]
    manifest = clean(tmp_path / "b", rows, keep="longest", prefer=("books", "wiki"))
    assert fates(manifest) == ["near 2", "near 2", "kept"]


def test_a_row_is_dropped_by_the_threshold_of_its_own_source(tmp_path: Path) -> None:
    rows = [
        {"text": LOREM, "source": "law"},
        {"text": FAR, "source": "law"},
        {"text": FAR + " indeed", "source": "web"},
    ]
    manifest = clean(tmp_path, rows, threshold=0.6, thresholds={"law": 0.98})
    assert fates(manifest) == ["kept", "kept", "near 1"]


def test_contents_are_one_cluster_by_the_threshold_of_any_row_that_has_them(tmp_path: Path) -> None:
    """Row 2 has the content of row 1, and the threshold of another source."""
    rows = [
        {"text": LOREM, "source": "strict"},
        {"text": FAR, "source": "strict"},
        {"text": FAR, "source": "lax"},
    ]
    settings: Any = {"threshold": 0.98, "thresholds": {"lax": 0.6}}
    dropped = clean(tmp_path / "dropped", rows, **settings)
    assert fates(dropped) == ["kept", "kept", "exact 1"]
    assert dropped.rows["cluster"].to_list() == [0, 0, 0]
    soft = clean(tmp_path / "soft", rows, **settings, soft=True)
    assert soft.rows["weight"].to_list() == pytest.approx([1 / 3] * 3)


def test_copies_are_counted_whether_exact_or_near(tmp_path: Path) -> None:
    rows = [{"text": text} for text in (LOREM, NEAR, LOREM, NEAR, "something else")]
    manifest = clean(tmp_path, rows, copies=2)
    assert fates(manifest) == ["kept", "kept", "exact 0", "exact 1", "kept"]


def test_soft_drops_no_duplicate_and_shares_one_weight(tmp_path: Path) -> None:
    rows = [{"text": text} for text in (LOREM, NEAR, LOREM, "alone", "buy now " * 40, None)]
    manifest = clean(tmp_path, rows, soft=True)
    assert fates(manifest) == ["kept"] * 4 + ["repetition", "kept"]
    third = pytest.approx(1 / 3)
    assert manifest.rows["weight"].to_list() == [third, third, third, 1, 0, 1]


def test_protected_rows_stay_and_others_are_dropped_for_them(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "text": LOREM, "source": "web"},
        {"id": "b", "text": LOREM, "source": "ours"},
        {"id": "c", "text": NEAR, "source": "ours"},
        {"id": "d", "text": NEAR, "source": "web"},
        {"id": "e", "text": "buy now " * 40, "source": "ours"},
        {"id": "f", "text": "buy now " * 40, "source": "web"},
    ]
    marked = Marked(implicated=["c", "f"], exposed=["b"])
    manifest = clean(
        tmp_path, rows, protect_sources=("ours",), protect_ids=frozenset({"d"}), marked=marked
    )
    assert fates(manifest) == ["exact 1", "kept", "kept", "kept", "kept", "implicated"]


def test_only_what_is_like_a_named_row_is_cleaned(tmp_path: Path) -> None:
    other = " ".join(f"other{i}" for i in range(60))
    rows = [
        {"id": "a", "text": LOREM},
        {"id": "b", "text": other},
        {"id": "c", "text": NEAR},
        {"id": "d", "text": other},
        {"id": "e", "text": "buy now " * 40},
        {"id": "f", "text": "sell now " * 40},
        {"id": "g", "text": LOREM},
    ]
    manifest = clean(tmp_path / "1", rows, marked=Marked(only=["c", "f", "gone"]))
    assert fates(manifest) == ["kept", "kept", "near 0", "kept", "kept", "repetition", "exact 0"]
    assert manifest.rows["cluster"].null_count() == 2  # known all the same
    soft = clean(tmp_path / "2", rows, marked=Marked(only=["c"]), soft=True)
    assert soft.rows["weight"].to_list() == pytest.approx([1 / 3, 1, 1 / 3, 1, 1, 1, 1 / 3])
    assert fates(clean(tmp_path / "3", rows, marked=Marked(only=[]))) == ["kept"] * 7


def test_rows_that_the_run_or_a_report_named_go_and_keep_nothing(tmp_path: Path) -> None:
    rows = [{"id": name, "text": LOREM} for name in "abc"]
    manifest = clean(tmp_path, rows, marked=Marked(exposed=["a", "b"], implicated=["b"]))
    assert fates(manifest) == ["exposure", "implicated", "kept"]
    assert manifest.rows["cluster"].to_list() == [None, None, None]


def test_what_cannot_be_read_is_dropped_even_where_it_is_protected(tmp_path: Path) -> None:
    path = tmp_path / "ours.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "cut\n')
    config = DedupeConfig(on_error="skip", protect_sources=("ours",))
    assert fates(dedupe([path], tmp_path / "out", config=config)) == ["kept", "unreadable"]
