"""What each codec costs and loses on a real teacher and real code. `make bench-codecs`.

SmolLM2-135M, 1,024 positions of held-out standard-library modules; the student is the teacher
without 6 of its 30 layers. The reference is the forward KL's gradient from full logits in
float64. Errors are of the gradient with respect to the student's logits, and of the output
head's, summed over the positions. Writes out/bench/codecs.json and prints a table.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill_wire.causal_lm import head_function, split_causal_lm
from distill_wire.codecs.hidden import encode_states, restore_states
from distill_wire.head import head_of
from distill_wire.scoring import encode_answer
from distill_wire.targets import TeacherTarget, read_target, write_target
from distill_wire.types import CodecId, StateCodecId, TargetSpec
from student_trainer.teacher_term import divergence_of
from tests.bench.material import (
    Variant,
    code_rows,
    describe,
    drop_layers,
    load,
    request_for,
    teacher_folder,
)

OUT = Path("out/bench/codecs.json")
NUM_ROWS, LENGTH, REPEATS = 4, 257, 3
DROPPED = (10, 13, 16, 19, 22, 25)


def variants() -> list[Variant]:
    def make(codec: CodecId, **options: int) -> Variant:
        return Variant(
            codec=codec.name.lower(), options=options, spec=TargetSpec(codec=codec, **options)
        )

    return [
        *(make(CodecId.THRESHOLD, num_draws=n) for n in (12, 25, 50, 100, 200)),
        *(make(CodecId.TOPK, top_k=k) for k in (16, 64)),
        make(CodecId.HIDDEN8),
        make(CodecId.DENSE),
    ]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    teacher, student = load(teacher_folder()), drop_layers(load(teacher_folder()), DROPPED)
    rows_RT = code_rows(is_held_out=True, num_rows=NUM_ROWS, length=LENGTH)
    parts, description = split_causal_lm(teacher), describe(teacher)
    run = head_function(parts, vocab_size=description.vocab_size)
    output = teacher.model(input_ids=rows_RT, use_cache=False, output_hidden_states=True)
    hidden_ND = output.last_hidden_state[:, :-1].flatten(0, 1)
    student_ND = student.model(input_ids=rows_RT).last_hidden_state[:, :-1].flatten(0, 1)
    logits_NV, student_NV = run(hidden_ND), student.lm_head(student_ND)
    log_p = logits_NV.double().log_softmax(-1)
    exact_NV = student_NV.double().softmax(-1) - log_p.exp()
    exact_VD = exact_NV.T @ student_ND.double()
    head = head_of(parts, vocab_size=description.vocab_size)

    results: list[dict[str, Any]] = []
    for variant in variants():
        request = request_for(rows_RT, variant.spec)
        encoded, encode_s = _timed(
            lambda request=request: encode_answer(
                request, hidden_ND, head=_Replay(logits_NV), vocab_size=description.vocab_size
            )
        )
        frame = bytes(
            write_target(encoded, request, weights_fingerprint=description.weights_fingerprint)
        )
        target, decode_s = _timed(
            lambda frame=frame, request=request: read_target(frame, request, description)
        )
        gradient_NV = _gradient(student_NV, target, head)
        head_VD = gradient_NV.T @ student_ND.double()
        results.append(
            {
                "codec": variant.codec,
                "options": variant.options,
                "bytes_per_token": len(frame) / len(hidden_ND),
                "kl": _reconstruction_kl(log_p, target, head),
                "token_grad_rel_err": float((gradient_NV - exact_NV).norm() / exact_NV.norm()),
                "head_grad_angle_deg": _angle(head_VD, exact_VD),
                "head_grad_norm_ratio": float(head_VD.norm() / exact_VD.norm()),
                "encode_tokens_per_s": len(hidden_ND) / encode_s,
                "decode_tokens_per_s": len(hidden_ND) / decode_s,
            }
        )
        print(_line(results[-1]), flush=True)
    for codec in StateCodecId:
        results.append(_state_result(codec, output.hidden_states[20].flatten(0, 1)))
        print(_line(results[-1]), flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"written: {OUT}")


class _Replay:
    """A head whose product was taken before, so that only what follows it is timed."""

    def __init__(self, logits_NV: Tensor) -> None:
        self._logits_NV = logits_NV
        self._start = 0

    def __call__(self, hidden_nD: Tensor) -> Tensor:
        start, self._start = self._start, self._start + len(hidden_nD)
        return self._logits_NV[start : self._start]


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, sorted(seconds)[REPEATS // 2]


def _gradient(student_NV: Tensor, target: TeacherTarget, head: Any) -> Tensor:
    parts = []
    for start in range(0, len(student_NV), 256):
        rows = slice(start, start + 256)
        with torch.enable_grad():
            logits_nV = student_NV[rows].detach().requires_grad_()
            divergence_n, _ = divergence_of(logits_nV, target, rows, beta=0.0, teacher_head=head)
            parts.append(torch.autograd.grad(divergence_n.sum(), logits_nV)[0].double())
    return torch.cat(parts)


def _reconstruction_kl(log_p: Tensor, target: TeacherTarget, head: Any) -> float | None:
    tensors = target.tensors
    if target.spec.codec is CodecId.DENSE:
        logits_NV = tensors["logits"].float()
    elif target.spec.codec is CodecId.HIDDEN8:
        width = tensors["hidden"].shape[-1]
        states_ND = restore_states(tensors["hidden"], tensors["hidden_scale"], width=width)
        logits_NV = head.logits(states_ND)
    else:
        return None
    log_q = logits_NV.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def _state_result(codec: StateCodecId, states_ND: Tensor) -> dict[str, Any]:
    encoded, encode_s = _timed(lambda: encode_states(states_ND, codec, name="x"))
    found, decode_s = _timed(
        lambda: restore_states(encoded["x"], encoded["x_scale"], width=states_ND.shape[-1])
    )
    return {
        "codec": codec.name.lower(),
        "options": {"hidden_layers": 20},
        "bytes_per_token": sum(tensor.nbytes for tensor in encoded.values()) / len(states_ND),
        "kl": None,
        "token_grad_rel_err": None,
        "head_grad_angle_deg": None,
        "head_grad_norm_ratio": None,
        "state_rel_err": float((found - states_ND).norm() / states_ND.norm()),
        "state_cosine": float(F.cosine_similarity(found, states_ND).mean()),
        "encode_tokens_per_s": len(states_ND) / encode_s,
        "decode_tokens_per_s": len(states_ND) / decode_s,
    }


def _angle(found: Tensor, exact: Tensor) -> float:
    cosine = F.cosine_similarity(found.flatten(), exact.flatten(), 0)
    return math.degrees(math.acos(min(1.0, float(cosine))))


def _line(result: dict[str, Any]) -> str:
    def shown(name: str, form: str) -> str:
        value = result.get(name)
        return "-" if value is None else format(value, form)

    options = " ".join(f"{name}={value}" for name, value in result["options"].items())
    return (
        f"{result['codec']:10s} {options:16s} {result['bytes_per_token']:10.1f} B/token  "
        f"KL {shown('kl', '.1e'):>8s}  gradient error {shown('token_grad_rel_err', '.4f'):>7s}  "
        f"angle {shown('head_grad_angle_deg', '.2f'):>6s}  "
        f"norm {shown('head_grad_norm_ratio', '.3f'):>6s}  "
        f"encode {result['encode_tokens_per_s']:10,.0f}/s  "
        f"decode {result['decode_tokens_per_s']:12,.0f}/s"
    )


if __name__ == "__main__":
    main()
