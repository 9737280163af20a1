"""Which fields of a row mean what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor import schema
from auditor.clean.row import choose_content, identity_of, without_padding
from auditor.errors import ShardError


def test_content_is_the_first_column_of_the_schema_that_is_there() -> None:
    names = [*schema.TEXT_COLUMNS, *schema.TOKEN_COLUMNS]
    for i, name in enumerate(names):
        assert choose_content(names[i:][::-1], None, Path("a")) == name


def test_missing_content_names_every_column_looked_for_and_found() -> None:
    with pytest.raises(ShardError) as refused:
        choose_content(["body", "lang"], None, Path("a.jsonl"))
    names = (*schema.TEXT_COLUMNS, *schema.TOKEN_COLUMNS, "'body'", "'lang'")
    assert all(name in str(refused.value) for name in names)


def test_id_is_the_first_column_of_the_schema_that_is_there() -> None:
    names = schema.ID_COLUMNS
    for i in range(len(names)):
        fields = {name: f"by {name}" for name in reversed(names[i:])}
        assert identity_of(fields)[0] == f"by {names[i]}"


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([1, 1, 0, 0], [7, 8]),
        ([0, 0, True, True], [0, 0]),
        ([0, 0, 0, 0], []),
        (None, [7, 8, 0, 0]),
        ([1, 1, 0], [7, 8, 0, 0]),
        # Added to attention scores: 0 is what counts there.
        ([0.0, 0.0, -1e9, -1e9], [7, 8, 0, 0]),
        ([1, 1, None, 0], [7, 8, 0, 0]),
        ([[1], [1], [0], [0]], [7, 8, 0, 0]),
    ],
)
def test_without_padding_believes_masks_of_zeros_and_ones(mask: Any, kept: list[int]) -> None:
    content = without_padding(np.array([7, 8, 0, 0]), mask)
    assert isinstance(content, np.ndarray)
    assert content.tolist() == kept


def test_without_padding_leaves_text_alone() -> None:
    assert without_padding("text", [1, 0, 0, 0]) == "text"
    assert without_padding(None, [1]) is None
