"""Who a teacher is, in two hashes, and whether a student may learn from it.

Sizes may agree while ids mean other tokens, and a URL may one day serve other
weights; both train on noise without an error. So the id-to-token map and every
weight are hashed, compared at the first `Describe`, and the weights' hash is checked
on every answer.

The weights' hash reads every bit on the device that holds them, with integer
arithmetic that gives the same result on CPU and GPU: 13 GB take tens of
milliseconds at HBM speed, where hashing on the host would first copy them.

Depends on: torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distill_wire import WIRE_VERSION
from distill_wire.causal_lm import CausalLMParts
from distill_wire.codecs import CODECS
from distill_wire.errors import IdentityMismatch
from distill_wire.types import Limits, TeacherDescription

_DIGEST_CHARACTERS = 32
_BLOCK_ELEMENTS = 1 << 22
# Eight bytes are read as two integers: one sign bit would be worth 2**63, which two of
# them, or a swap of x and -x, add up to 0 modulo 2**64.
_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def describe_teacher(
    model: Any,
    parts: CausalLMParts,
    *,
    token_map: Sequence[str],
    model_id: str,
    revision: str | None,
    limits: Limits,
) -> TeacherDescription:
    """Say who a loaded teacher is and what it accepts.

    Args:
        model: a transformers causal LM with whole (not sharded) weights.
        parts: the same model taken apart.
        token_map: its tokens by id, () if unknown.
        model_id: the name it goes by.
        revision: the revision that was asked for; the one transformers resolved wins.
        limits: what it accepts at most; `max_top_k` is cut to what its vocabulary allows.
    """
    config = model.config.get_text_config()
    head_rows = parts.head_rows
    vocab_size = min(head_rows, len(token_map) or head_rows)
    return TeacherDescription(
        wire_version=WIRE_VERSION,
        model_id=model_id,
        revision=getattr(model.config, "_commit_hash", None) or revision or "",
        weights_fingerprint=weights_fingerprint(model.named_parameters()),
        token_map_fingerprint=token_map_fingerprint(token_map) if token_map else "",
        head_rows=head_rows,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        logit_transform=parts.transform,
        dtype=str(model.dtype).removeprefix("torch."),
        attention_implementation=config._attn_implementation,
        codecs=tuple(CODECS),
        limits=replace(limits, max_top_k=min(limits.max_top_k, vocab_size - 1)),
    )


@torch.no_grad()
def weights_fingerprint(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash names, shapes, dtypes and every bit of the tensors.

    Per tensor, sum (bits_i + 1) * (odd weight of i) modulo 2**64 in two weightings, then SHA-256
    over the list in order of name. Not a cryptographic hash of the values: it tells
    models and revisions apart, it does not stop a forger.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda pair: pair[0]):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        for part in _checksums(tensor.detach()):
            digest.update(part.to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _checksums(tensor: Tensor) -> tuple[int, int]:
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 0:
        return 0, 0
    bits = flat.view(_INTEGER_VIEW[flat.element_size()])
    first = torch.zeros((), dtype=torch.int64, device=bits.device)
    second = first.clone()
    for start in range(0, bits.numel(), _BLOCK_ELEMENTS):
        block = bits[start : start + _BLOCK_ELEMENTS].long() + 1
        index = torch.arange(start, start + block.numel(), device=bits.device)
        # Odd multipliers are invertible modulo 2**64, so a change of one element
        # always changes the sum; two weightings make swaps collide by chance only.
        first += (block * (index * 2 + 1)).sum()
        second += (block * (index * index * 0x9E3779B1 * 2 + 1)).sum()
    return int(first), int(second)


def token_map_of(tokenizer: Any) -> tuple[str, ...]:
    """List a tokenizer's tokens by id, added ones included; "" where an id is unused."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tuple(tokens)


def token_map_fingerprint(tokens: Sequence[str]) -> str:
    """Hash an id-to-token map."""
    digest = hashlib.sha256()
    for token in tokens:
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def check_vocabulary(
    description: TeacherDescription,
    *,
    endpoint: str,
    student_tokens: Sequence[str],
    student_vocab_size: int,
    teacher_tokens: Sequence[str] = (),
    is_map_checked: bool = True,
) -> None:
    """Refuse a teacher whose ids mean other tokens than the student's.

    Args:
        description: what the teacher said of itself.
        endpoint: named in the message.
        student_tokens: the student's id-to-token map, () if it has none.
        student_vocab_size: real tokens of the student.
        teacher_tokens: the teacher's map, to name the ids that differ; () = not known.
        is_map_checked: False compares the sizes alone.

    Raises:
        IdentityMismatch: the vocabularies differ, or one side alone has a token map. Two
            sides without one (a teacher of random weights, say) agree by their sizes.
    """
    if description.vocab_size != student_vocab_size:
        raise IdentityMismatch(
            f"the teacher at {endpoint} has a vocabulary of {description.vocab_size} tokens, the "
            f"student has {student_vocab_size}; use a student and a teacher with one tokenizer"
        )
    ours = token_map_fingerprint(student_tokens) if student_tokens else ""
    theirs = description.token_map_fingerprint
    if is_map_checked and ours != theirs:
        differences = _first_differences(student_tokens, teacher_tokens)
        raise IdentityMismatch(
            f"token map fingerprint of the teacher at {endpoint} is {theirs or 'missing'}, the "
            f"student's is {ours or 'missing'}{differences}; "
            f"set teacher_check_token_map=false only if you know that the ids agree"
        )


def _first_differences(ours: Sequence[str], theirs: Sequence[str], *, limit: int = 3) -> str:
    if not ours or not theirs:
        return ""
    differing = [i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]]
    if not differing:
        return f"; the student's map has {len(ours)} tokens, the teacher's {len(theirs)}"
    named = ", ".join(
        f"id {i}: student {ours[i]!r}, teacher {theirs[i]!r}" for i in differing[:limit]
    )
    return f"; {len(differing)} ids differ, first {named}"
