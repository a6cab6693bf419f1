"""Oracle: ids and labels written by hand for a tokenizer of one token per word."""

import json
import logging
import re
from pathlib import Path

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from distill_wire.types import IGNORE_INDEX
from student_trainer.data import DatasetSummary, load_supervised_dataset
from student_trainer.encoding import RowEncoder
from tests.support.tokenizers import CHATML_WITH_MARKS, END, FORGETFUL, make_word_tokenizer

CHAT = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e f"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_word_tokenizer()


def write_lines(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def load(
    name: str, tokenizer: PreTrainedTokenizerFast, *, max_length: int = 64, split: str = "train"
) -> tuple[datasets.Dataset, DatasetSummary]:
    return load_supervised_dataset(
        name, split=split, tokenizer=tokenizer, max_length=max_length, seed=0
    )


def words(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Spell ids; an ignored label is a dot."""
    names = ["." if i == IGNORE_INDEX else str(tokenizer.convert_ids_to_tokens(i)) for i in ids]
    return " ".join("\\n" if name == "\n" else name for name in names)


def encode(tokenizer: PreTrainedTokenizerFast, row: dict[str, object]) -> tuple[str, str]:
    ids, labels = RowEncoder(tokenizer).encode(row, sample_id="s")
    return words(tokenizer, ids), words(tokenizer, labels)


def test_only_the_answer_and_its_end_are_supervised(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, labels = encode(tokenizer, {"prompt": "a b c", "completion": "d e"})

    assert ids == "a b c d e <end>"
    assert labels == ". . . d e <end>"


def test_plain_text_is_supervised_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, labels = encode(tokenizer, {"text": "a b c"})

    assert ids == labels == "a b c <end>"


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_every_assistant_turn_of_a_chat_is_supervised_up_to_its_end(template: str) -> None:
    tokenizer = make_word_tokenizer()
    if template == "marked":
        tokenizer.chat_template = CHATML_WITH_MARKS

    ids, labels = encode(tokenizer, {"messages": CHAT})

    opened = "<start> assistant \\n"
    assert ids == (
        f"<start> user \\n a b <end> \\n {opened} c <end> \\n "
        f"<start> user \\n d <end> \\n {opened} e f <end>"
    )
    assert labels == ". . . . . . . . . . c <end> . . . . . . . . . . e f <end>"


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_a_prompt_of_messages_teaches_none_of_its_own_turns(template: str) -> None:
    tokenizer = make_word_tokenizer()
    if template == "marked":
        tokenizer.chat_template = CHATML_WITH_MARKS
    whole, _ = encode(tokenizer, {"messages": CHAT})

    ids, labels = encode(tokenizer, {"prompt": CHAT[:3], "completion": CHAT[3:]})

    assert ids == whole
    assert labels == " ".join(["."] * 22 + ["e", "f", "<end>"])


def test_a_chat_ends_with_its_last_answer_and_one_end(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    )
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant {% endif %}"

    ids, labels = encode(tokenizer, {"messages": [*CHAT, {"role": "user", "content": "x"}]})

    assert ids == "user a b assistant c user d assistant e f <end>"
    assert labels == ". . . . c . . . e f <end>"


def test_a_template_that_rewrites_earlier_turns_is_refused_by_sample_and_message(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = FORGETFUL

    with pytest.raises(ValueError, match="sample s, message 1: the chat up to it is not a prefix"):
        encode(tokenizer, {"messages": CHAT})


def test_pbr_13_row_i_is_about_token_i_plus_1(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    # Six different tokens, all supervised: five rows of logits have a next token to be about.
    name = write_lines(tmp_path, {"text": "a b c d e"})

    dataset, summary = load(name, tokenizer)

    ids, labels = dataset[0]["input_ids"], dataset[0]["labels"]
    assert len(set(ids)) == 6
    assert [labels[i + 1] for i in range(5)] == [ids[i + 1] for i in range(5)]
    assert summary.num_supervised_tokens == 5


def test_pbr_13_last_prompt_row_is_about_the_first_answer_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    name = write_lines(tmp_path, {"prompt": "a b c", "completion": "d e"})

    dataset, summary = load(name, tokenizer)

    target_by_row = dataset[0]["labels"][1:]
    assert words(tokenizer, target_by_row) == ". . d e <end>"
    assert summary.num_supervised_tokens == 3


def test_pbr_06_emptied_samples_stay_are_counted_and_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": " ".join(["a"] * 40), "completion": "b c d e f"}
    short = {"prompt": "a", "completion": "b c"}
    name = write_lines(tmp_path, long, short, {**long, "sample_id": "mine"})

    with caplog.at_level(logging.WARNING, "student_trainer.data"):
        dataset, summary = load(name, tokenizer, max_length=32)

    assert summary == DatasetSummary(
        num_samples=3, num_truncated=2, num_unsupervised=2, num_supervised_tokens=3
    )
    assert [len(ids) for ids in dataset["input_ids"]] == [32, 4, 32]
    assert set(dataset[0]["labels"]) == set(dataset[2]["labels"]) == {IGNORE_INDEX}
    (record,) = caplog.records
    assert "2 of 3 samples keep no supervised token" in record.getMessage()
    assert "rows.jsonl:1, mine" in record.getMessage()


def test_pbr_06_a_warning_names_a_few_of_many(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    name = write_lines(tmp_path, *[{"prompt": "a b c", "completion": "d"}] * 20)

    with caplog.at_level(logging.WARNING, "student_trainer.data"):
        load(name, tokenizer, max_length=3)

    (record,) = caplog.records
    assert record.getMessage().endswith("rows.jsonl:4, rows.jsonl:5, ...")
    assert record.getMessage().startswith("20 of 20 samples")


@pytest.mark.parametrize("is_pad_eos", [True, False])
def test_pbr_15_one_end_is_supervised_and_ends_in_the_prompt_are_plain_tokens(
    is_pad_eos: bool,
) -> None:
    tokenizer = make_word_tokenizer(is_pad_eos=is_pad_eos)

    ids, labels = RowEncoder(tokenizer).encode(
        {"prompt": "a <end> b <end>", "completion": "c d"}, sample_id="s"
    )

    assert words(tokenizer, ids) == "a <end> b <end> c d <end>"
    assert words(tokenizer, labels) == ". . . . c d <end>"
    padded = tokenizer.pad({"input_ids": [ids]}, padding="max_length", max_length=len(ids) + 4)
    assert padded["attention_mask"] == [[1] * 7 + [0] * 4]


def test_an_answer_that_brings_its_end_gets_no_second(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, labels = encode(tokenizer, {"prompt": "a", "completion": f"b {END}"})

    assert ids == "a b <end>"
    assert labels == ". b <end>"


@pytest.mark.parametrize("prompt", ["a b", "<start> a b"])
def test_bos_is_written_once_if_the_tokenizer_writes_it(prompt: str) -> None:
    row: dict[str, object] = {"prompt": prompt, "completion": "c"}

    assert encode(make_word_tokenizer(writes_bos=True), row)[0] == "<start> a b c <end>"
    assert encode(make_word_tokenizer(writes_bos=False), row)[0] == f"{prompt} c <end>"


def test_a_chat_gets_its_bos_from_the_template_alone() -> None:
    plain, _ = encode(make_word_tokenizer(writes_bos=False), {"messages": CHAT})
    with_bos, _ = encode(make_word_tokenizer(writes_bos=True), {"messages": CHAT})

    assert with_bos == plain


def test_a_row_cut_at_max_length_is_its_own_prefix(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    name = write_lines(tmp_path, {"prompt": "a b", "completion": "c d e"})
    whole, _ = load(name, tokenizer)

    cut, summary = load(name, tokenizer, max_length=4)

    assert cut[0]["input_ids"] == whole[0]["input_ids"][:4]
    assert cut[0]["labels"] == whole[0]["labels"][:4]
    assert (summary.num_truncated, summary.num_supervised_tokens) == (1, 2)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder", "splits"])
def test_every_container_gives_the_same_rows(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": "a", "completion": "b", "n": 1}, {"prompt": "c", "completion": "d", "n": 2}]
    path = tmp_path / f"rows.{kind}"
    table = datasets.Dataset.from_list(rows)
    match kind:
        case "jsonl":
            path.write_text("\n\n".join(map(json.dumps, rows)))
        case "json":
            path.write_text(json.dumps(rows))
        case "parquet":
            table.to_parquet(str(path))
        case "folder":
            table.save_to_disk(str(path))
        case "splits":
            datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(path))

    dataset, summary = load(str(path), tokenizer)

    assert [words(tokenizer, ids) for ids in dataset["input_ids"]] == ["a b <end>", "c d <end>"]
    assert dataset.column_names == ["input_ids", "labels", "sample_id"]
    assert summary.num_samples == 2


def test_chats_survive_the_nulls_that_arrow_fills_in(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    named = [{**CHAT[0], "name": "x"}, *CHAT[1:]]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"messages": named}]).to_parquet(str(path))

    dataset, _ = load(str(path), tokenizer)

    assert words(tokenizer, dataset[0]["labels"]) == encode(tokenizer, {"messages": CHAT})[1]


def test_slices_of_a_split_do_not_overlap(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    name = write_lines(tmp_path, *[{"text": letter} for letter in "abcdefghij"])

    head, _ = load(name, tokenizer, split="train[:80%]")
    tail, _ = load(name, tokenizer, split="train[80%:]")

    assert head["sample_id"] == [f"rows.jsonl:{n}" for n in range(1, 9)]
    assert tail["sample_id"] == ["rows.jsonl:9", "rows.jsonl:10"]


def test_the_library_is_a_data_set_and_num_samples_takes_its_first_rows(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    first, summary = load_supervised_dataset(
        "python-stdlib", split="test", tokenizer=tokenizer, max_length=512, seed=0, num_samples=4
    )
    again, _ = load_supervised_dataset(
        "python-stdlib", split="test", tokenizer=tokenizer, max_length=512, seed=0, num_samples=8
    )

    assert summary.num_samples == 4
    assert first.to_list() == again.to_list()[:4]


def test_asking_for_more_rows_than_there_are_warns(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    name = write_lines(tmp_path, {"text": "a"})

    with caplog.at_level(logging.WARNING, "student_trainer.data"):
        load_supervised_dataset(
            name, split="train", tokenizer=tokenizer, max_length=8, seed=0, num_samples=5
        )

    assert "num_samples is 5, but train has 1 rows" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "rows.jsonl:1 has the fields id (str), question (str); expected"),
        ({"prompt": "", "completion": "b"}, "sample rows.jsonl:1 has an empty 'prompt'"),
        ({"text": ""}, "sample rows.jsonl:1 has an empty 'text'"),
        ({"messages": []}, "sample rows.jsonl:1 has an empty 'messages'"),
        ({"messages": "a"}, "rows.jsonl:1: 'messages' is a str; expected a list"),
        ({"messages": CHAT[:1]}, "sample rows.jsonl:1 has no assistant turn"),
        ({"messages": CHAT[1:]}, "sample rows.jsonl:1 opens with an assistant turn"),
        ({"prompt": "a", "completion": CHAT[1:2]}, "rows.jsonl:1: 'prompt' is a str"),
        ({"sample_id": "x", "text": ""}, "sample x has an empty"),
        (7, "row 1 is a int, not an object with 'prompt' and 'completion'"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_by_name(
    row: object, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(write_lines(tmp_path, row), tokenizer)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl line 2 is not JSON: Expecting value"),
        ("a.json", b'[{"text": "a"},\n oops]', "a.json line 2 is not JSON: Expecting value"),
        ("a.jsonl", b'{"text": "\xff"}', "a.jsonl is not UTF-8 at byte 10"),
        ("a.jsonl", b"\n", "split 'train' has no rows"),
        ("a.parquet", b"PAR?", "a.parquet cannot be read as Parquet"),
    ],
)
def test_a_malformed_file_is_refused_by_file_and_line(
    file: str, content: bytes, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / file).write_bytes(content)

    with pytest.raises(ValueError, match=re.escape(message)):
        load(str(tmp_path / file), tokenizer)


def test_a_file_without_a_known_column_is_refused_by_its_columns(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list([{"question": "a"}]).to_parquet(path)

    with pytest.raises(ValueError, match=re.escape("has the columns ['question']; expected")):
        load(path, tokenizer)


def test_a_file_has_no_held_out_split(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=re.escape("has the splits {'train': 1}, not 'test'")):
        load(write_lines(tmp_path, {"text": "a"}), tokenizer, split="test")


def test_settings_that_have_no_meaning_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match="dataset_config='en' has no meaning for python-stdlib"):
        load_supervised_dataset(
            "python-stdlib",
            split="train",
            tokenizer=tokenizer,
            max_length=8,
            seed=0,
            dataset_config="en",
        )
    with pytest.raises(ValueError, match="max_length must be >= 2"):
        load("python-stdlib", tokenizer, max_length=1)
    with pytest.raises(ValueError, match=re.escape("missing.jsonl does not exist")):
        load(str(tmp_path / "missing.jsonl"), tokenizer)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = make_word_tokenizer()
    tokenizer.eos_token = None

    with pytest.raises(ValueError, match="the tokenizer has no EOS token"):
        RowEncoder(tokenizer)


def test_a_chat_needs_a_chat_template() -> None:
    tokenizer = make_word_tokenizer(chat_template=None)

    with pytest.raises(ValueError, match="sample s is a chat; the tokenizer has no chat_template"):
        encode(tokenizer, {"messages": CHAT})
