"""Where the rows of a data set come from: the built-in one, a file, a folder or a hub id.

Rows are dicts with some of the fields in `FIELDS`; which of them make a row is the
business of `encoding`. Depends on: datasets, pyarrow, `stdlib_dataset`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from student_trainer import stdlib_dataset

FORMATS = "'prompt' and 'completion', or 'messages', or 'text'"
FIELDS = ("prompt", "completion", "messages", "text", "sample_id", "id")
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")

Row = Mapping[str, object]


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
