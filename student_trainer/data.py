"""Rows of any supervised data set as token ids and labels.

Over-long rows are cut on the right at `max_length`. A row whose whole answer is cut stays,
with no supervised token, and is counted and named in one warning; no row is ever dropped.
The result lies in memory at 8 bytes per token, and is the same on every rank that asks.

`rows` reads them, `encoding` turns one into tokens. Depends on: datasets. Knows nothing of
batches or teachers.
"""

import logging
from dataclasses import dataclass

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from distill_wire.types import IGNORE_INDEX
from student_trainer.encoding import RowEncoder
from student_trainer.rows import read_rows

NUM_NAMED_SAMPLES = 5  # in the warning about emptied rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """What became of the rows."""

    num_samples: int
    num_truncated: int
    """Rows cut at max_length."""
    num_unsupervised: int
    """Rows without a supervised token after the cut."""
    num_supervised_tokens: int
    """Labels that count after the one-step shift of a causal LM."""


def load_supervised_dataset(
    dataset_name: str,
    *,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    seed: int,
    num_samples: int | None = None,
    dataset_config: str | None = None,
) -> tuple[datasets.Dataset, DatasetSummary]:
    """Read, tokenise and label one split.

    Args:
        dataset_name: `python-stdlib`; a .jsonl, .json or .parquet file; a folder written by
            `Dataset.save_to_disk`; or anything `datasets.load_dataset` takes.
        split: a split's name, or a slice as in `train[:90%]`. A file has one split, `train`.
        tokenizer: must have an EOS token; a chat template too if rows hold messages.
        max_length: tokens kept per row, >= 2.
        seed: the order of `python-stdlib`; other data sets keep their own order.
        num_samples: keep the first rows only; None keeps all.
        dataset_config: second argument of `datasets.load_dataset`; only for its data sets.

    Returns:
        A data set with `input_ids`, `labels` (lists of int32, equally long) and `sample_id`,
        and its summary.

    Raises:
        ValueError: a file, a split, a row or the tokenizer does not fit; the message names
            the file and line, or the sample.
    """
    if max_length < 2:
        raise ValueError(f"max_length must be >= 2 (one token predicts the next), got {max_length}")
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples must be >= 1, got {num_samples}")
    rows = read_rows(dataset_name, split=split, dataset_config=dataset_config, seed=seed)
    if len(rows) == 0:
        raise ValueError(f"{dataset_name} split {split!r} has no rows")
    if num_samples is not None and num_samples > len(rows):
        logger.warning(f"num_samples is {num_samples}, but {split} has {len(rows)} rows; all used")
    indices = range(len(rows))[:num_samples]

    encoder = RowEncoder(tokenizer)
    columns: dict[str, list[object]] = {"input_ids": [], "labels": [], "sample_id": []}
    num_truncated = num_supervised_tokens = 0
    emptied: list[str] = []
    for index in indices:
        row = rows[index]
        named = row.get("sample_id", row.get("id"))
        sample_id = f"{dataset_name}:{split}:{index}" if named is None else str(named)
        ids, labels = encoder.encode(row, sample_id=sample_id)
        num_truncated += len(ids) > max_length
        ids, labels = ids[:max_length], labels[:max_length]
        num_supervised = sum(label != IGNORE_INDEX for label in labels[1:])
        num_supervised_tokens += num_supervised
        emptied += [] if num_supervised else [sample_id]
        columns["input_ids"].append(np.asarray(ids, dtype=np.int32))
        columns["labels"].append(np.asarray(labels, dtype=np.int32))
        columns["sample_id"].append(sample_id)
    if emptied:
        names = ", ".join(emptied[:NUM_NAMED_SAMPLES])
        logger.warning(
            f"{len(emptied)} of {len(indices)} samples keep no supervised token within "
            f"max_length {max_length} and teach nothing; raise it or shorten the prompts of "
            f"{names}{', ...' if len(emptied) > NUM_NAMED_SAMPLES else ''}"
        )
    ids_type = datasets.Sequence(datasets.Value("int32"))
    types = {"input_ids": ids_type, "labels": ids_type, "sample_id": datasets.Value("string")}
    summary = DatasetSummary(
        num_samples=len(indices),
        num_truncated=num_truncated,
        num_unsupervised=len(emptied),
        num_supervised_tokens=num_supervised_tokens,
    )
    return datasets.Dataset.from_dict(columns, datasets.Features(types)), summary
