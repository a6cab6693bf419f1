"""What encoding costs beside the teacher's forward pass. Needs a GPU.

    python -m tests.bench.encode

A trunk of deepseek-coder-6.7b's shape with random weights runs 4 x 4096 tokens; then its head and
each codec run on the 16,384 hidden states, in the same process. Random weights give flatter
distributions than a trained model, so logits are scaled to the entropy of a real teacher on
code, about 1.5 nats. Reported: everything after the head's product, as a part of the trunk's
forward. Writes out/bench/encode.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from distill_wire.scoring import encode_answer
from distill_wire.types import CodecId, TargetSpec
from tests.bench.material import request_for

OUT = Path("out/bench/encode.json")
VOCAB, WIDTH, ROWS, LENGTH, CHUNK, REPEATS = 32_256, 4096, 4, 4096, 1024, 5


def milliseconds(function: Callable[[], Any]) -> float:
    function()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("tests.bench.encode needs a CUDA device")
    device = torch.device("cuda")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=VOCAB,
        max_position_embeddings=16_384,
    )
    torch.set_default_dtype(torch.bfloat16)
    with device:
        trunk = LlamaModel(config).eval()
    torch.set_default_dtype(torch.float32)
    rows_RT = torch.randint(0, VOCAB, (ROWS, LENGTH))
    on_device = rows_RT.to(device)
    trunk_ms = milliseconds(partial(trunk, input_ids=on_device, use_cache=False))
    request_size = ROWS * (LENGTH - 1)
    hidden_ND = torch.randn(request_size, WIDTH, device=device).bfloat16()
    # A few directions that many tokens share make logits as peaked as a trained model's.
    weight_VD = (torch.randn(VOCAB, WIDTH, device=device) * 3.2 / WIDTH**0.5).bfloat16()

    def head(hidden_nD: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden_nD, weight_VD)

    def product_alone() -> None:
        for chunk_nD in hidden_ND.split(CHUNK):
            head(chunk_nD)

    head_ms = milliseconds(product_alone)
    results: list[dict[str, Any]] = []
    for codec, options in (
        (CodecId.HIDDEN8, {}),
        (CodecId.THRESHOLD, {"num_draws": 50}),
        (CodecId.TOPK, {"top_k": 64}),
    ):
        request = request_for(rows_RT, TargetSpec(codec=codec, **options))

        def encode(request: Any = request) -> dict[str, torch.Tensor]:
            return encode_answer(
                request,
                hidden_ND,
                head=lambda hidden_nD: head(hidden_nD).float(),
                vocab_size=VOCAB,
                chunk_tokens=CHUNK,
            )

        whole_ms = milliseconds(encode)
        num_bytes = sum(tensor.nbytes for tensor in encode().values())
        results.append(
            {
                "codec": codec.name.lower(),
                "options": options,
                "trunk_ms": trunk_ms,
                "head_ms": head_ms,
                "after_head_ms": whole_ms - head_ms,
                "after_head_over_trunk": (whole_ms - head_ms) / trunk_ms,
                "bytes_per_token": num_bytes / request_size,
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
            }
        )
        print(results[-1], flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
