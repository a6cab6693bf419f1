"""Oracle: the rows themselves. What teacher and student get must be the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distill_wire.types import CodecId, TargetSpec
from student_trainer.collator import ROWS, DistillationCollator, request_of

SPEC = TargetSpec(codec=CodecId.DENSE)
EOS = 2


def feature(ids: list[int], labels: list[int], name: str = "a") -> dict[str, object]:
    return {"input_ids": ids, "labels": labels, "sample_id": name}


def test_pbr_13_position_i_is_about_token_i_plus_one() -> None:
    ids = [10, 11, 12, 13, 14, 15]

    batch = DistillationCollator(pad_token_id=0)([feature(ids, ids)])
    request, _ = request_of(batch, SPEC)

    # Five usable rows of six: nothing follows the last token.
    assert batch["positions"].tolist() == [0, 1, 2, 3, 4]
    assert batch["gold_ids"].tolist() == [11, 12, 13, 14, 15]
    assert request.position_mask_T.tolist() == [True] * 5 + [False]


def test_only_answer_tokens_are_asked_for() -> None:
    batch = DistillationCollator(pad_token_id=0)(
        [feature([5, 6, 7], [-100, -100, 7]), feature([8, 9, 10, 11], [-100, 9, -100, 11])]
    )
    request, sample_ids = request_of(batch, SPEC)

    assert batch["positions"].tolist() == [1, 4 + 0, 4 + 2]
    assert batch["gold_ids"].tolist() == [7, 9, 11]
    assert batch["position_rows"].tolist() == [0, 1, 1]
    assert request.token_ids_T.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert request.row_lengths_R.tolist() == [3, 4]
    assert request.num_positions == 3
    assert sample_ids == ("a", "a")


def test_padded_and_unpadded_views_hold_the_same_positions() -> None:
    generator = np.random.default_rng(0)
    features = []
    for length in (3, 9, 1, 6):
        ids = generator.integers(3, 90, length)
        features.append(feature(ids.tolist(), np.where(ids % 2, ids, -100).tolist()))

    batch = DistillationCollator(pad_token_id=0)(features)
    request, _ = request_of(batch, SPEC)

    gold_of_teacher = np.roll(request.token_ids_T, -1)[request.position_mask_T]
    assert gold_of_teacher.tolist() == batch["gold_ids"].tolist()
    flat = batch["input_ids"].flatten()
    own = request.token_ids_T[request.position_mask_T]
    assert flat[batch["positions"]].tolist() == own.tolist()


def test_pbr_15_pad_equal_to_eos_keeps_the_answers_end_and_the_prompts_markers() -> None:
    prompt_with_markers, answer = [EOS, 5, EOS, 6], [7, 8, EOS]
    ids = prompt_with_markers + answer
    labels = [-100] * 4 + answer
    longer = list(range(10, 21))

    batch = DistillationCollator(pad_token_id=EOS)([feature(ids, labels), feature(longer, longer)])

    gold = batch["gold_ids"][batch["position_rows"] == 0].tolist()
    assert gold == [7, 8, EOS]
    assert batch["attention_mask"][0].tolist() == [1] * 7 + [0] * 4
    assert batch["input_ids"][0, 7:].tolist() == [EOS] * 4


def test_pbr_06_a_row_without_labels_asks_for_nothing() -> None:
    batch = DistillationCollator(pad_token_id=0)([feature([5, 6, 7], [-100] * 3)])
    request, _ = request_of(batch, SPEC)

    assert batch["positions"].shape == (0,)
    assert batch["positions"].dtype == torch.int64
    assert request.num_positions == 0


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([], [], "sample x holds no tokens"),
        ([1, 2], [1], "sample x has 2 input_ids but 1 labels"),
        ([1, -1], [1, 1], "sample x holds token ids -1..1"),
        ([1, 2**31], [1, 1], "ids are >= 0 and fit int32"),
    ],
)
def test_a_bad_row_is_refused_by_name(ids: list[int], labels: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillationCollator(pad_token_id=0)([feature([3, 4], [3, 4]), feature(ids, labels, "x")])


def test_pbr_16_the_request_and_the_students_rows_are_one_object() -> None:
    batch = DistillationCollator(pad_token_id=0)([feature([5, 6, 7], [5, 6, 7])])
    request, _ = request_of(batch, SPEC)

    assert request.token_ids_T is batch[ROWS].token_ids_T
    assert request.num_positions == len(batch["positions"])
