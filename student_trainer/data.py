"""Rows of any supervised data set as token ids and labels.

Three row formats, named as in TRL, recognised row by row in this order:

    {"prompt": ..., "completion": ...}   two strings, or two lists of messages
    {"messages": [...]}                  a chat; every assistant turn is an answer
    {"text": ...}                        plain text; every token is supervised

Labels are not shifted: `labels[i]` is `input_ids[i]` where token i belongs to an answer and
IGNORE_INDEX elsewhere, so the row of logits at i is about `labels[i + 1]`. They are built
from positions, never by matching ids: a pad id equal to the EOS id changes nothing, and an
EOS id in a prompt stays an ordinary prompt token.

One EOS closes every answer and is supervised. Strings get theirs here, unless they end with
it already; in a chat the template writes it after each assistant turn, and the last turn
gets one if the template does not. What follows the last answer of a chat is left out.
BOS is put first if the tokenizer would put it, and never twice.

Over-long rows are cut on the right at `max_length`. A row whose whole answer is cut stays,
with no supervised token, and is counted and named in one warning; no row is ever dropped.
The result lies in memory at 8 bytes per token, and is the same on every rank that asks.

Depends on: datasets, transformers, `stdlib_dataset`. Knows nothing of batches or teachers.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import datasets
import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import BatchEncoding, PreTrainedTokenizerBase

from student_trainer import stdlib_dataset

IGNORE_INDEX = -100
NUM_NAMED_SAMPLES = 5  # in the warning about emptied rows

FORMATS = "'prompt' and 'completion', or 'messages', or 'text'"
FIELDS = ("prompt", "completion", "messages", "text", "sample_id", "id")
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")

Row = Mapping[str, object]
Message = dict[str, object]
Span = tuple[int, int]

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


class RowEncoder:
    """Turns one row of any format into ids and labels, before truncation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look up the EOS and what the tokenizer puts before a text."""
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError("the tokenizer has no EOS token to end an answer; set its eos_token")
        self.tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        # Asked of the tokenizer itself: `bos_token_id` may be set and yet never written.
        bare, full = self.tokenize("a"), list(tokenizer("a")["input_ids"])
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        self.bos_ids: list[int] = full[: min(starts, default=0)]

    def encode(self, row: Row, *, sample_id: str) -> tuple[list[int], list[int]]:
        """Return equally long ids and labels; the labels are not shifted.

        Raises:
            ValueError: the row has no known format, an empty input, or does not fit the
                tokenizer's chat template; the message names the sample.
        """
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            refuse_empty(prompt, sample_id, "prompt")
            head = self.open_with_bos(prompt)
            answer = self.close_with_eos(self.tokenize(completion))
            return head + answer, [IGNORE_INDEX] * len(head) + answer
        if prompt is not None and completion is not None:
            asked = read_messages(prompt, sample_id, "prompt")
            answered = read_messages(completion, sample_id, "completion")
            return self.encode_chat(asked + answered, len(asked), sample_id)
        messages, text = row.get("messages"), row.get("text")
        if messages is not None:
            return self.encode_chat(read_messages(messages, sample_id, "messages"), 0, sample_id)
        if isinstance(text, str):
            refuse_empty(text, sample_id, "text")
            ids = self.close_with_eos(self.open_with_bos(text))
            return ids, list(ids)
        found = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
        raise ValueError(f"sample {sample_id} has the fields {found}; expected {FORMATS}")

    def encode_chat(
        self, messages: list[Message], num_given: int, sample_id: str
    ) -> tuple[list[int], list[int]]:
        """Label the assistant turns after the first `num_given` messages."""
        roles = [message["role"] for message in messages]
        turns = [i for i in range(num_given, len(roles)) if roles[i] == "assistant"]
        if not turns:
            raise ValueError(f"sample {sample_id} has no assistant turn to learn from")
        if not self.tokenizer.chat_template:
            raise ValueError(f"sample {sample_id} is a chat; the tokenizer has no chat_template")
        try:
            if re.search(r"\{%-?\s*generation\b", self.tokenizer.get_chat_template()):
                ids, spans = self.find_marked_turns(messages, len(turns), sample_id)
            else:
                ids, spans = self.find_turns(messages, turns, sample_id)
        except jinja2.TemplateError as exc:
            raise ValueError(f"sample {sample_id}: the chat template refused it: {exc}") from exc

        labels = [IGNORE_INDEX] * len(ids)
        for start, end in spans:
            # A turn ends with its EOS. ChatML writes a newline after it that no model is
            # asked to produce; a {% generation %} block may stop right before it.
            turn = ids[start:end]
            num_after = turn[::-1].index(self.eos_id) if self.eos_id in turn else 0
            if not str(self.tokenizer.decode(turn[len(turn) - num_after :])).strip():
                end -= num_after
            if ids[end - 1] != self.eos_id and ids[end : end + 1] == [self.eos_id]:
                end += 1
            labels[start:end] = ids[start:end]
        ids, labels = ids[:end], labels[:end]
        if ids[-1] != self.eos_id:
            ids, labels = [*ids, self.eos_id], [*labels, self.eos_id]
        return ids, labels

    def find_marked_turns(
        self, messages: list[Message], num_turns: int, sample_id: str
    ) -> tuple[list[int], list[Span]]:
        """Take the answers from the template's own {% generation %} marks."""
        chat = cast(list[dict[str, str]], messages)
        marked = self.tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True)
        assert isinstance(marked, BatchEncoding), "return_dict is the default"
        mask = [0, *cast(list[int], marked["assistant_masks"]), 0]
        edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        if len(spans) < num_turns:
            found = f"{num_turns} assistant turns, but its template marks {len(spans)}"
            raise ValueError(f"sample {sample_id} has {found} with {{% generation %}}")
        return list(cast(list[int], marked["input_ids"])), spans[-num_turns:]

    def find_turns(
        self, messages: list[Message], turns: list[int], sample_id: str
    ) -> tuple[list[int], list[Span]]:
        """Find the answers by tokenising the chat up to each of them.

        What comes before an answer is tokenised as at generation time, so this refuses a
        template that rewrites earlier turns or a tokenizer that merges over the boundary.
        """
        ids = self.render(messages)
        spans: list[Span] = []
        for turn in turns:
            if turn == 0:
                raise ValueError(f"sample {sample_id} opens with an assistant turn: no prompt")
            before = self.render(messages[:turn], add_generation_prompt=True)
            through = self.render(messages[: turn + 1])
            if ids[: len(before)] != before or ids[: len(through)] != through:
                raise ValueError(
                    f"sample {sample_id}, message {turn}: the chat up to it is not a prefix of the "
                    "whole chat, so its tokens cannot be told apart; use a template with "
                    "{% generation %} marks, or prompt and completion as strings"
                )
            spans.append((len(before), len(through)))
        return ids, spans

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> list[int]:
        """Return the ids of a chat as the template writes it."""
        chat = cast(list[dict[str, str]], messages)
        ids = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        return list(cast(list[int], ids))

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text alone, nothing put around it."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def open_with_bos(self, text: str) -> list[int]:
        """Return the ids of a text with what the tokenizer puts before a text, once."""
        ids = self.tokenize(text)
        return ids if ids[: len(self.bos_ids)] == self.bos_ids else self.bos_ids + ids

    def close_with_eos(self, ids: list[int]) -> list[int]:
        """Return the ids with one EOS at the end, unless they have it."""
        return ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id]


def refuse_empty(value: object, sample_id: str, field: str) -> None:
    """Raise ValueError for an empty input."""
    if not value:
        raise ValueError(f"sample {sample_id} has an empty {field!r}; fill it or remove the row")


def read_messages(value: object, sample_id: str, field: str) -> list[Message]:
    """Check that a field is a list of messages; drop the nulls that Arrow fills in."""
    refuse_empty(value, sample_id, field)
    if not isinstance(value, list) or not all(isinstance(m, dict) and "role" in m for m in value):
        raise ValueError(
            f"sample {sample_id}: {field!r} is a {type(value).__name__}; expected a list of "
            '{"role": ..., "content": ...}, or strings in both prompt and completion'
        )
    return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]


def read_rows(
    dataset_name: str, *, split: str, dataset_config: str | None, seed: int
) -> Sequence[Row]:
    """Read one split from wherever the name points, as a sequence of dicts."""
    path = Path(dataset_name)
    base = split.partition("[")[0]
    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    is_file = not path.is_dir() and path.suffix in FILE_SUFFIXES
    is_local = is_saved or is_file or dataset_name == stdlib_dataset.DATASET_NAME
    if is_local and dataset_config is not None:
        raise ValueError(f"dataset_config={dataset_config!r} has no meaning for {dataset_name}")
    if dataset_name == stdlib_dataset.DATASET_NAME:
        functions = stdlib_dataset.load_stdlib_functions(base, seed=seed)
        return select_split(split, {base: cast(Sequence[Row], functions)}, dataset_name)
    if is_file:
        if not path.is_file():
            raise ValueError(f"data set file {dataset_name} does not exist")
        return select_split(split, {"train": read_file(path)}, dataset_name)
    if is_saved:
        saved = datasets.load_from_disk(dataset_name)
        parts = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        return keep_fields(select_split(split, parts, dataset_name))
    try:
        return keep_fields(datasets.load_dataset(dataset_name, dataset_config, split=split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as exc:
        raise ValueError(
            f"{dataset_name!r} is not {stdlib_dataset.DATASET_NAME!r}, a {'/'.join(FILE_SUFFIXES)} "
            f"file or a saved folder, and datasets cannot load its split {split!r}: {exc}"
        ) from exc


def read_file(path: Path) -> list[Row]:
    """Read a file of rows, each named `file:line` (or `file:row`) unless it has an id."""
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as exc:
            raise ValueError(f"{path} cannot be read as Parquet: {exc}") from exc
        values = table.select([c for c in table.column_names if c in FIELDS]).to_pylist()
        if not values or not values[0]:
            raise ValueError(f"{path} has the columns {table.column_names}; expected {FORMATS}")
        numbered = list(enumerate(values, start=1))
    else:
        numbered = read_json(path)
    for number, value in numbered:
        if not isinstance(value, dict):
            found = type(value).__name__
            raise ValueError(f"{path} row {number} is a {found}, not an object with {FORMATS}")
    return [{"id": f"{path.name}:{number}", **value} for number, value in numbered]


def read_json(path: Path) -> list[tuple[int, object]]:
    """Read JSON lines with their line numbers, or one JSON array with its row numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError(f"{path} is not UTF-8 at byte {exc.start}") from exc
    is_array = text.lstrip().startswith("[")
    # Not splitlines(): JSON strings may hold U+2028, which it takes for a line end.
    lines = [text] if is_array else text.split("\n")
    values: list[tuple[int, object]] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                values.append((number, json.loads(line)))
        except json.JSONDecodeError as exc:
            raise ValueError(
                f"{path} line {number + exc.lineno - 1} is not JSON: {exc.msg} at column "
                f"{exc.colno}; expected one object per line, or one array of objects"
            ) from exc
    return list(enumerate(cast(list[object], values[0][1]), start=1)) if is_array else values


def select_split(split: str, parts: Mapping[str, Sequence[Row]], name: str) -> Sequence[Row]:
    """Take one split, or a slice of it, from the splits that exist."""
    sizes = {part: len(rows) for part, rows in parts.items()}
    try:
        taken = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as exc:
        raise ValueError(f"{name} has the splits {sizes}, not {split!r}: {exc}") from exc
    if len(taken) != 1:
        raise ValueError(f"{name}: one split or slice is read at a time, got {split!r}")
    rows = parts[taken[0].splitname]
    part = slice(taken[0].from_, taken[0].to)
    if isinstance(rows, datasets.Dataset):
        return cast(Sequence[Row], rows.select(range(len(rows))[part]))
    return rows[part]


def keep_fields(rows: Sequence[Row]) -> Sequence[Row]:
    """Drop the columns that are not read, so that no image is decoded for nothing."""
    assert isinstance(rows, datasets.Dataset)
    known = [name for name in rows.column_names if name in FIELDS]
    if not set(known) - {"id", "sample_id"}:
        raise ValueError(f"the data set has the columns {rows.column_names}; expected {FORMATS}")
    return cast(Sequence[Row], rows.select_columns(known))
