"""Oracle: the teacher itself, run layer by layer without the layers that were dropped."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from student_trainer.demo_models import FILES, prepare_demo_teacher, prune_layers
from tests.support.tokenizers import make_word_tokenizer

SHAPE = {
    "vocab_size": 34,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def teacher_folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "teacher"
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    make_word_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_without(folder: Path, *, dropped: list[int]) -> Tensor:
    """Let the dropped layers of the whole model pass their input on."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for index in dropped:
        model.model.layers[index].forward = lambda hidden_states, *_, **__: hidden_states
    logits: Tensor = model(IDS, use_cache=False).logits
    return logits


@torch.no_grad()
def logits_of(folder: Path) -> Tensor:
    logits: Tensor = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    return logits


def test_a_student_computes_what_the_teacher_does_without_the_dropped_layers(
    teacher_folder: Path, tmp_path: Path
) -> None:
    student = prune_layers(
        teacher_folder, tmp_path / "student", num_layers_to_drop=2, first_layer=1, stride=2
    )

    expected = logits_without(teacher_folder, dropped=[1, 3])
    assert torch.equal(logits_of(student), expected)
    assert not torch.equal(expected, logits_of(teacher_folder))


def test_a_student_says_its_depth_and_keeps_dtype_and_tokenizer(
    teacher_folder: Path, tmp_path: Path
) -> None:
    student = prune_layers(teacher_folder, tmp_path / "s", num_layers_to_drop=2, first_layer=2)

    config = json.loads((student / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["dropped_teacher_layers"] == [2, 4]
    assert config["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(student)
    assert tokenizer.get_vocab() == make_word_tokenizer().get_vocab()
    assert tokenizer.eos_token == "<end>"


def test_generation_with_a_cache_equals_generation_without(
    teacher_folder: Path, tmp_path: Path
) -> None:
    student = prune_layers(teacher_folder, tmp_path / "s", num_layers_to_drop=3, first_layer=0)
    model = AutoModelForCausalLM.from_pretrained(student)

    with torch.no_grad():
        first = model(IDS[:, :5], use_cache=True)
        rest = model(IDS[:, 5:], past_key_values=first.past_key_values).logits

    # Two ways to sum the same float32 numbers.
    torch.testing.assert_close(rest, logits_of(student)[:, 5:], rtol=1e-5, atol=1e-6)


def test_per_layer_attention_kinds_follow_their_layers(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 3
    config = Qwen3Config(**SHAPE, layer_types=kinds, use_sliding_window=True, sliding_window=3)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "t")
    make_word_tokenizer().save_pretrained(tmp_path / "t")

    student = prune_layers(
        tmp_path / "t", tmp_path / "s", num_layers_to_drop=2, first_layer=1, stride=1
    )

    kept = json.loads((student / "config.json").read_text())["layer_types"]
    assert kept == [kinds[index] for index in (0, 3, 4, 5)]
    assert torch.equal(logits_of(student), logits_without(tmp_path / "t", dropped=[1, 2]))


def test_an_earlier_student_is_replaced_and_anything_else_is_refused(
    teacher_folder: Path, tmp_path: Path
) -> None:
    student = prune_layers(teacher_folder, tmp_path / "s", num_layers_to_drop=1, first_layer=1)
    prune_layers(teacher_folder, student, num_layers_to_drop=2, first_layer=1)

    assert json.loads((student / "config.json").read_text())["dropped_teacher_layers"] == [1, 3]
    with pytest.raises(ValueError, match="exists and is no student made here"):
        prune_layers(teacher_folder, teacher_folder, num_layers_to_drop=1, first_layer=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "teacher"]


@pytest.mark.parametrize(
    ("num_layers_to_drop", "first_layer", "stride", "message"),
    [
        (3, 2, 2, "cannot drop layers [2, 4, 6] of a model with 6 layers"),
        (0, 2, 2, "must be >= 1 and first_layer >= 0, got 0, 2 and 2"),
        (1, -1, 2, "must be >= 1 and first_layer >= 0, got 1, 2 and -1"),
    ],
)
def test_layers_that_do_not_exist_are_refused(
    num_layers_to_drop: int,
    first_layer: int,
    stride: int,
    message: str,
    teacher_folder: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prune_layers(
            teacher_folder,
            tmp_path / "s",
            num_layers_to_drop=num_layers_to_drop,
            first_layer=first_layer,
            stride=stride,
        )
    assert not (tmp_path / "s").exists()


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=34, n_embd=16, n_layer=4, n_head=2, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "t")
    make_word_tokenizer().save_pretrained(tmp_path / "t")

    with pytest.raises(ValueError, match=r"GPT2LMHeadModel keeps no decoder layers in model\."):
        prune_layers(tmp_path / "t", tmp_path / "s", num_layers_to_drop=1, first_layer=1)


def test_a_complete_teacher_folder_is_left_as_it_is(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("kept")

    assert prepare_demo_teacher(tmp_path) == tmp_path
    assert {path.read_text() for path in tmp_path.iterdir()} == {"kept"}


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(ValueError, match=r"exists but lacks some of config\.json"):
        prepare_demo_teacher(tmp_path)


@pytest.mark.slow
def test_the_demo_teacher_ends_its_turns_with_its_own_marker(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    try:
        folder = prepare_demo_teacher(tmp_path / "teacher")
    except ModuleNotFoundError as exc:
        pytest.skip(str(exc))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.tokenize("=    1") == ["=", "ĠĠĠĠ", "1"]
    text = "x =    12\n\t▁ é = a . b"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"
