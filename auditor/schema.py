"""Every table and file format that the product writes: columns, types, meaning, versions.

Column types are named as polars names them in lower case (``i32``, ``i64``, ``f32``, ``f64``,
``str``, ``bool``); a reader casts to them, so that an empty table has the same columns as a full
one. Nothing here imports more than the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RUN_VERSION: Final = 2
"""Version of the run directory's layout, in ``run.json`` and in each ledger's first bytes."""

MANIFEST_VERSION: Final = 1
"""Version of ``manifest.json`` and ``rows.parquet``."""

SKETCHES_VERSION: Final = 1
"""Version of the folders that ``auditor sketch`` writes."""

REPORT_VERSION: Final = 1
"""Version of the JSON that ``auditor report --json`` prints."""

EXPOSURES_VERSION: Final = 1
"""Version of the JSON that ``auditor exposures --json`` prints."""

ID_COLUMNS: Final = ("id", "sample_id", "__key__")
SHARD_COLUMNS: Final = ("shard", "__url__")
TEXT_COLUMNS: Final = ("text",)
TOKEN_COLUMNS: Final = ("input_ids", "tokens")
MASK_COLUMN: Final = "attention_mask"
"""Columns that tell a sample and its content, the first that is there: the same when a run is
recorded and when its shards are cleaned, so that a sample keeps its name."""

UNKNOWN_SOURCE: Final = "unknown"
"""The source of samples whose source is not known, in tables that go by source."""

DUPLICATE_SIMILARITY: Final = 0.8
"""Estimated Jaccard from which a sample counts as a near-duplicate."""

SIMILAR: Final = 0.4
"""Estimated Jaccard from which a sample shares much with another: boilerplate, templates."""

STATES: Final = ("trained", "discarded", "skipped", "delivered", "drawn")
"""What became of an exposure.

``trained``: its gradients were in an optimizer update. ``discarded``: backward ran, no update
followed (a skipped AMP step). ``skipped``: left out on request. ``delivered``: the loop received
it, no step closed over it. ``drawn``: a sampler drew it, nothing else is known.
"""

UNSCORED: Final = 255
"""In a ledger, in place of the number of equal sketch bytes: the sample was not scored."""

SAMPLES: Final[Mapping[str, str]] = {
    "attempt": "i32",
    "rank": "i32",
    "key": "i64",  # the identity that travels in a batch: dataset index, or 63-bit hash of an id
    "sample_id": "str",  # the dataset's own id where it has one, else the index
    "source": "str",  # corpus
    "shard": "str",  # data file, null where unknown
    "row": "i64",  # position in the shard, or in the dataset's table; null where unknown
    "n_tokens": "i64",  # tokens of token samples, characters of text samples; padding apart
    "columns": "str",  # further columns kept on request, as a JSON object
    "preview": "str",  # the first characters of the content; kept for many samples, not for all
}

EXPOSURES: Final[Mapping[str, str]] = {
    "attempt": "i32",  # process life of the run, from 0
    "rank": "i32",
    "step": "i64",  # optimizer update, from 0; null unless trained or discarded
    "batch": "i64",  # ordinal of the loader's batch in this attempt and rank
    "position": "i32",  # row in the batch
    "part": "i32",  # document inside a packed row, 0 where rows are not packed
    "key": "i64",  # into SAMPLES
    "state": "str",  # one of STATES
    "dup_batch": "f32",  # highest estimated Jaccard to an earlier row of the batch, null: unscored
    "dup_window": "f32",  # the same, to any row of the batches in the recent window
    "dup_run": "i32",  # earlier exposures in the run, on this rank, of the same content, or of
    #                    contents tied to it by near-duplicates within windows (bounded memory)
    "dup_of": "i64",  # key of the row that gave the higher of dup_batch and dup_window
    "repetition": "f32",  # share of the sample covered by repeated n-grams
    "loss": "f32",  # per-sample loss where the loop recorded it
    "n_tokens": "i64",  # tokens of the sample in this row where rows pack several; else null
}

EXPOSURES_JOINED: Final[Mapping[str, str]] = {
    **{name: kind for name, kind in EXPOSURES.items() if name not in {"loss", "n_tokens"}},
    "duplication": "f32",  # the higher of dup_batch and dup_window
    "loss": "f32",
    **{
        name: kind
        for name, kind in SAMPLES.items()
        if name == "n_tokens" or name not in {*EXPOSURES, "preview"}
    },
}
"""What ``Run.scan("exposures")`` gives: exposures with the identity of their samples.

``n_tokens`` is what was seen: of a document in a packed row, its tokens in that row.
"""

KEY_SHIFT: Final = 48
"""Bits of a key that hold a dataset index; above them is the dataset's number in the attempt."""

REPLAY_ORDER: Final[Mapping[str, str]] = {
    "step": "i64",
    "rank": "i32",
    "attempt": "i32",
    "batch": "i64",  # ordinal in the attempt and rank: rows that share all three were one batch
    "position": "i32",
    "part": "i32",
    "state": "str",
    "key": "i64",
    "dataset": "i32",  # number of the dataset in the attempt; null where keys are hashes
    "index": "i64",  # index into that dataset; null where keys are hashes
    "sample_id": "str",
    "source": "str",
    "shard": "str",
    "row": "i64",
}
"""What ``auditor replay-order`` writes: one row per exposure, in the order they were consumed."""

SIGNALS: Final[Mapping[str, str]] = {
    "attempt": "i32",
    "rank": "i32",
    "step": "i64",
    "kind": "str",  # live: on the training batch; probe: on the held-out batch; step: per update
    "site": "str",  # module path of the measured activation, empty for step signals
    "layer": "i32",  # block number from 0; -1 is the embedding; null where there is none
    "head": "i32",  # null: over all heads
    "segment": "str",  # part of the sequence, null: all of it
    "variant": "str",  # raw, centred or column for ranks; null where there is one form only
    "signal": "str",  # see SIGNAL_NAMES
    "value": "f64",  # null where undefined (a zero matrix has no rank ratio)
    "n_rows": "i32",  # rows the rank was computed from; different n_rows are never compared
}

SIGNAL_NAMES: Final[Mapping[str, str]] = {
    "token_rank": "rank ratio (k = 20) of a block's output, rows are positions: representation",
    "token_rank_full": "the same over all singular values, of the raw form",
    "effective_rank": "exp of the entropy of all singular values of a block's output, raw",
    "spectral_gap": "largest singular value of a block's output over the second",
    "segment_rank": "token_rank of the front or the back half of the sequence (column segment)",
    "residual_similarity": "mean cosine of a block's output to its input; 1: a scaled copy",
    "sample_rank": "rank ratio of one pooled row per sample; at the embedding: input diversity",
    "value_rank": "rank ratio of the attention values, rows are positions",
    "entropy": "attention entropy of a head in nats",
    "entropy_mean": "attention entropy in nats, mean over heads",
    "entropy_min": "attention entropy in nats, lowest head",
    "entropy_normalised": "attention entropy over the log of the visible keys, mean over heads",
    "entropy_no_sink": "attention entropy in nats without the first key, mean over heads",
    "heads_fallen": "share of the heads below half of their own median entropy",
    "max_logit": "largest attention logit over heads, queries and keys",
    "max_abs": "largest magnitude in a block's output",
    "non_finite": "share of the activations of a site that are NaN or infinite",
    "loss": "training loss of the step",
    "probe_loss": "loss on the held-out probe batch: rises when the model is harmed",
    "memorisation": "probe loss over the median of the last training losses, nats",
    "grad_norm": "gradient norm before clipping",
    "lr": "learning rate of the first parameter group",
    "grade": "the live grade, 7 to 0",
}
"""Each is written per layer where it has one; attention statistics are over 4 samples, 32 queries.
"""

GRADES: Final[Mapping[str, str]] = {
    "attempt": "i32",
    "step": "i64",
    "kind": "str",  # probe where there is a probe, else live
    "layer": "i32",  # the block that sets the grade
    "ratio": "f64",  # the graded ratio, uncapped
    "grade": "i32",  # 7 (healthy) to 0 (collapsed)
    "alert": "str",  # warming, healthy, watch (stable or falling), danger, undefined
}

EVENTS: Final[Mapping[str, str]] = {
    "event": "i32",  # number in order of onset
    "episode": "i32",  # events that follow one another without recovery share one
    "kind": "str",  # input_fall, ratio_fall, grade_drop, probe_loss_rise, entropy_fall, loss_spike,
    #                 grad_spike, non_finite
    "signal": "str",
    "measured": "str",  # live, probe or step
    "layer": "i32",
    "onset_low": "i64",  # last healthy sample
    "onset_high": "i64",  # first bad sample: the onset lies in (onset_low, onset_high]
    "trough_step": "i64",
    "recovery_step": "i64",  # null: not recovered in the run
    "before": "f64",
    "after": "f64",  # at the trough
    "grade_before": "i32",
    "grade_after": "i32",
}

COMPOSITION: Final[Mapping[str, str]] = {
    "attempt": "i32",
    "step": "i64",
    "source": "str",
    "n_samples": "i64",
    "n_scored": "i64",  # rows whose duplication was scored
    "n_duplicate": "i64",  # rows with duplication at or above the threshold
    "n_similar": "i64",  # rows that share much with another, and are no near-duplicates
    "n_repetitive": "i64",  # rows flagged as repetitive
    "n_distinct": "i64",  # rows whose content was not seen before, as far as it was scored
    "n_tokens": "i64",
    "n_losses": "i64",  # rows whose own loss was recorded, and is finite
    "repetition": "f64",  # mean over scored rows
    "loss": "f64",  # mean over rows with a recorded loss; null where there are none
}
"""Per step and source, over ranks: what reports and the join read instead of every row."""

DRIFTS: Final[Mapping[str, str]] = {
    "kind": "str",  # mix, repeats, order
    "source": "str",  # null where all sources are meant
    "onset": "i64",  # first step of what came after
    "end": "i64",  # last step of clumps that ended; else null
    "before": "f64",  # share of the batches in the steps before; of order, index of dispersion
    "after": "f64",  # the same after
    "z": "f64",  # standard deviations of the change; null for order
}

SUSPECTS: Final[Mapping[str, str]] = {
    "event": "i32",
    "level": "str",  # source, cluster, shard, sample
    "name": "str",
    "feature": "str",  # share, duplication, similarity, repetition, length, loss
    "exposure": "f64",  # share of the batch in the strongest 10 steps of the lookback; of length
    #                     and loss, the mean of the source's samples (n_tokens; nats)
    "control": "f64",  # the same over the control steps
    "lift": "f64",  # exposure / control, of shares with half a row added to each side
    "low": "f64",  # interval of the lift
    "high": "f64",
    "z": "f64",  # robust z of the lookback against the control windows
    "p": "f64",  # share of circular shifts that look at least as bad
    "q": "f64",  # Benjamini-Hochberg over everything tested for the event
    "lag": "i64",  # steps from where the exposure changed to the onset; negative: after it
    "verdict": "str",  # blamed, coincident, ranked
}

BATCHES: Final[Mapping[str, str]] = {
    "event": "i32",
    "step": "i64",
    "lag": "i64",  # steps from the onset, negative before it
    "attempt": "i32",
    "n_samples": "i64",  # trained in the step, over ranks
    "n_tokens": "i64",
    "largest_source": "str",  # the one with most samples, and its share
    "largest_share": "f64",
    "duplication": "f64",  # share of near-duplicates; null where nothing was scored
    "repetition": "f64",  # mean share of a sample that repeats
    "suspect": "str",  # the first source in the event's table of suspects
    "feature": "str",  # what of it stands out
    "exposure": "f64",  # how much of that the step held; of the loss the mean in nats
    "place": "i32",  # 1 to 5: the steps of the lookback that held most
    "loss": "f64",
    "grad_norm": "f64",
    "lr": "f64",
    "grade": "i32",
}
"""What ``auditor report --batches`` writes: the steps around each event."""

ROWS: Final[Mapping[str, str]] = {
    "shard": "str",  # relative to the inputs' common folder
    "row": "i64",  # 0-based
    "sample_id": "str",
    "source": "str",
    "decision": "str",  # kept, dropped
    "reason": "str",  # exact, near, repetition, exposure, implicated, unreadable; null when kept
    "cluster": "i64",  # null where the row has no duplicate
    "keeper_shard": "str",
    "keeper_row": "i64",
    "jaccard": "f32",  # exact Jaccard to the keeper
    "weight": "f32",  # 1 kept, 0 dropped
}
"""Columns of a manifest's ``rows.parquet``, one row per input row, in input order."""
