"""What AuditedSampler refuses, before anything is recorded, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import Documents, received
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Run

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip": "doc-3"}, "skip .*'doc-3'"),
        ({"skip": 3}, "skip .*3"),
        ({"skip": [1.5]}, "skip .*1.5"),
        ({"skip": [-1]}, "skip .*-1"),
        ({"skip": torch.tensor(3)}, "skip .*3"),
        ({"columns": "extra"}, "columns .*'extra'"),
        ({"columns": [3]}, "columns .*3"),
        ({"columns": None}, "columns .*None"),
        ({"optimizer": MODEL}, "optimizer .*Linear"),
        ({"optimizer": [OPTIMIZER]}, "optimizer .*list"),
        ({"start_step": -1}, "start_step .*-1"),
        ({"start_step": 2.0}, "start_step .*2.0"),
        ({"start_step": "7"}, "start_step .*'7'"),
        ({"start_step": True}, "start_step .*True"),
        ({"run": None}, "run .*None"),
        ({"run": 3}, "run .*3"),
        ({"duplication": None}, "duplication .*None"),
        ({"locator": 5}, "locator .*5"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named_and_leave_no_run(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    options = {"run": tmp_path / "run", **options}
    with pytest.raises(ValueError, match=words):
        AuditedSampler(DataLoader(Documents()), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "skip",
    [[0, 2], (0, 2), {0, 2}, range(0, 3, 2), np.array([0, 2]), torch.tensor([0, 2]),
     [np.int64(0), "doc-25"], np.array(["doc-5", "doc-25"]), iter([0, 2])],
    ids=lambda skip: type(skip).__name__,
)  # fmt: skip
def test_skip_lists_come_in_all_forms(skip: Any, tmp_path: Path) -> None:
    loader = AuditedSampler(
        DataLoader(Documents(40), batch_size=10), run=tmp_path / "run", skip=skip
    )
    assert [received(batch)[0] for batch in loader] == ["doc-10", "doc-30"]
    loader.close()


def test_numbers_of_steps_may_be_of_any_integer_type(tmp_path: Path) -> None:
    for number, start in enumerate([np.int64(7), torch.tensor(7), 7]):
        run = tmp_path / str(number)
        optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
        loader = AuditedSampler(
            DataLoader(Documents(10), batch_size=10), run=run, optimizer=optimizer,
            start_step=start,  # type: ignore[arg-type]
        )  # fmt: skip
        for _ in loader:
            MODEL(torch.ones(1)).sum().backward()
            optimizer.step()
        loader.close()
        assert Run.open(run).scan("exposures").collect()["step"].unique().to_list() == [7]


def test_loader_that_is_recorded_in_the_run_already_is_refused(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    once = AuditedSampler(DataLoader(Documents(), batch_size=10), run=run)
    twice = AuditedSampler(once, run=other)
    for inner in (once, twice):
        with pytest.raises(ValueError, match=r"recorded in .*run already"):
            AuditedSampler(inner, run=str(run))
    assert len(list(twice)) == 7
    once.close()
    twice.close()
    for path in (run, other):
        names = Run.open(path).scan("exposures").collect()["sample_id"]
        assert names.to_list() == [f"doc-{i}" for i in range(70)]


@pytest.mark.parametrize("samples", [torch.zeros(3, 5, dtype=torch.int64), ["a", "b", "c"],
                                     {"x": torch.zeros(3)}])  # fmt: skip
def test_record_of_ids_and_samples_of_different_lengths_is_counted(
    samples: Any, tmp_path: Path, caplog: Any
) -> None:
    audited = AuditedSampler(run=tmp_path / "run")
    audited.record([1, 2, 3, 4], samples)
    audited.record([5, 6, 7], samples)
    audited.close()
    (told,) = [one.getMessage() for one in caplog.records]
    assert "4 ids for a batch of 3 samples" in told
    run = Run.open(tmp_path / "run")
    assert run.gaps() == ["attempt 0, rank 0: AuditedSampler.record failed 1 times"]
    assert run.scan("exposures").collect()["key"].to_list() == [5, 6, 7]
