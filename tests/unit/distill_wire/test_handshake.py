"""Oracle: sums modulo 2**64 in Python integers, SHA-256, and tokens with ids known by heart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distill_wire import handshake
from distill_wire.errors import IdentityMismatch
from distill_wire.handshake import (
    check_vocabulary,
    token_map_fingerprint,
    token_map_of,
    weights_fingerprint,
)
from distill_wire.types import Limits, LogitTransform, TeacherDescription
from tests.support.tiny_models import make_number_tokenizer

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

FIXED = torch.tensor([[1.0, -2.0, 0.5], [float("inf"), 0.0, 3.0]])


def fingerprint(tensor: Tensor, name: str = "w") -> str:
    return weights_fingerprint([(name, tensor)])


def fingerprint_by_hand(name: str, tensor: Tensor, *, width: int) -> str:
    """Follow the docstring with Python integers, `width` bytes at a time."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    first = second = 0
    for index in range(len(raw) // width):
        piece = raw[index * width : (index + 1) * width]
        bits = int.from_bytes(piece, "little", signed=width > 1) + 1
        first += bits * (2 * index + 1)
        second += bits * (2 * 0x9E3779B1 * index * index + 1)
    digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
    for part in (first, second):
        digest.update((part % 2**64).to_bytes(8, "little"))
    return digest.hexdigest()[:32]


def random_tensor(dtype: torch.dtype, num: int = 12) -> Tensor:
    torch.manual_seed(0)
    if dtype == torch.bool:
        return torch.arange(num) % 3 == 0
    values = 10 * torch.randn(num)
    return (values.abs() if dtype == torch.uint8 else values).to(dtype)


def test_the_fingerprint_of_a_fixed_tensor_never_changes() -> None:
    # Pinned runs and caches hold it: a new value here needs an entry under Wire in CHANGELOG.
    assert fingerprint(FIXED) == "df026ea59d7e0d435cfe59acf9eeb94c"
    assert fingerprint(FIXED.bfloat16()) == "36bfc8b7ba54feda27cb8f29205b3919"


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float64, 4),
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float16, 2),
        (torch.int64, 4),
        (torch.uint8, 1),
    ],
)
def test_the_fingerprint_is_the_documented_sum(dtype: torch.dtype, width: int) -> None:
    tensor = random_tensor(dtype, 1000).reshape(10, 100)

    assert fingerprint(tensor) == fingerprint_by_hand("w", tensor, width=width)


@every_dtype
def test_every_flipped_bit_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype)
    seen = {fingerprint(tensor)}

    num_bits = 8 * tensor.nbytes if dtype != torch.bool else tensor.numel()
    for bit in range(num_bits):
        changed = tensor.clone()
        raw = changed.view(torch.uint8)
        if dtype == torch.bool:
            raw[bit] ^= 1
        else:
            raw[bit // 8] ^= 1 << bit % 8
        seen.add(fingerprint(changed))

    assert len(seen) == num_bits + 1


@every_dtype
def test_every_swap_of_two_elements_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype)
    seen = fingerprint(tensor)

    for i in range(len(tensor)):
        for j in range(i):
            swapped = tensor.clone()
            swapped[i], swapped[j] = tensor[j], tensor[i]
            is_other = bool(swapped[i] != tensor[i])
            assert (fingerprint(swapped) != seen) == is_other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: -t,
        lambda t: torch.cat([-t[:2], t[2:]]),
        lambda t: torch.cat([t[:5], -t[5:6], t[6:11], -t[11:]]),
        lambda t: t.flip(0),
        lambda t: t.roll(1),
        lambda t: t.roll(4),
        lambda t: t.reshape(3, 4).T.reshape(-1),
        lambda t: t * 2,
        lambda t: t + 1,
        torch.zeros_like,
    ],
    ids=[
        "all signs",
        "two signs",
        "two far signs",
        "reversed",
        "rolled",
        "rolled rows",
        "transposed",
        "doubled",
        "shifted",
        "zeroed",
    ],
)
def test_a_change_of_many_elements_changes_the_fingerprint(
    change: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    tensor = random_tensor(dtype)

    assert fingerprint(change(tensor)) != fingerprint(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_and_its_negative_are_not_exchanged_unseen(dtype: torch.dtype) -> None:
    tensor = torch.tensor([3.0, 1.0, 2.0, -3.0], dtype=dtype)
    swapped = torch.tensor([-3.0, 1.0, 2.0, 3.0], dtype=dtype)

    assert fingerprint(swapped) != fingerprint(tensor)


def test_name_shape_and_dtype_are_part_of_the_fingerprint() -> None:
    zeros = torch.zeros(4, 6)

    variants = [
        fingerprint(zeros),
        fingerprint(zeros, "v"),
        fingerprint(zeros.reshape(6, 4)),
        fingerprint(zeros.reshape(24)),
        fingerprint(zeros.reshape(4, 6, 1)),
        fingerprint(zeros.int()),
        fingerprint(zeros.half()),
        fingerprint(zeros.bfloat16()),
        fingerprint(torch.zeros(0)),
        fingerprint(torch.zeros(0, 3)),
        fingerprint(torch.zeros(())),
        weights_fingerprint([]),
        weights_fingerprint([("w", zeros), ("v", zeros)]),
    ]

    assert len(set(variants)) == len(variants)
    assert all(len(variant) == 32 for variant in variants)


@every_dtype
def test_the_fingerprint_sees_values_and_not_their_layout(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype).reshape(3, 4)
    wide = torch.zeros(3, 8).to(dtype)
    wide[:, 1::2] = tensor
    transposed = tensor.T.contiguous().T

    assert not wide[:, 1::2].is_contiguous() and not transposed.is_contiguous()
    assert fingerprint(wide[:, 1::2]) == fingerprint(tensor)
    assert fingerprint(transposed) == fingerprint(tensor)
    assert fingerprint(tensor.clone()) == fingerprint(tensor)


def test_the_order_of_tensors_does_not_matter_and_gradients_are_left_alone() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.zeros(2)

    assert weights_fingerprint([("a", a), ("b", b)]) == weights_fingerprint(
        iter([("b", b), ("a", a)])
    )
    assert weights_fingerprint([("a", b), ("b", a)]) != weights_fingerprint([("a", a), ("b", b)])
    assert a.requires_grad and a.grad is None


def test_the_fingerprint_does_not_depend_on_the_blocks_it_is_read_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = random_tensor(torch.float32, 1000)
    whole = fingerprint(tensor)

    for elements in (1, 7, 999, 1000):
        monkeypatch.setattr(handshake, "_BLOCK_ELEMENTS", elements)
        assert fingerprint(tensor) == whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_dtype
def test_the_fingerprint_is_the_same_on_every_device(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 10_000)

    assert fingerprint(tensor.cuda()) == fingerprint(tensor)


def describe(tokens: tuple[str, ...], *, vocab_size: int = 64) -> TeacherDescription:
    return TeacherDescription(
        wire_version=1,
        model_id="teacher",
        revision="",
        weights_fingerprint="w",
        token_map_fingerprint=token_map_fingerprint(tokens) if tokens else "",
        head_rows=64,
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=2,
        logit_transform=LogitTransform(),
        dtype="float32",
        attention_implementation="sdpa",
        codecs=(),
        limits=Limits(max_request_tokens=1, max_row_tokens=1, max_top_k=1, max_answer_bytes=1),
    )


def refusal(
    student: tuple[str, ...], teacher: tuple[str, ...], *, is_map_known: bool = True
) -> str:
    with pytest.raises(IdentityMismatch) as caught:
        check_vocabulary(
            describe(teacher),
            endpoint="host:50051",
            student_tokens=student,
            student_vocab_size=64,
            teacher_tokens=teacher if is_map_known else (),
        )
    return str(caught.value)


TOKENS = token_map_of(make_number_tokenizer(64))


def test_a_token_map_lists_tokens_by_id_and_unused_ids_as_empty() -> None:
    tokenizer = make_number_tokenizer(6)
    tokenizer.add_tokens(["extra"])

    assert token_map_of(tokenizer) == ("w0", "w1", "w2", "w3", "w4", "w5", "extra")

    class Sparse:
        def get_vocab(self) -> dict[str, int]:
            return {"b": 3, "a": 1}

    class Empty:
        def get_vocab(self) -> dict[str, int]:
            return {}

    assert token_map_of(Sparse()) == ("", "a", "", "b")
    assert token_map_of(Empty()) == ()


def test_one_tokenizer_on_both_sides_is_accepted() -> None:
    for teacher_tokens in ((), TOKENS):
        check_vocabulary(
            describe(TOKENS),
            endpoint="host:50051",
            student_tokens=TOKENS,
            student_vocab_size=64,
            teacher_tokens=teacher_tokens,
        )


def test_two_sides_without_a_tokenizer_have_nothing_to_compare() -> None:
    check_vocabulary(describe(()), endpoint="h:1", student_tokens=(), student_vocab_size=64)


def test_another_vocabulary_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(IdentityMismatch, match=r"host:50051 has a vocabulary of 63 .* has 64;"):
        check_vocabulary(
            describe(TOKENS, vocab_size=63),
            endpoint="host:50051",
            student_tokens=TOKENS,
            student_vocab_size=64,
        )


def test_pbr_21_two_swapped_ids_are_refused_with_ids_and_tokens() -> None:
    swapped = token_map_of(make_number_tokenizer(64, swapped=(7, 40)))

    message = refusal(TOKENS, swapped)

    assert "2 ids differ, first id 7: student 'w7', teacher 'w40'" in message
    assert "id 40: student 'w40', teacher 'w7'" in message
    assert token_map_fingerprint(TOKENS) in message
    assert token_map_fingerprint(swapped) in message
    assert "teacher at host:50051" in message
    assert "teacher_check_token_map=false" in message


def test_pbr_21_ids_that_differ_are_refused_even_if_the_teachers_map_is_not_known() -> None:
    swapped = token_map_of(make_number_tokenizer(64, swapped=(7, 40)))

    message = refusal(TOKENS, swapped, is_map_known=False)

    assert "ids differ" not in message
    assert token_map_fingerprint(swapped) in message


def test_pbr_21_a_token_that_the_teacher_lacks_is_named() -> None:
    lacking = (*TOKENS[:30], "", *TOKENS[31:])

    assert "1 ids differ, first id 30: student 'w30', teacher ''" in refusal(TOKENS, lacking)


def test_pbr_21_a_shorter_map_is_refused_with_both_lengths() -> None:
    text = "the student's map has 64 tokens, the teacher's 63"

    assert text in refusal(TOKENS, TOKENS[:-1])


def test_pbr_21_only_the_first_ids_of_many_are_named() -> None:
    message = refusal(TOKENS, TOKENS[::-1])

    assert "64 ids differ, first id 0: student 'w0', teacher 'w63', id 1" in message
    assert "id 2:" in message and "id 3:" not in message


@pytest.mark.parametrize(
    ("student", "teacher", "text"),
    [(TOKENS, (), "host:50051 is missing"), ((), TOKENS, "the student's is missing")],
)
def test_pbr_21_a_side_without_a_tokenizer_is_refused(
    student: tuple[str, ...], teacher: tuple[str, ...], text: str
) -> None:
    assert text in refusal(student, teacher)


def test_a_token_map_is_hashed_with_its_borders() -> None:
    maps = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("c", "ab"), ("\ud800",)]

    assert len({token_map_fingerprint(tokens) for tokens in maps}) == len(maps)
    expected = hashlib.sha256(b"\x02\x00\x00\x00\xc3\xa9\x01\x00\x00\x00b").hexdigest()[:32]
    assert token_map_fingerprint(("é", "b")) == expected
