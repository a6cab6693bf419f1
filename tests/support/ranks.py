"""Starts `rank_worker` under torchrun and gives back what rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.places import PYTHONPATH, ROOT

FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}


def run_ranks(folder: Path, *, num_ranks: int, **job: Any) -> dict[str, Any]:
    """Run a job; `num_ranks` 0 runs it in one plain process, without a process group."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "result.pt"
    out.unlink(missing_ok=True)
    job_file = folder / "job.json"
    job = {"output_dir": str(folder / "run"), "out": str(out)} | job
    job_file.write_text(json.dumps(job, default=str), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [
        sys.executable,
        *(launcher if num_ranks else []),
        # As a module: run by path, its folder would hide installed packages of the same names.
        *("-m", "tests.support.rank_worker"),
        str(job_file),
    ]
    environment = os.environ | {
        "PYTHONPATH": PYTHONPATH,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = torch.load(out, weights_only=True)
    return result
