"""Which layers are compared, and the projections between widths that differ.

A projection is trained with the student and belongs to the run, not to the student: it is left out
of what is exported and kept in its own file of a checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from distill_wire.causal_lm import base_causal_lm

ATTRIBUTE = "hidden_projections"
FILE = "hidden_projections.safetensors"

LayerMap = tuple[tuple[int, int], ...]


def parse_layer_map(text: str) -> tuple[tuple[int, int | None], ...]:
    """Read `16`, `8,16` or `8:5,16:10`: teacher layers, with the student's after a colon.

    Raises:
        ValueError: the text is something else.
    """
    pairs: list[tuple[int, int | None]] = []
    for part in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", part, re.ASCII)
        if match is None:
            raise ValueError(
                f"hidden_layers holds {part!r}, expected teacher layers such as 8,16 or pairs "
                f"of teacher and student layers such as 8:5,16:10"
            )
        pairs.append((int(match[1]), int(match[2]) if match[2] else None))
    if len({teacher for teacher, _ in pairs}) != len(pairs):
        raise ValueError(f"hidden_layers {text!r} names a teacher layer twice")
    return tuple(pairs)


def layer_map(text: str, *, num_teacher_layers: int, num_student_layers: int) -> LayerMap:
    """Pair teacher and student layers; 0 is the embedding output, the last is after the norm.

    A layer without a partner gets the one at the same part of the depth. "" means one layer at
    two thirds of the teacher's depth: upper-middle layers teach more than the last one
    (Wang et al. 2021, MiniLMv2, arXiv 2012.15828).

    Raises:
        ValueError: a layer does not exist.
    """
    pairs = parse_layer_map(text) or ((round(num_teacher_layers * 2 / 3), None),)
    found = tuple(
        (
            teacher,
            round(teacher * num_student_layers / num_teacher_layers)
            if student is None
            else student,
        )
        for teacher, student in pairs
    )
    for teacher, student in found:
        if teacher > num_teacher_layers or student > num_student_layers:
            raise ValueError(
                f"hidden_layers pairs teacher layer {teacher} with student layer {student}; the "
                f"teacher has layers 0..{num_teacher_layers}, the student 0..{num_student_layers}"
            )
    return found


def add_projections(model: Any, pairs: LayerMap, *, teacher_width: int) -> None:
    """Give the student a trainable projection for each layer, if its width differs."""
    causal_lm = base_causal_lm(model)
    width = causal_lm.config.get_text_config().hidden_size
    if width == teacher_width:
        return
    parameter = next(causal_lm.parameters())
    # fp32 like adapters: small, trained, and never cast with a frozen bf16 base.
    layers = {
        str(student): nn.Linear(width, teacher_width, bias=False, device=parameter.device)
        for student in sorted({student for _, student in pairs})
    }
    setattr(causal_lm, ATTRIBUTE, nn.ModuleDict(layers))


def projections_of(causal_lm: nn.Module) -> dict[int, nn.Linear]:
    """Give the projections by student layer; none if the widths are equal."""
    found: dict[int, nn.Linear] = {}
    for name, module in getattr(causal_lm, ATTRIBUTE, nn.ModuleDict()).items():
        assert isinstance(module, nn.Linear)
        found[int(name)] = module
    return found


def has_projections(model: nn.Module) -> bool:
    """Whether `add_projections` added any."""
    return bool(_projections(model))


def save_projections(model: Any, folder: Path, *, is_writer: bool) -> None:
    """Write the projections, if there are any. A collective: every rank calls it."""
    found = _projections(model)
    tensors = {name: _whole(parameter.detach()) for name, parameter in found.items()}
    if tensors and is_writer:
        save_file(tensors, folder / FILE)


def load_projections(model: Any, folder: Path) -> None:
    """Read the projections back, sharded or not.

    Raises:
        FileNotFoundError: the student has projections, the checkpoint has none.
    """
    found = _projections(model)
    if not found:
        return
    if not (folder / FILE).is_file():
        raise FileNotFoundError(
            f"checkpoint {folder} has no {FILE}; it was written by a run without hidden projections"
        )
    saved = load_file(folder / FILE)
    with torch.no_grad():
        for name, parameter in found.items():
            tensor = saved[name].to(parameter.device)
            if isinstance(parameter, DTensor):
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            parameter.copy_(tensor)


def without_projections(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Drop the projections from a state dict that is to be exported."""
    return {name: tensor for name, tensor in state_dict.items() if ATTRIBUTE not in name}


def _projections(model: Any) -> dict[str, nn.Parameter]:
    return {
        name[name.index(ATTRIBUTE) :]: parameter
        for name, parameter in model.named_parameters()
        if ATTRIBUTE in name
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().contiguous()
