"""`student-trainer demo`: a real teacher over gRPC, two FSDP ranks learning from it.

Everything the product does, on one machine without a GPU or a hub: makes teacher and
student from a model in a PyPI wheel, serves the teacher with `teacher-server` in its own
process, trains with the recipe under torchrun, checks that a teacher in process gives
the same loss, and writes `report.json` and `report.png`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30


def run_demo(*, output_dir: Path, config: Path, device: str, overrides: Sequence[str]) -> int:
    """Run the demo and give the exit code of its trainer.

    Args:
        output_dir: models, logs, checkpoints and the report go here.
        config: the recipe.
        device: of teacher and student.
        overrides: flags of `train` that win over the recipe.
    """
    # Nothing here may ask a hub; a cached or shipped file must do.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from student_trainer.demo_models import prepare_demo_teacher, prune_layers

    output_dir.mkdir(parents=True, exist_ok=True)
    teacher = prepare_demo_teacher(output_dir / "teacher")
    student = prune_layers(teacher, output_dir / "student", num_layers_to_drop=10)
    log_path = output_dir / "teacher.log"
    with _teacher_server(teacher, device=device, log_path=log_path) as url:
        arguments = [
            *("--config", str(config)),
            *("--model_name_or_path", str(student)),
            *("--teacher_url", url),
            *("--output_dir", str(output_dir / "run")),
            *("--device", device),
            *overrides,
        ]
        command = [sys.executable, "-m", "student_trainer", "train", *arguments]
        code = subprocess.run(command, check=False).returncode
        if code:
            logger.error("training ended with exit code %d; see the messages above", code)
            return code
        checks = _check_sources(arguments, teacher=teacher)
    run = json.loads((output_dir / "run" / "run.json").read_text(encoding="utf-8"))
    _report(run, checks, output_dir)
    return 0


@contextmanager
def _teacher_server(model: Path, *, device: str, log_path: Path) -> Iterator[str]:
    """Serve a model in its own process while the block runs; give its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "teacher_server", "serve"),
        *("--model", str(model), "--dtype", "float32", "--device", device),
        *("--port", str(port), "--http-port", "0"),
    ]
    # Half the cores: OpenMP threads that wait for a core spin, and the ranks need theirs.
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    environment = {"OMP_NUM_THREADS": threads} | os.environ
    with log_path.open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield f"localhost:{port}"
        finally:
            server.terminate()
            try:
                server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _check_sources(arguments: list[str], *, teacher: Path) -> dict[str, Any]:
    """Send the first micro-batch through a remote and a local teacher and compare."""
    from transformers import AutoTokenizer

    from student_trainer.app import load_data, load_student
    from student_trainer.cli import parse_train_config
    from student_trainer.parity import compare_sources
    from student_trainer.teachers.build import build_teacher

    args, model_args, data_args, _ = parse_train_config(arguments)
    local_arguments = ["--teacher_url", "", "--teacher_model_name_or_path", str(teacher)]
    local_args, *_ = parse_train_config([*arguments, *local_arguments])
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    dataset = load_data(args, data_args, tokenizer, is_training=True)
    remote, local = build_teacher(args), build_teacher(local_args)
    assert remote is not None and local is not None
    try:
        return compare_sources(
            load_student(model_args),
            remote,
            local,
            args=args,
            features=list(dataset.take(args.per_device_train_batch_size)),
            num_tokens=len(tokenizer),
        )
    finally:
        remote.close()


def _report(run: dict[str, Any], checks: dict[str, Any], output_dir: Path) -> None:
    from student_trainer.report import print_report_table, write_report

    history: list[dict[str, Any]] = run["log_history"]
    steps = [entry for entry in history if "kd_loss" in entry]
    evaluations = [entry for entry in history if "eval_kl" in entry]
    supervised = sum(entry["supervised_tokens"] for entry in steps)
    time_s = sum(entry["step_s"] for entry in steps)
    report = {key: run[key] for key in ("world_size", "parallelism", "transport", "steps")}
    report["supervised_tokens"] = int(supervised)
    for name in ("kl", "ce", "top1_agreement"):
        report[f"eval_{name}_before"] = evaluations[0][f"eval_{name}"]
        report[f"eval_{name}_after"] = evaluations[-1][f"eval_{name}"]
    report |= {
        "bytes_per_token": _mean(steps, "teacher_bytes_per_token", weight="supervised_tokens"),
        "dense_bytes_per_token": checks["bytes_per_token_by_codec"]["dense"],
        "bytes_per_token_by_codec": checks["bytes_per_token_by_codec"],
        "teacher_wait_fraction": sum(entry["teacher_wait_s"] for entry in steps) / time_s,
        "train_tokens_per_s": sum(entry["train_tokens_per_s"] * entry["step_s"] for entry in steps)
        / time_s,
        "train_s": time_s,
        "peak_rank_rss_gib": run["peak_rank_rss_gib"],
        "remote_vs_local_loss_abs_diff": checks["loss_abs_diff"],
    }
    path = output_dir / "report.json"
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    write_report(report, history, output_dir / "report.png")
    print_report_table(report)
    print(f"written: {path} and {output_dir / 'report.png'}")


def _mean(entries: list[dict[str, Any]], name: str, *, weight: str) -> float:
    total: float = sum(entry[weight] for entry in entries)
    weighted: float = sum(entry[name] * entry[weight] for entry in entries)
    return weighted / max(total, 1.0)
