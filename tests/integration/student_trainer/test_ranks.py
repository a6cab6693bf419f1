"""Oracle: one plain process with the whole batch.

Two FSDP2 ranks on gloo must give its losses and its trained weights, with the teacher
sharded beside the student and without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import FSDP, run_ranks
from tests.support.teacher import running_teacher
from tests.support.tiny_models import make_tiny_llama

# Eight rows of very different length: ranks and micro-batches hold unequal token counts.
LENGTHS = [5, 40, 12, 7, 30, 9, 22, 16]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "teacher": make_tiny_llama(folder / "teacher", seed=1),
        "student": make_tiny_llama(folder / "student", seed=2),
        "lengths": LENGTHS,
    }


@pytest.fixture(scope="module")
def one_process(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    args = {"per_device_train_batch_size": 4}
    folder = tmp_path_factory.mktemp("one")
    return run_ranks(folder, num_ranks=0, **job, args=args, eval_lengths=[9, 4, 17])


def assert_same_run(found: dict[str, Any], expected: dict[str, Any], *, rtol: float = 1e-5) -> None:
    for step, reference in zip(found["steps"], expected["steps"], strict=True):
        for name in ("loss", "kd_loss", "ce_loss", "supervised_tokens"):
            assert step[name] == pytest.approx(reference[name], rel=rtol), name
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, parameter in found["parameters"].items():
        torch.testing.assert_close(
            parameter, expected["parameters"][name], rtol=1e-3, atol=1e-4, msg=name
        )


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "is_checkpointed"), [(2, 1, False), (1, 2, True)]
)
def test_two_fsdp2_ranks_give_losses_and_weights_of_one_process(
    job: dict[str, Any],
    one_process: dict[str, Any],
    tmp_path: Path,
    batch_size: int,
    accumulation: int,
    is_checkpointed: bool,
) -> None:
    config = {"version": 2, "activation_checkpointing": is_checkpointed}
    args = {
        "fsdp": True,
        "fsdp_config": config,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
    }

    two = run_ranks(tmp_path, num_ranks=2, **job, args=args, eval_lengths=[9, 4, 17])

    assert two["distributed_type"] == "DistributedType.FSDP"
    assert two["kinds"] == ["DTensor"]
    assert_same_run(two, one_process)
    # Three held-out samples on two ranks: the repeated one must not count twice.
    for name in ("eval_kl", "eval_ce", "eval_top1_agreement", "eval_supervised_tokens"):
        expected = one_process["evaluation"][name]
        assert two["evaluation"][name] == pytest.approx(expected, rel=1e-3), name


def test_two_ranks_with_a_teacher_over_grpc_give_the_same(
    job: dict[str, Any], one_process: dict[str, Any], tmp_path: Path
) -> None:
    args = FSDP | {"per_device_train_batch_size": 2, "teacher_prefetch": 2}

    with running_teacher(job["teacher"], dtype="float32") as running:
        two = run_ranks(tmp_path, num_ranks=2, **job, url=running.url, args=args)

    assert two["distributed_type"] == "DistributedType.FSDP"
    assert_same_run(two, one_process)


def test_full_training_with_a_tied_head_gives_the_same_on_two_ranks(
    job: dict[str, Any], tmp_path: Path
) -> None:
    args = {"per_device_train_batch_size": 2}
    plain = {"per_device_train_batch_size": 4}

    one = run_ranks(tmp_path / "one", num_ranks=0, **job, args=plain, uses_lora=False)
    two = run_ranks(tmp_path / "two", num_ranks=2, **job, args=args | FSDP, uses_lora=False)

    assert_same_run(two, one)


def test_pbr_06_a_rank_without_labels_leaves_the_other_alone(
    job: dict[str, Any], tmp_path: Path
) -> None:
    args = {"per_device_train_batch_size": 1, "max_steps": 1, "seed": 0}
    plain = {"per_device_train_batch_size": 2, "max_steps": 1, "seed": 0}
    emptied = {**job, "lengths": [32, 14], "emptied_row": 0}

    one = run_ranks(tmp_path / "one", num_ranks=0, **emptied, args=plain)
    two = run_ranks(tmp_path / "two", num_ranks=2, **emptied, args=args | FSDP)

    assert two["steps"][0]["rows_without_labels"] == 1
    assert_same_run(two, one)


def test_bf16_keeps_frozen_weights_bf16_and_trained_ones_fp32(
    job: dict[str, Any], one_process: dict[str, Any], tmp_path: Path
) -> None:
    args = FSDP | {"bf16": True, "per_device_train_batch_size": 2}

    two = run_ranks(tmp_path, num_ranks=2, **job, args=args, student_dtype="bfloat16")

    assert two["dtypes"] == {"trainable": ["torch.float32"], "frozen": ["torch.bfloat16"]}
    for step, reference in zip(two["steps"], one_process["steps"], strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=0.05)


def test_a_resumed_run_ends_with_the_losses_of_an_unbroken_one(
    job: dict[str, Any], tmp_path: Path
) -> None:
    args = FSDP | {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}

    unbroken = run_ranks(tmp_path / "whole", num_ranks=2, **job, args=args)
    folder = tmp_path / "broken"
    run_ranks(folder, num_ranks=2, **job, args=args | {"max_steps": 3})
    checkpoint = str(folder / "run" / "checkpoint-3")
    resumed = run_ranks(
        folder, num_ranks=2, **job, args=args | {"resume_from_checkpoint": checkpoint}
    )

    assert [step["step"] for step in resumed["steps"]][-3:] == [4, 5, 6]
    for step, reference in zip(resumed["steps"][-3:], unbroken["steps"][-3:], strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], abs=1e-6)
