"""Oracle: the term by its definition, from the states of two plain forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from student_trainer.hidden_states import FILE, layer_map, parse_layer_map
from tests.support.tiny_models import make_tiny_llama
from tests.support.training import (
    first_gradients,
    local_teacher,
    make_args,
    make_trainer,
    random_rows,
)

HIDDEN = {"alpha_hidden": 0.5, "alpha_kd": 0.0, "hidden_layers": "1", "teacher_codec": "hidden8"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "teacher", seed=1)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "student", seed=2)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "narrow", seed=3, hidden_size=16)


def states(folder: Path, ids: list[int], layer: int) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        output = model.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return output.hidden_states[layer][0]


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_the_term_is_the_mean_over_supervised_tokens(
    teacher: Path, student: Path, tmp_path: Path, kind: str
) -> None:
    rows = random_rows([9, 4])
    args = make_args(tmp_path, **HIDDEN, hidden_loss=kind)
    trainer = make_trainer(student, local_teacher(teacher), args, rows)

    loss, gradients = first_gradients(trainer, rows, num_micro_batches=1)

    total, count = 0.0, 0
    for row in rows:
        t, s = (states(folder, row["input_ids"], 1) for folder in (teacher, student))
        distance = 1 - torch.nn.functional.cosine_similarity(t, s, dim=-1)
        wanted = torch.tensor(row["labels"][1:]) != -100
        total += float(distance[:-1][wanted].sum()) * (2 if kind == "mse" else 1)
        count += int(wanted.sum())
    # The teacher's states travel in 8 bits.
    assert loss == pytest.approx(0.5 * total / count, rel=2e-3)
    below = [name for name in gradients if ".layers.0." in name and "lora_B" in name]
    assert any(gradients[name].abs().max() > 0 for name in below)
    above = [name for name in gradients if ".layers.1." in name]
    assert all(gradients[name].abs().max() == 0 for name in above)


def test_pbr_01_four_micro_batches_give_loss_and_gradients_of_one(
    teacher: Path, student: Path, tmp_path: Path
) -> None:
    rows = random_rows([9, 4, 6, 12])
    args = make_args(tmp_path, **(HIDDEN | {"alpha_kd": 1.0}))
    trainer = make_trainer(student, local_teacher(teacher), args, rows)

    whole, expected = first_gradients(trainer, rows, num_micro_batches=1)
    cut, found = first_gradients(trainer, rows, num_micro_batches=4)

    # Padding rounds differently, and an 8-bit code may then fall to its other side.
    assert cut == pytest.approx(whole, rel=1e-4)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-2, atol=1e-4)


def run(
    folder: Path, student: Path, teacher: Path, *, uses_lora: bool = True, **changes: Any
) -> tuple[list[float], Path]:
    """Train on wide states; give the losses and the run's folder."""
    resume = changes.pop("resume", None)
    args = make_args(folder, **(HIDDEN | {"save_strategy": "steps", "save_steps": 2} | changes))
    rows = random_rows([9, 4, 6, 12, 8, 7])
    trainer = make_trainer(student, local_teacher(teacher), args, rows, uses_lora=uses_lora)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    history = trainer.state.log_history
    return [entry["hidden_loss"] for entry in history if "hidden_loss" in entry], folder


def test_a_projection_learns_and_comes_back_with_a_checkpoint_but_is_not_exported(
    teacher: Path, narrow: Path, tmp_path: Path
) -> None:
    teacher_wide, student = teacher, narrow
    losses, folder = run(tmp_path / "whole", student, teacher_wide, max_steps=4)

    resumed, _ = run(
        tmp_path / "resumed",
        student,
        teacher_wide,
        max_steps=4,
        resume=str(folder / "checkpoint-2"),
    )

    assert resumed[-2:] == pytest.approx(losses[-2:], rel=1e-6)
    saved = load_file(folder / "checkpoint-2" / FILE)
    assert [tuple(tensor.shape) for tensor in saved.values()] == [(32, 16)]
    exported = load_file(folder / "adapter_model.safetensors")
    assert exported and not any("projection" in name for name in exported)


def test_a_fully_trained_student_is_exported_without_its_projection(
    teacher: Path, narrow: Path, tmp_path: Path
) -> None:
    _, folder = run(tmp_path, narrow, teacher, uses_lora=False, max_steps=2)

    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]


def test_layers_are_paired_by_depth_or_as_given() -> None:
    assert layer_map("", num_teacher_layers=30, num_student_layers=30) == ((20, 20),)
    assert layer_map("8,30,0", num_teacher_layers=30, num_student_layers=20) == (
        (8, 5),
        (30, 20),
        (0, 0),
    )
    assert layer_map("8:1", num_teacher_layers=30, num_student_layers=20) == ((8, 1),)


@pytest.mark.parametrize("text", ["x", "1:", ":2", "1,,2", "1:2:3", "-1", "\u00b2"])
def test_a_layer_map_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected teacher layers such as 8,16"):
        parse_layer_map(text)


def test_layers_that_do_not_exist_or_stand_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the teacher has layers 0\.\.30, the student 0\.\.20"):
        layer_map("31", num_teacher_layers=30, num_student_layers=20)
    with pytest.raises(ValueError, match="names a teacher layer twice"):
        parse_layer_map("3,3:1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_codec": "threshold", "beta": 0.5}, "threshold feeds forward KL, not JSD"),
        ({"teacher_codec": "threshold", "beta": 1.0}, "not reverse KL; codecs that do: topk"),
        ({"hidden_loss": "l1"}, "hidden_loss must be mse or cosine, got 'l1'"),
        ({"hidden_codec": "mid2"}, "hidden_codec must be mid4 or mid8, got 'mid2'"),
        ({"hidden_layers": "a"}, "hidden_layers holds 'a'"),
        ({"alpha_hidden": -1.0}, "alpha_hidden"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_config_is_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_args(tmp_path, **changes)
