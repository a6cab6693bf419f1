"""What the codec benchmarks share: a real teacher, a pruned student, real code, and requests."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_wire.causal_lm import split_causal_lm
from distill_wire.handshake import describe_teacher
from distill_wire.types import Limits, ScoreRequest, TargetSpec, TeacherDescription
from student_trainer.demo_models import prepare_demo_teacher, prune_layers
from student_trainer.stdlib_dataset import HELD_OUT_ONE_IN, list_modules

MODELS = Path("out/bench/models")
_NO_LIMIT = 2**31 - 1


def teacher_folder() -> Path:
    return prepare_demo_teacher(MODELS / "teacher")


def student_folder(*, num_layers_to_drop: int) -> Path:
    folder = MODELS / f"student-{num_layers_to_drop}"
    return prune_layers(teacher_folder(), folder, num_layers_to_drop=num_layers_to_drop)


def load(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def drop_layers(model: Any, dropped: tuple[int, ...]) -> Any:
    """Leave layers out of a loaded model, in place."""
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in dropped]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    return model


def code_rows(*, is_held_out: bool, num_rows: int, length: int) -> Tensor:
    """Take source code of the standard library, int64 [num_rows, length].

    Held out are one module in ten, as in the demo's data set. Modules come in an order that mixes
    packages; each that is long enough gives pieces that do not overlap, at most 64, from its
    middle on, so that neither licences nor one file of tables fill the rows.
    """
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder())
    chosen = [
        (zlib.crc32(b"order" + name.encode()), path)
        for name, path in list_modules(Path(sysconfig.get_path("stdlib")))
        if (zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0) == is_held_out
    ]
    pieces_per_module = -(-num_rows // len(chosen)) if is_held_out else 64
    rows: list[Tensor] = []
    for _, path in sorted(chosen):
        text = path.read_text(encoding="utf-8", errors="ignore")
        ids = torch.tensor(tokenizer(text[len(text) // 2 :])["input_ids"], dtype=torch.int64)
        rows += ids.split(length)[: min(pieces_per_module, len(ids) // length)]
        if len(rows) >= num_rows:
            return torch.stack(rows[:num_rows])
    if is_held_out:
        raise ValueError(f"the library gives {len(rows)} rows of {length} tokens, not {num_rows}")
    return torch.stack(rows)


def describe(model: Any) -> TeacherDescription:
    limits = Limits(
        max_request_tokens=_NO_LIMIT,
        max_row_tokens=_NO_LIMIT,
        max_top_k=_NO_LIMIT,
        max_answer_bytes=_NO_LIMIT,
    )
    return describe_teacher(
        model, split_causal_lm(model), token_map=(), model_id="bench", revision=None, limits=limits
    )


def request_for(rows_RT: Tensor, spec: TargetSpec) -> ScoreRequest:
    """Ask for every position of the rows but the last ones."""
    num_rows, length = rows_RT.shape
    mask_RT = np.ones((num_rows, length), np.bool_)
    mask_RT[:, -1] = False
    return ScoreRequest(
        request_id="bench",
        token_ids_T=rows_RT.cpu().numpy().astype(np.int32).ravel(),
        row_lengths_R=np.full(num_rows, length, np.int32),
        position_mask_T=mask_RT.ravel(),
        target=spec,
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A codec with its options, as the results name it."""

    codec: str
    options: dict[str, int]
    spec: TargetSpec
