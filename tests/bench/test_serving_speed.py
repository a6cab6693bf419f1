"""Served tokens/s against a bare forward of the same model, same device, same run.

The ceiling is the trunk on the same rows, one padded batch after the other, with no
server around it. Writes out/bench/serving.json. The number is the ratio: absolute
figures depend on the machine and on what else runs there.

    make bench                                  SmolLM2 on the CPU, as the demo serves it
    BENCH_MODEL=... BENCH_DEVICE=cuda BENCH_DTYPE=bfloat16 make bench
"""

from __future__ import annotations

import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distill_wire.types import CodecId, TargetSpec
from tests.support.teacher import Client, make_request, running_teacher

OUT = Path("out/bench/serving.json")
NUM_REQUESTS, ROWS, LENGTH, NUM_CLIENTS, REPEATS = 4, 4, 256, 2, 3


@pytest.mark.bench
@pytest.mark.timeout(900)
def test_served_tokens_against_a_bare_forward() -> None:
    device = os.environ.get("BENCH_DEVICE", "cpu")
    dtype = os.environ.get("BENCH_DTYPE", "float32")
    folder = _model_folder()
    torch.manual_seed(0)
    rows = torch.randint(3, 10_000, (NUM_REQUESTS, ROWS, LENGTH))
    tokens = rows.numel()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    bare_s = statistics.median(_time_bare(model.base_model, rows, device) for _ in range(REPEATS))
    del model
    with running_teacher(folder, dtype=dtype, device=device) as running:
        served_s = statistics.median(_time_served(running.url, rows) for _ in range(REPEATS))

    result = {
        "model": folder.name,
        "device": device,
        "dtype": dtype,
        "tokens": tokens,
        "bare_forward_tokens_per_s": tokens / bare_s,
        "served_tokens_per_s": tokens / served_s,
        "served_over_bare": bare_s / served_s,
        "command": "make bench",
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))


def _model_folder() -> Path:
    if "BENCH_MODEL" in os.environ:
        return Path(os.environ["BENCH_MODEL"])
    from student_trainer.demo_models import prepare_demo_teacher

    return prepare_demo_teacher(Path("out/demo/teacher"))


@torch.inference_mode()
def _time_bare(trunk: torch.nn.Module, rows: torch.Tensor, device: str) -> float:
    start = time.perf_counter()
    for batch in rows:
        trunk(input_ids=batch.to(device), use_cache=False)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _time_served(url: str, rows: torch.Tensor) -> float:
    spec = TargetSpec(codec=CodecId.TOPK, top_k=64)
    # A quarter of the positions is supervised, as in data with prompts.
    mask = [index >= 3 * LENGTH // 4 for index in range(LENGTH - 1)] + [False]
    requests = [make_request(batch.tolist(), spec, masks=[mask] * ROWS) for batch in rows]
    with Client(url) as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        start = time.perf_counter()
        list(pool.map(client.score, requests))
        return time.perf_counter() - start
