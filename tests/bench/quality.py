"""What each codec does to training. `make bench-quality`; a GPU where there is one.

The demo's student (SmolLM2-135M without 10 of its 30 layers, LoRA r16) is trained from the same
start, on the same rows in the same order, with full logits and with each codec, and then
compared with the teacher on held-out modules. Every target goes through the product's codecs and
objective. Beside them what others send: a renormalised top-k, and random sampling with
replacement (RS-KD, arXiv 2503.16870). Writes out/bench/quality.json after every run.

    python -m tests.bench.quality --steps 200 --seeds 0,1,2 --targets dense,hidden8,threshold:50
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from distill_wire.causal_lm import head_function, split_causal_lm
from distill_wire.head import TeacherHead, head_of
from distill_wire.scoring import encode_answer
from distill_wire.targets import TeacherTarget, decode_target, write_target
from distill_wire.types import CodecId, TargetSpec
from student_trainer.objective import (
    DistillationBatch,
    ObjectiveConfig,
    StudentStates,
    compute_objective,
)
from tests.bench.material import (
    code_rows,
    describe,
    load,
    request_for,
    student_folder,
    teacher_folder,
)

OUT = Path("out/bench/quality.json")
ROWS_PER_STEP, LENGTH, NUM_HELD_OUT = 16, 513, 48
LEARNING_RATE, WARM_UP = 1e-3, 10
CHUNK = 1024


class Bench:
    """A teacher and the rows, once for all runs."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.teacher = load(teacher_folder(), device=device, dtype=self.dtype)
        self.parts = split_causal_lm(self.teacher)
        self.description = describe(self.teacher)
        self.vocab_size = self.description.vocab_size
        self.head = head_of(self.parts, vocab_size=self.vocab_size)
        num_rows = 3200 if device == "cuda" else 64
        self.rows_RT = code_rows(is_held_out=False, num_rows=num_rows, length=LENGTH)
        self.held_out_RT = code_rows(is_held_out=True, num_rows=NUM_HELD_OUT, length=LENGTH)

    @torch.no_grad()
    def target(self, rows_RT: Tensor, name: str, *, seed: int) -> tuple[TeacherTarget, float]:
        """Give the teacher's word on the rows and the bytes a position that it would cost."""
        hidden_ND = (
            self.teacher.model(input_ids=rows_RT.to(self.device), use_cache=False)
            .last_hidden_state[:, :-1]
            .flatten(0, 1)
        )
        kind, _, number = name.partition(":")
        if kind in ("renormalised", "sampled"):
            return self._foreign(hidden_ND, kind, int(number), seed=seed)
        option = {"topk": "top_k", "threshold": "num_draws"}.get(kind)
        options = {option: int(number)} if option else {}
        spec = TargetSpec(codec=CodecId[kind.upper()], seed=seed, **options)
        request = request_for(rows_RT, spec)
        encoded = encode_answer(
            request,
            hidden_ND,
            head=head_function(self.parts, vocab_size=self.vocab_size),
            vocab_size=self.vocab_size,
            chunk_tokens=CHUNK,
        )
        if kind == "dense":
            num_bytes = encoded["logits"][0].nbytes + 4
        else:
            fingerprint = self.description.weights_fingerprint
            num_bytes = len(write_target(encoded, request, weights_fingerprint=fingerprint))
            num_bytes /= len(hidden_ND)
        return decode_target(encoded, request, self.description), num_bytes

    def _foreign(
        self, hidden_ND: Tensor, kind: str, number: int, *, seed: int
    ) -> tuple[TeacherTarget, float]:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        ids, weights, entropies = [], [], []
        head = head_function(self.parts, vocab_size=self.vocab_size)
        for chunk_nD in hidden_ND.split(CHUNK):
            p_nV = head(chunk_nD).softmax(-1)
            entropies.append(torch.special.entr(p_nV).sum(-1))
            if kind == "renormalised":
                kept_nK, ids_nK = p_nV.topk(number)
                weights.append(kept_nK / kept_nK.sum(-1, keepdim=True))
            else:
                ids_nK = torch.multinomial(p_nV, number, replacement=True, generator=generator)
                weights.append(torch.full(ids_nK.shape, 1 / number, device=self.device))
            ids.append(ids_nK)
        token_ids_NK = torch.cat(ids)
        id_bits = (self.vocab_size - 1).bit_length()
        entries = token_ids_NK.sort(-1).values.diff(dim=-1).ne(0).sum(-1).float().mean() + 1
        target = TeacherTarget(
            spec=TargetSpec(codec=CodecId.THRESHOLD, num_draws=max(number, 2)),
            num_positions=len(hidden_ND),
            tensors={
                "token_ids": token_ids_NK,
                "weights": torch.cat(weights),
                "best_ids": token_ids_NK[:, 0],
            },
            entropy_N=torch.cat(entropies),
            gold_logprob_N=torch.zeros(len(hidden_ND), device=self.device),
        )
        # As RS-KD packs them: an id and a count, or an id and a byte of log-probability.
        return target, float(entries) * (id_bits + 8) / 8


def objective(
    student: Any, rows_RT: Tensor, target: TeacherTarget, head: TeacherHead, *, vocab_size: int
) -> dict[str, Tensor]:
    device = next(student.parameters()).device
    causal_lm = student.get_base_model()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden_RTD = causal_lm.model(input_ids=rows_RT.to(device), use_cache=False)
    num_rows, length = rows_RT.shape
    positions_RT = torch.arange(num_rows * length, device=device).view(num_rows, length)
    positions_N = positions_RT[:, :-1].flatten()
    batch = DistillationBatch(
        positions_N=positions_N,
        gold_ids_N=rows_RT[:, 1:].flatten().to(device),
        target=target,
        num_items=len(positions_N),
        config=ObjectiveConfig(
            alpha_kd=1.0,
            alpha_ce=0.0,
            alpha_hidden=0.0,
            hidden_loss="mse",
            layer_map=(),
            beta=0.0,
            chunk_positions=CHUNK,
            vocab_size=vocab_size,
        ),
        teacher_head=head,
    )
    states = StudentStates(last_BTD=hidden_RTD.last_hidden_state.float(), layers={}, projections={})
    return compute_objective(states, split_causal_lm(causal_lm), batch)


@torch.no_grad()
def evaluate(bench: Bench, student: Any) -> dict[str, float]:
    sums = {"kl": 0.0, "ce": 0.0, "top1_agreement": 0.0}
    count = 0
    for rows_RT in bench.held_out_RT.split(8):
        target, _ = bench.target(rows_RT, "dense", seed=0)
        outputs = objective(student, rows_RT, target, bench.head, vocab_size=bench.vocab_size)
        names = zip(sums, ("kd_N", "ce_N", "is_top1_N"), strict=True)
        for name, values in names:
            sums[name] += float(outputs[values].double().sum())
        count += len(outputs["ce_N"])
    return {name: value / count for name, value in sums.items()}


def train(bench: Bench, name: str, *, seed: int, num_steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    folder = student_folder(num_layers_to_drop=10)
    student: Any = get_peft_model(load(folder, device=bench.device.type), lora).train()
    before = evaluate(bench, student)
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(bench.rows_RT), generator=generator)
    start, sizes = time.perf_counter(), []
    for step in range(num_steps):
        warm, decay = min(1.0, (step + 1) / WARM_UP), 1 - 0.95 * step / num_steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * decay
        chosen = order[torch.arange(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP) % len(order)]
        rows_RT = bench.rows_RT[chosen]
        target, num_bytes = bench.target(rows_RT, name, seed=seed * 1_000_003 + step)
        sizes.append(num_bytes)
        outputs = objective(student, rows_RT, target, bench.head, vocab_size=bench.vocab_size)
        outputs["loss"].backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = evaluate(bench, student)
    return {
        "target": name,
        "seed": seed,
        "steps": num_steps,
        "bytes_per_token": sum(sizes) / len(sizes),
        "kl_before": before["kl"],
        "kl": after["kl"],
        "ce": after["ce"],
        "top1_agreement": after["top1_agreement"],
        "seconds": time.perf_counter() - start,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--targets",
        default="dense,hidden8,threshold:50,threshold:25,threshold:12,sampled:50,topk:64,"
        "renormalised:64",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    bench = Bench(options.device)
    results = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in map(int, options.seeds.split(",")):
        for name in options.targets.split(","):
            results.append(train(bench, name, seed=seed, num_steps=options.steps))
            r = results[-1]
            print(
                f"seed {seed}  {name:16s} {r['bytes_per_token']:10.1f} B/token  "
                f"KL {r['kl_before']:.3f} -> {r['kl']:.4f}  CE {r['ce']:.4f}  "
                f"agreement {r['top1_agreement']:.4f}  {r['seconds']:.0f} s",
                flush=True,
            )
            options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
