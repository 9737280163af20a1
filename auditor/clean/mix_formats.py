"""A mix, written the way a training stack reads it.

    text = write_mix("megatron", proposal, stages, paths={"novels": "data/novels_text_document"})

Weights are shares of the samples, of the tokens in formats that draw sequences or tokens; they sum
to one. A source without a path is written under its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from auditor.clean.proposal import Proposal, Stage, token_weights

MIX_VERSION: Final = 1
"""Version of the neutral format."""

FORMATS: Final = (
    *("neutral", "megatron", "mosaicml", "hf", "energon", "olmo-core", "nanotron", "litdata"),
    "webdataset",
)

STAGED: Final = frozenset({"neutral", "nanotron"})
"""Formats that can say from which step on weights hold."""

BY_TOKENS: Final = frozenset({"megatron", "nanotron", "olmo-core"})
"""Formats that weigh sources by tokens, or by sequences of as many tokens each."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of a mix: ``weight`` as the format counts it, ``path`` as the format reads it."""

    name: str
    path: str
    weight: float


def write_mix(
    form: str,
    proposal: Proposal,
    stages: Sequence[Stage],
    *,
    paths: Mapping[str, str],
    run_id: str,
    per_split: bool = False,
) -> str:
    """The proposed mix, or the recorded one where nothing is proposed, as the text of a file.

    Args:
        form: one of ``FORMATS``.
        stages: of :func:`auditor.clean.proposal.ramp`; formats outside ``STAGED`` have the last.
        paths: by source, as the format wants them: prefix, folder, pattern or URL.
        per_split: of Megatron, JSON with a list for each split instead of one line.

    Raises:
        ValueError: a path that the format cannot express.
    """
    if form == "neutral":
        return _neutral(proposal, stages, paths, run_id)
    if form == "nanotron":
        return _nanotron(proposal, stages, paths)
    sources = _sources(form, proposal, proposal.mix, paths)
    if form == "megatron" and per_split:
        return _megatron_per_split(sources)
    if form == "olmo-core":
        return _olmo_core(sources, proposal.max_epochs)
    return _WRITERS[form](sources, run_id)


def _sources(
    form: str, proposal: Proposal, weights: Mapping[str, float], paths: Mapping[str, str]
) -> list[Source]:
    if form in BY_TOKENS:
        weights = token_weights(proposal, weights)
    return [
        Source(name=name, path=paths.get(name, name), weight=weight)
        for name, weight in weights.items()
    ]


# -- ours --------------------------------------------------------------------------------------


def _neutral(
    proposal: Proposal, stages: Sequence[Stage], paths: Mapping[str, str], run_id: str
) -> str:
    mix = proposal.mix
    tokens = token_weights(proposal, mix)
    epochs = proposal.projected_epochs or proposal.epochs_now
    document = {
        "format": "auditor-mix",
        "schema_version": MIX_VERSION,
        "run_id": run_id,
        "changed": mix != proposal.weights_now,
        "max_factor": proposal.max_factor,
        "max_epochs": proposal.max_epochs,
        "sources": [
            {
                "source": name,
                "path": paths.get(name),
                "weight": weight,
                "weight_now": proposal.weights_now[name],
                "token_weight": tokens[name] if proposal.tokens_per_sample else None,
                "epochs_now": proposal.epochs_now[name],
                "projected_epochs": epochs[name],
            }
            for name, weight in mix.items()
        ],
        "stages": [
            {"first_step": one.first_step, "last_step": one.last_step, "weights": one.weights}
            for one in stages
        ],
    }
    return json.dumps(document, indent=2) + "\n"


# -- Megatron ----------------------------------------------------------------------------------


def _megatron(sources: Sequence[Source], _: str) -> str:
    """The words of ``--data-path``, which ``--data-args-path`` reads from a file."""
    for source in sources:
        if len(source.path.split()) != 1:
            raise ValueError(
                f"Megatron splits its list of data at spaces, and the path of {source.name!r} has "
                f"some or is empty: {source.path!r}; --out FILE.json writes a list for each split"
            )
    return " ".join(f"{one.weight!r} {one.path}" for one in sources) + "\n"


def _megatron_per_split(sources: Sequence[Source]) -> str:
    """What ``--per-split-data-args-path`` reads; only the training split is ours to say."""
    train = [word for one in sources for word in (repr(one.weight), one.path)]
    return json.dumps({"train": train, "valid": None, "test": None}, indent=2) + "\n"


# -- YAML --------------------------------------------------------------------------------------


def _mosaicml(sources: Sequence[Source], run_id: str) -> str:
    """The streams of a LLM Foundry ``train_loader``; each is what ``streaming.Stream`` takes."""
    streams = {
        one.name: {"remote" if "://" in one.path else "local": one.path, "proportion": one.weight}
        for one in sources
    }
    return _yaml({"train_loader": {"dataset": {"streams": streams}}}, run_id)


def _energon(sources: Sequence[Source], run_id: str) -> str:
    """A metadataset; relative paths are seen from the folder of its file."""
    blend = [{"weight": one.weight, "path": one.path} for one in sources]
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    return _yaml({**head, "splits": {"train": {"blend": blend}}}, run_id)


def _olmo_core(sources: Sequence[Source], max_epochs: float) -> str:
    """A ``SourceMixtureList``; a source may be repeated up to the budget of the proposal."""
    listed = [
        {
            "source_name": one.name,
            "target_ratio": one.weight,
            "paths": [one.path],
            "max_repetition_ratio": max(1.0, float(max_epochs)),
        }
        for one in sources
    ]
    return _yaml({"sources": listed})


def _nanotron(proposal: Proposal, stages: Sequence[Stage], paths: Mapping[str, str]) -> str:
    """``data_stages``. Nanotron counts steps from 1 and wants a stage that starts there."""
    named = [("recorded mix", 1, proposal.weights_now)]
    if proposal.weights:
        n = len(stages) - 1
        named += [
            (f"ramp {i} of {n}" if i <= n else "proposed mix", stage.first_step + 1, stage.weights)
            for i, stage in enumerate(stages, 1)
        ]
        if named[1][1] == 1:  # it begins anew: there is no past to keep
            del named[0]
    data_stages = []
    for name, start, weights in named:
        sources = _sources("nanotron", proposal, weights, paths)
        dataset = {
            "dataset_folder": [one.path for one in sources],
            "dataset_weights": [one.weight for one in sources],
        }
        data = {"dataset": dataset, "num_loading_workers": 1, "seed": 42}
        data_stages.append({"name": name, "start_training_step": start, "data": data})
    return _yaml({"data_stages": data_stages})


def _yaml(document: Mapping[str, Any], run_id: str | None = None) -> str:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError("this format is YAML and needs: pip install pyyaml") from error
    comment = "" if run_id is None else f"# Mix proposed by auditor from run {run_id!r}\n"
    text: str = yaml.safe_dump(document, sort_keys=False)
    return comment + text


# -- Python, for stacks that mix in code -------------------------------------------------------


def _hf(sources: Sequence[Source], run_id: str) -> str:
    listed = [(one.name, *_loaded_as(one.path), one.weight) for one in sources]
    return _module(
        run_id,
        "from datasets import interleave_datasets, load_dataset",
        "# source, builder or name of the dataset, its files, weight",
        listed,
        '''
def mixed(*, split="train", streaming=True, seed=0):
    """The mix as one dataset; a source that ends begins again, so that the weights hold."""
    parts = [
        load_dataset(builder, data_files=files, split=split, streaming=streaming)
        for _, builder, files, _ in SOURCES
    ]
    return interleave_datasets(
        parts,
        probabilities=[weight for *_, weight in SOURCES],
        seed=seed,
        stopping_strategy="all_exhausted",
    )
''',
    )


_BUILDERS: Final = {
    "json": ("json", "jsonl"),
    "parquet": ("parquet",),
    "csv": ("csv",),
    "text": ("txt",),
    "arrow": ("arrow",),
    "webdataset": ("tar",),
}


def _loaded_as(path: str) -> tuple[str, str | None]:
    """What ``load_dataset`` takes: a builder and its files, or the name of a dataset or folder."""
    parts = path.rsplit("/", 1)[-1].lower().split(".")[1:]
    for builder, suffixes in _BUILDERS.items():
        if any(part in suffixes for part in parts[-2:]):
            return builder, path
    return path, None


def _litdata(sources: Sequence[Source], run_id: str) -> str:
    return _module(
        run_id,
        "from litdata import CombinedStreamingDataset, StreamingDataset",
        "# source, folder or URL, weight",
        [(one.name, one.path, one.weight) for one in sources],
        '''
def mixed(*, seed=42, **settings):
    """The mix as one dataset, which ends with the first source that ends.

    Settings (shuffle, drop_last, item_loader, ...) are those of every StreamingDataset.
    """
    parts = [StreamingDataset(path, **settings) for _, path, _ in SOURCES]
    weights = [weight for *_, weight in SOURCES]
    return CombinedStreamingDataset(parts, seed=seed, weights=weights, iterate_over_all=False)
''',
    )


def _webdataset(sources: Sequence[Source], run_id: str) -> str:
    return _module(
        run_id,
        "import webdataset",
        "# source, URLs of its shards, weight",
        [(one.name, one.path, one.weight) for one in sources],
        '''
def mixed(prepare=lambda dataset: dataset, **settings):
    """The mix as one dataset without an end: shards are drawn again and again.

    ``prepare`` is applied to each source's WebDataset (shuffle, decode, ...).
    """
    settings = {"resampled": True, "shardshuffle": False, **settings}
    parts = [prepare(webdataset.WebDataset(urls, **settings)) for _, urls, _ in SOURCES]
    return webdataset.RandomMix(parts, probs=[weight for *_, weight in SOURCES])
''',
    )


def _module(
    run_id: str, imports: str, columns: str, rows: Sequence[tuple[Any, ...]], body: str
) -> str:
    """A Python module. Text from data is in it as literals of Python alone."""
    listed = "".join(f"    {row!r},\n" for row in rows)
    return (
        f"# Mix proposed by auditor from run {run_id!r}\n\n{imports}\n\n"
        f"SOURCES = [\n    {columns}\n{listed}]\n\n{body}"
    )


_WRITERS: Final[Mapping[str, Callable[[Sequence[Source], str], str]]] = {
    "megatron": _megatron,
    "mosaicml": _mosaicml,
    "hf": _hf,
    "energon": _energon,
    "litdata": _litdata,
    "webdataset": _webdataset,
}
