"""One rank of a small run, started by torchrun: `rank_worker.py JOB.json`.

Rank 0 writes the losses of every step and the trained parameters to the job's `out`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from student_trainer import RemoteTeacher
from student_trainer.parallel import leave_together
from tests.support.training import local_teacher, make_args, make_trainer, random_rows


def main(job: dict[str, Any]) -> None:
    args = make_args(Path(job["output_dir"]), **job["args"])
    if url := job.get("url"):
        teacher = remote_teacher(url)
    else:
        teacher = local_teacher(Path(job["teacher"]), is_sharded=args.world_size > 1)
    rows = random_rows(job["lengths"])
    if job.get("emptied_row") is not None:
        rows[job["emptied_row"]]["labels"] = [-100] * len(rows[job["emptied_row"]]["labels"])
    eval_rows = random_rows(job["eval_lengths"], seed=5) if job.get("eval_lengths") else None
    trainer = make_trainer(
        Path(job["student"]),
        teacher,
        args,
        rows,
        eval_rows=eval_rows,
        uses_lora=job.get("uses_lora", True),
        dtype=getattr(torch, job.get("student_dtype", "float32")),
    )
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=resume)
    kinds = sorted({type(parameter).__name__ for parameter in trainer.model.parameters()})
    evaluation = trainer.evaluate() if eval_rows else {}
    parameters = {
        name.replace("_checkpoint_wrapped_module.", ""): whole(parameter)
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    dtypes = {
        "trainable": sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}),
        "frozen": sorted({str(p.dtype) for p in trainer.model.parameters() if not p.requires_grad}),
    }
    trainer.close()
    if trainer.is_world_process_zero():
        steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        result = {
            "steps": steps,
            "evaluation": evaluation,
            "parameters": parameters,
            "kinds": kinds,
            "dtypes": dtypes,
            "distributed_type": str(trainer.accelerator.distributed_type),
        }
        torch.save(result, job["out"])
    leave_together(trainer.accelerator)


def remote_teacher(url: str) -> RemoteTeacher:
    return RemoteTeacher(
        url,
        num_threads=3,
        connect_timeout_s=30,
        ready_timeout_s=60,
        request_timeout_s=60,
        max_outage_s=10,
    )


def whole(parameter: torch.Tensor) -> torch.Tensor:
    detached = parameter.detach()
    return detached.full_tensor().clone() if isinstance(detached, DTensor) else detached.clone()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
