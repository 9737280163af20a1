"""Each mix that is written is what its library reads, with the weights that were proposed.

Where the library is there, it loads what was written, and what it draws is counted. Without it, its
documented rules stand in, and the test of the library is skipped.
"""

from __future__ import annotations

import collections
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from auditor.clean.mix_formats import FORMATS, STAGED, write_mix
from auditor.clean.proposal import Proposal, ramp
from auditor.cli.proposing import _FORMATS

NOW = {"left": 0.5, "right": 0.3, "third": 0.2}
NEW = {"left": 0.25, "right": 0.45, "third": 0.3}
N_DRAWS = 2000


def proposal(**changes: Any) -> Proposal:
    usual = {
        "summary": "Deduplicate, starting with left.",
        "deduplicate": True,
        "weights_now": NOW,
        "weights": NEW,
        "epochs_now": {"left": 3.0, "right": 1.0, "third": 1.0},
        "projected_epochs": {"left": 1.5, "right": 1.5, "third": 1.5},
        "next_step": 100,
    }
    return Proposal(**{**usual, **changes})


def written(form: str, one: Proposal | None = None, n_steps: int = 0, **settings: Any) -> str:
    one = one or proposal()
    settings = {"paths": {}, "run_id": "run-1", **settings}
    return write_mix(form, one, ramp(one, n_steps, one.next_step), **settings)


def shares(drawn: Iterable[str]) -> dict[str, float]:
    counts = collections.Counter(drawn)
    return {name: n / counts.total() for name, n in sorted(counts.items())}


def by_chance(expected: Mapping[str, float] = NEW, n: int = N_DRAWS) -> Any:
    """Within five standard deviations of a draw."""
    return pytest.approx(dict(expected), abs=5 * (0.25 / n) ** 0.5)


def mixed_by(text: str) -> Callable[..., Any]:
    """What a Python module that was written defines."""
    names: dict[str, Any] = {}
    exec(compile(text, "mix.py", "exec"), names)
    return names["mixed"]


def test_command_names_the_formats_that_can_be_written() -> None:
    assert _FORMATS == FORMATS


HOSTILE = "a \"b\" 'c'\n- x: {}\\ #\u202e\U0001f600"


@pytest.mark.parametrize("form", sorted(set(FORMATS) - {"megatron"}))
def test_names_from_data_stay_text(form: str) -> None:
    both = {HOSTILE: 0.75, "other": 0.25}
    one = proposal(weights_now=both, weights={}, epochs_now=both, projected_epochs={})
    text = written(form, one, run_id=HOSTILE)
    if form == "neutral":
        assert [row["source"] for row in json.loads(text)["sources"]] == [HOSTILE, "other"]
    elif "SOURCES" in text:
        listed: dict[str, Any] = {}
        exec(text.split("SOURCES = ")[1].join(["SOURCES = ", ""]).split("\n\n\ndef")[0], listed)
        assert listed["SOURCES"][0][0] == HOSTILE
    else:
        assert HOSTILE in str_leaves(yaml.safe_load(text))
    assert "\u202e" not in text


def str_leaves(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {leaf for one in value.values() for leaf in str_leaves(one)}
    if isinstance(value, list):
        return {leaf for one in value for leaf in str_leaves(one)}
    return {value} if isinstance(value, str) else set()


def test_neutral_tells_old_and_new_weights_epochs_and_stages() -> None:
    document = json.loads(written("neutral", n_steps=20, paths={"left": "data/left"}))
    assert document["format"] == "auditor-mix"
    assert document["schema_version"] == 1
    assert document["changed"] is True
    rows = {row["source"]: row for row in document["sources"]}
    assert {name: row["weight"] for name, row in rows.items()} == NEW
    assert {name: row["weight_now"] for name, row in rows.items()} == NOW
    assert rows["left"]["path"] == "data/left"
    assert rows["right"]["path"] is None
    assert rows["left"]["projected_epochs"] == 1.5
    assert rows["left"]["token_weight"] is None  # lengths were not recorded
    assert document["stages"][0]["first_step"] == 100
    assert document["stages"][-1] == {"first_step": 120, "last_step": None, "weights": NEW}
    assert "neutral" in STAGED


@pytest.mark.parametrize("form", FORMATS)
def test_mix_is_written_as_it_is_where_nothing_is_proposed(form: str) -> None:
    text = written(form, proposal(weights={}, projected_epochs={}), n_steps=10)
    for weight in NOW.values():
        assert repr(weight) in text


# -- Megatron ----------------------------------------------------------------------------------


def test_megatron_reads_weights_and_prefixes() -> None:
    text = written("megatron", paths={"left": "data/left_text_document"})
    words = text.split()  # as --data-args-path does
    assert words[:2] == ["0.25", "data/left_text_document"]
    utils = pytest.importorskip(
        "megatron.core.datasets.utils", reason="Megatron Core is not installed: megatron-core"
    )
    prefixes, weights = utils.get_blend_from_list(words)
    assert prefixes == ["data/left_text_document", "right", "third"]
    assert weights == list(NEW.values())


def test_megatron_reads_a_list_for_each_split() -> None:
    splits = json.loads(written("megatron", per_split=True, paths={"left": "with space/left"}))
    assert set(splits) == {"train", "valid", "test"}
    assert splits["train"][:2] == ["0.25", "with space/left"]
    utils = pytest.importorskip(
        "megatron.core.datasets.utils", reason="Megatron Core is not installed: megatron-core"
    )
    blends = [utils.get_blend_from_list(splits[name]) for name in ("train", "valid", "test")]
    assert blends == [(["with space/left", "right", "third"], list(NEW.values())), None, None]


@pytest.mark.parametrize("path", ["with space/left", ""])
def test_megatron_refuses_what_its_list_cannot_hold(path: str) -> None:
    with pytest.raises(ValueError, match=r"'left'.*--out FILE\.json"):
        written("megatron", paths={"left": path})


def test_stacks_that_draw_tokens_get_weights_by_tokens() -> None:
    one = proposal(tokens_per_sample={"left": 400.0, "right": 100.0, "third": 100.0})
    words = written("megatron", one).split()
    expected = np.array([0.25 * 4, 0.45, 0.3]) / 1.75
    assert [float(word) for word in words[::2]] == pytest.approx(expected.tolist())
    assert written("litdata", one) == written("litdata")


# -- MosaicML ----------------------------------------------------------------------------------


def test_mosaicml_streams_say_whether_they_are_remote() -> None:
    paths = {"left": "s3://bucket/left", "right": "data/right"}
    streams = yaml.safe_load(written("mosaicml", paths=paths))["train_loader"]["dataset"]["streams"]
    assert streams["left"] == {"remote": "s3://bucket/left", "proportion": 0.25}
    assert streams["right"] == {"local": "data/right", "proportion": 0.45}


def test_mosaicml_draws_in_these_proportions(tmp_path: Path) -> None:
    streaming = pytest.importorskip(
        "streaming", reason="MosaicML Streaming is not installed: pip install mosaicml-streaming"
    )
    for i, name in enumerate(NEW):
        with streaming.MDSWriter(out=str(tmp_path / name), columns={"source": "int"}) as out:
            for _ in range(1000):
                out.write({"source": i})
    paths = {name: str(tmp_path / name) for name in NEW}
    streams = yaml.safe_load(written("mosaicml", paths=paths))["train_loader"]["dataset"]["streams"]
    dataset = streaming.StreamingDataset(
        streams=[streaming.Stream(**one) for one in streams.values()],
        batch_size=1,
        epoch_size=N_DRAWS,
    )
    names = list(NEW)
    assert shares(names[row["source"]] for row in dataset) == pytest.approx(NEW, abs=0.01)


# -- Energon -----------------------------------------------------------------------------------


def test_energon_metadataset_has_its_form() -> None:
    document = yaml.safe_load(written("energon"))
    assert (document["__module__"], document["__class__"]) == ("megatron.energon", "MetadatasetV2")
    blend = document["splits"]["train"]["blend"]
    assert {one["path"]: one["weight"] for one in blend} == NEW


def test_energon_draws_in_these_proportions(tmp_path: Path) -> None:
    energon = pytest.importorskip(
        "megatron.energon", reason="Energon is not installed: pip install megatron-energon"
    )
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    for name in NEW:
        write_tar(tmp_path / name / "shard-0.tar", name)
        BaseWebdatasetFactory.prepare_dataset(
            EPath(tmp_path / name), ["shard-0.tar"], split_parts_ratio=[("train", 1.0)], workers=1
        )
        (tmp_path / name / ".nv-meta" / "dataset.yaml").write_text(
            "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
            "field_map: {text: txt}\n"
        )
    mix = tmp_path / "mix.yaml"
    mix.write_text(written("energon", paths={name: f"./{name}" for name in NEW}))
    dataset = energon.get_train_dataset(
        mix,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    loader = iter(energon.get_loader(dataset))
    assert shares(next(loader).text for _ in range(N_DRAWS)) == by_chance()


def write_tar(path: Path, source: str, n: int = 50) -> None:
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        for i in range(n):
            info = tarfile.TarInfo(f"{source}-{i:03d}.txt")
            info.size = len(source)
            tar.addfile(info, io.BytesIO(source.encode()))


# -- OLMo-core ---------------------------------------------------------------------------------


def test_olmo_core_ratios_sum_to_one() -> None:
    sources = yaml.safe_load(written("olmo-core"))["sources"]
    assert sum(one["target_ratio"] for one in sources) == pytest.approx(1.0)
    assert {one["max_repetition_ratio"] for one in sources} == {4.0}


def test_olmo_core_builds_the_mixture(tmp_path: Path) -> None:
    mixtures = pytest.importorskip(
        "olmo_core.data.source_mixture", reason="OLMo-core is not installed: ai2-olmo-core"
    )
    for name in NEW:
        np.arange(100_000, dtype=np.uint16).tofile(tmp_path / f"{name}.npy")
    paths = {name: str(tmp_path / f"{name}.npy") for name in NEW}
    file = tmp_path / "mix.yaml"
    file.write_text(written("olmo-core", paths=paths))
    listed = mixtures.SourceMixtureList.from_yaml(file)
    built = mixtures.SourceMixtureDatasetConfig(
        source_list=listed, requested_tokens=200_000, global_batch_size=1000, render_tables=False
    ).build(npdtype=np.uint16, sequence_length=100)
    tokens = {one.name: sum(path.tokens for path in one.path_tokens) for one in built.sources}
    total = sum(tokens.values())
    assert {name: n / total for name, n in tokens.items()} == pytest.approx(NEW, abs=0.01)


# -- nanotron ----------------------------------------------------------------------------------


def nanotron_stages(n_steps: int, **changes: Any) -> list[dict[str, Any]]:
    stages = yaml.safe_load(written("nanotron", proposal(**changes), n_steps))["data_stages"]
    assert isinstance(stages, list)
    return stages


def test_nanotron_stages_keep_its_rules_and_hold_the_ramp() -> None:
    """Of nanotron's ``Config``: unique names, rising steps, and one stage that starts at 1."""
    stages = nanotron_stages(20)
    starts = [one["start_training_step"] for one in stages]
    # Nanotron counts from 1: its step 101 is step 100 here, the first after the run.
    assert starts == [1, *range(101, 121, 2), 121]
    assert len({one["name"] for one in stages}) == len(stages)
    for one in stages:
        dataset = one["data"]["dataset"]
        assert dataset["dataset_folder"] == list(NEW)
        assert sum(dataset["dataset_weights"]) == pytest.approx(1.0)
    assert stages[0]["data"]["dataset"]["dataset_weights"] == list(NOW.values())
    assert stages[-1]["data"]["dataset"]["dataset_weights"] == list(NEW.values())


def test_nanotron_run_that_begins_anew_has_no_stage_of_the_past() -> None:
    (only,) = nanotron_stages(0, next_step=0)
    assert only["start_training_step"] == 1
    assert only["data"]["dataset"]["dataset_weights"] == list(NEW.values())


def test_nanotron_reads_the_stages() -> None:
    config = pytest.importorskip(
        "nanotron.config", reason="nanotron is not installed", exc_type=ImportError
    )
    dacite = pytest.importorskip("dacite")
    if not hasattr(config, "NanosetDatasetsArgs"):
        pytest.skip("this release of nanotron has no Nanoset; install it from its repository")
    settings = dacite.Config(cast=[Path], strict=True)
    read = [
        dacite.from_dict(config.DatasetStageArgs, one, config=settings)
        for one in nanotron_stages(20)
    ]
    assert read[-1].data.dataset.dataset_weights == list(NEW.values())


# -- stacks that mix in code -------------------------------------------------------------------


def test_datasets_interleaves_files_and_folders_by_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    n = 300
    (tmp_path / "left.jsonl").write_text('{"source": "left"}\n' * n)
    datasets.Dataset.from_dict({"source": ["right"] * n}).to_parquet(tmp_path / "right.parquet")
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "part.jsonl").write_text('{"source": "third"}\n' * n)
    paths = {
        "left": str(tmp_path / "left.jsonl"),
        "right": str(tmp_path / "*.parquet"),
        "third": str(tmp_path / "third"),
    }
    mixed = mixed_by(written("hf", paths=paths))
    for streaming in (True, False):
        rows = mixed(seed=1, streaming=streaming).take(900)
        # A source that ends begins again: the shares hold past the 300 rows of the largest.
        assert shares(row["source"] for row in rows) == by_chance(n=900)


@pytest.mark.parametrize(
    ("path", "builder"),
    [
        ("data/x.jsonl.zst", "json"),
        ("data/*.parquet", "parquet"),
        ("data/x-{00..07}.tar", "webdataset"),
        ("data/notes.txt.gz", "text"),
    ],
)
def test_datasets_files_are_told_by_their_suffix(path: str, builder: str) -> None:
    assert f"('left', {builder!r}, {path!r}, 0.25)" in written("hf", paths={"left": path})


def test_litdata_combines_by_weight(tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata", reason="litdata is not installed: pip install litdata")
    from litdata.streaming.writer import BinaryWriter

    for name in NEW:
        writer = BinaryWriter(str(tmp_path / name), chunk_size=2000)
        for i in range(2 * N_DRAWS):
            writer[i] = name
        writer.done()
        writer.merge()
    paths = {name: str(tmp_path / name) for name in NEW}
    mixed = mixed_by(written("litdata", paths=paths))(seed=3)
    assert isinstance(mixed, litdata.CombinedStreamingDataset)
    rows = iter(mixed)
    assert shares(next(rows) for _ in range(N_DRAWS)) == by_chance()


def test_webdataset_mixes_by_weight(tmp_path: Path) -> None:
    pytest.importorskip("webdataset", reason="WebDataset is not installed: pip install webdataset")
    for name in NEW:
        write_tar(tmp_path / name / "shard-0.tar", name)
    paths = {name: str(tmp_path / name / "shard-{0..0}.tar") for name in NEW}
    mixed = mixed_by(written("webdataset", paths=paths))
    rows = iter(mixed(prepare=lambda dataset: dataset.decode()))
    assert shares(next(rows)["txt"] for _ in range(N_DRAWS)) == by_chance()
