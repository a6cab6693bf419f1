"""Oracle: the mean over all supervised tokens, in float64, from two plain forward passes.

However a batch is cut (micro-batches, padding, chunks) and wherever the teacher runs,
value and gradient must be those of that mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import make_tiny_llama
from tests.support.training import (
    first_gradients,
    local_teacher,
    make_args,
    make_trainer,
    random_rows,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_llama(folder / "teacher", seed=1), make_tiny_llama(folder / "student", seed=2)


def exact_mean_kl(
    teacher: Path, student: Path, rows: list[dict[str, Any]], *, temperature: float = 1.0
) -> float:
    """Full-vocabulary forward KL, one row at a time, without padding or chunks."""
    t, s = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        for folder in (teacher, student)
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            log_p, log_q = (
                (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
                for model in (t, s)
            )
            is_wanted = torch.tensor(row["labels"][1:]) != -100
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)[is_wanted]
            total, count = total + float(kl.sum()), count + int(is_wanted.sum())
    return total / count


def assert_equal_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float = 1e-6
) -> None:
    assert found.keys() == expected.keys() and found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_dense_loss_is_the_exact_forward_kl_times_the_square_of_the_temperature(
    models: tuple[Path, Path], tmp_path: Path, temperature: float
) -> None:
    teacher, student = models
    rows = random_rows([9, 14, 5, 20])
    args = make_args(tmp_path, teacher_codec="dense", temperature=temperature)
    trainer = make_trainer(student, local_teacher(teacher), args, rows)

    loss, _ = first_gradients(trainer, rows, num_micro_batches=1)

    exact = exact_mean_kl(teacher, student, rows, temperature=temperature) * temperature**2
    # Centred float16 logits on the wire: 2**-11 relative.
    assert loss == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("uses_lora", [True, False])
def test_pbr_01_four_micro_batches_give_loss_and_gradients_of_one(
    models: tuple[Path, Path], tmp_path: Path, uses_lora: bool
) -> None:
    teacher, student = models
    # Very uneven rows: 3 to 27 supervised tokens.
    rows = random_rows([5, 40, 12, 7])
    args = make_args(tmp_path, gradient_accumulation_steps=4)
    trainer = make_trainer(student, local_teacher(teacher), args, rows, uses_lora=uses_lora)

    whole = first_gradients(trainer, rows, num_micro_batches=1)
    cut = first_gradients(trainer, rows, num_micro_batches=4)

    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert_equal_gradients(cut[1], whole[1])


def test_pbr_01_one_and_seven_tokens_weigh_by_tokens_not_by_micro_batches(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models
    rows = random_rows([9, 9])
    for row, num_supervised in zip(rows, (1, 7), strict=True):
        row["labels"] = [-100] * (9 - num_supervised) + row["input_ids"][9 - num_supervised :]
    args = make_args(tmp_path, teacher_codec="dense")
    trainer = make_trainer(student, local_teacher(teacher), args, rows)

    cut, _ = first_gradients(trainer, rows, num_micro_batches=2)

    alone = [exact_mean_kl(teacher, student, [row]) for row in rows]
    assert cut == pytest.approx((1 * alone[0] + 7 * alone[1]) / 8, rel=5e-3)
    assert cut != pytest.approx(sum(alone) / 2, rel=5e-3)


def test_pbr_02_the_batch_twice_has_the_same_mean(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models
    rows = random_rows([9, 14])
    trainer = make_trainer(student, local_teacher(teacher), make_args(tmp_path), rows)

    once = first_gradients(trainer, rows, num_micro_batches=1)
    twice = first_gradients(trainer, [*rows, *rows], num_micro_batches=1)

    assert twice[0] == pytest.approx(once[0], rel=1e-6)
    assert_equal_gradients(twice[1], once[1])


def test_pbr_02_and_20_dead_columns_of_the_head_change_nothing(tmp_path: Path) -> None:
    rows = random_rows([9, 14])
    losses = []
    for head_rows in (64, 72):
        teacher = make_tiny_llama(tmp_path / f"t{head_rows}", seed=1, head_rows=head_rows)
        student = make_tiny_llama(tmp_path / f"s{head_rows}", seed=2, head_rows=head_rows)
        _copy_real_rows(tmp_path / "t64", teacher)
        _copy_real_rows(tmp_path / "s64", student)
        args = make_args(tmp_path, teacher_codec="dense", alpha_ce=0.5)
        trainer = make_trainer(student, local_teacher(teacher), args, rows)
        losses.append(first_gradients(trainer, rows, num_micro_batches=1)[0])

    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def _copy_real_rows(source: Path, target: Path) -> None:
    """Give `target` the weights of `source`, and padding rows that would win every softmax."""
    if source == target:
        return
    narrow, wide = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, target))
    state = narrow.state_dict()
    embedding = state.pop("model.embed_tokens.weight")
    state.pop("lm_head.weight", None)
    wide.load_state_dict(state, strict=False)
    with torch.no_grad():
        wide.model.embed_tokens.weight.fill_(5.0)
        wide.model.embed_tokens.weight[: len(embedding)] = embedding
    wide.save_pretrained(target)


def test_pbr_06_a_micro_batch_without_labels_is_a_finite_zero_and_leaves_the_others_alone(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models
    rows = random_rows([9, 14])
    emptied = {**random_rows([32], seed=9)[0], "labels": [-100] * 32, "sample_id": "cut"}
    trainer = make_trainer(student, local_teacher(teacher), make_args(tmp_path), rows)

    normal = first_gradients(trainer, rows, num_micro_batches=1)
    trainer.step_metrics.reduce(trainer.accelerator)
    beside = first_gradients(trainer, [*rows, emptied, emptied], num_micro_batches=2)
    counted = trainer.step_metrics.reduce(trainer.accelerator)
    alone = first_gradients(trainer, [emptied], num_micro_batches=1)

    assert beside[0] == pytest.approx(normal[0], rel=1e-6)
    assert_equal_gradients(beside[1], normal[1])
    assert counted["rows_without_labels"] == 2
    assert alone[0] == 0.0
    assert alone[1] and all((gradient == 0).all() for gradient in alone[1].values())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("codec", ["topk", "dense"])
def test_pbr_07_ragged_answers_have_the_gradients_of_the_samples_alone_at_every_beta(
    models: tuple[Path, Path], tmp_path: Path, beta: float, codec: str
) -> None:
    teacher, student = models
    # Prompts of 4, answers of 2 and 5 tokens.
    rows = random_rows([6, 9])
    for row in rows:
        row["labels"] = [-100] * 4 + row["input_ids"][4:]
    args = make_args(tmp_path, beta=beta, teacher_codec=codec)
    trainer = make_trainer(student, local_teacher(teacher), args, rows)

    loss, together = first_gradients(trainer, rows, num_micro_batches=1)
    alone = [first_gradients(trainer, [row], num_micro_batches=1) for row in rows]

    assert loss == pytest.approx((2 * alone[0][0] + 5 * alone[1][0]) / 7, rel=1e-5)
    for name, gradient in together.items():
        assert gradient.isfinite().all()
        expected = (2 * alone[0][1][name] + 5 * alone[1][1][name]) / 7
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_padding_changes_neither_loss_nor_gradient(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models
    rows = random_rows([6, 30])
    trainer = make_trainer(student, local_teacher(teacher), make_args(tmp_path), rows)

    padded = first_gradients(trainer, rows, num_micro_batches=1)
    alone = first_gradients(trainer, rows, num_micro_batches=2)

    assert padded[0] == pytest.approx(alone[0], rel=1e-5)
    assert_equal_gradients(padded[1], alone[1])


def test_pbr_32_another_teacher_gives_another_loss_and_training_lowers_the_kl(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models
    other = make_tiny_llama(tmp_path / "other", seed=7)
    rows = random_rows([20] * 8)
    args = make_args(tmp_path, max_steps=30, per_device_train_batch_size=4)
    trainer = make_trainer(student, local_teacher(teacher), args, rows, eval_rows=rows)
    elsewhere = make_trainer(student, local_teacher(other), args, rows)

    first = first_gradients(trainer, rows, num_micro_batches=1)
    second = first_gradients(elsewhere, rows, num_micro_batches=1)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()

    assert first[0] != pytest.approx(second[0], rel=1e-2)
    assert after["eval_kl"] < 0.8 * before["eval_kl"]


def test_adapters_start_at_the_same_place_whatever_was_drawn_before(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, student = models

    def adapters() -> dict[str, torch.Tensor]:
        torch.rand(int(torch.randint(1, 1000, ())))
        args = make_args(tmp_path)
        trainer = make_trainer(student, local_teacher(teacher), args, random_rows([6, 7]))
        state = trainer.model.state_dict()
        return {name: tensor for name, tensor in state.items() if "lora_A" in name}

    torch.seed()
    first, second = adapters(), adapters()

    assert first and all(torch.equal(first[name], second[name]) for name in first)
