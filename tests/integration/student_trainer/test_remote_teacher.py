"""Oracle: the same teacher in this process. A real server, real sockets, real trainers."""

from __future__ import annotations

import dataclasses
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health, health_pb2_grpc

from distill_wire.errors import (
    IdentityMismatch,
    RequestInvalid,
    TeacherNotReady,
    TeacherUnreachable,
    VersionMismatch,
)
from distill_wire.types import CodecId, TargetSpec
from student_trainer import RemoteTeacher
from tests.support.teacher import free_port, make_request, running_teacher
from tests.support.tiny_models import make_number_tokenizer, make_tiny_llama
from tests.support.training import (
    first_gradients,
    local_teacher,
    make_args,
    make_trainer,
    random_rows,
)

TOPK = TargetSpec(codec=CodecId.TOPK, top_k=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_llama(folder / "teacher", seed=1), make_tiny_llama(folder / "student", seed=2)


@pytest.fixture(scope="module")
def url(models: tuple[Path, Path]) -> Iterator[str]:
    with running_teacher(models[0], dtype="float32") as running:
        yield running.url


def remote(url: str, **overrides: Any) -> RemoteTeacher:
    options = {
        "connect_timeout_s": 20,
        "ready_timeout_s": 60,
        "request_timeout_s": 30,
        "max_outage_s": 5,
    }
    return RemoteTeacher(url, **(options | overrides))


@pytest.mark.parametrize("codec", ["topk", "dense"])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_pbr_16_remote_and_local_teachers_give_equal_losses_and_gradients(
    models: tuple[Path, Path], url: str, tmp_path: Path, codec: str, num_micro_batches: int
) -> None:
    teacher, student = models
    rows = random_rows([9, 30, 5, 20])
    args = make_args(tmp_path, teacher_codec=codec, temperature=2.0, alpha_ce=0.3)
    here = make_trainer(student, local_teacher(teacher), args, rows)
    there = make_trainer(student, remote(url), args, rows)

    expected = first_gradients(here, rows, num_micro_batches=num_micro_batches)
    found = first_gradients(there, rows, num_micro_batches=num_micro_batches)
    there.close()

    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_overlapped_loop_trains_as_the_plain_loop(
    models: tuple[Path, Path], url: str, tmp_path: Path, depth: int
) -> None:
    rows = random_rows([9, 30, 5, 20, 12, 7, 16, 11])
    histories, weights = [], []
    for prefetch in (0, depth):
        args = make_args(
            tmp_path,
            teacher_prefetch=prefetch,
            max_steps=6,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=1,
        )
        trainer = make_trainer(models[1], remote(url, num_threads=depth + 1), args, rows)
        trainer.train()
        trainer.close()
        steps = [entry for entry in trainer.state.log_history if "kd_loss" in entry]
        histories.append([(entry["loss"], entry["kd_loss"]) for entry in steps])
        weights.append([p.detach().clone() for p in trainer.model.parameters() if p.requires_grad])

    torch.testing.assert_close(torch.tensor(histories[1]), torch.tensor(histories[0]))
    for overlapped, plain in zip(weights[1], weights[0], strict=True):
        torch.testing.assert_close(overlapped, plain, rtol=1e-4, atol=1e-5)


def test_a_step_logs_what_the_teacher_cost(
    models: tuple[Path, Path], url: str, tmp_path: Path
) -> None:
    rows = random_rows([9, 30])
    trainer = make_trainer(models[1], remote(url), make_args(tmp_path, max_steps=2), rows)
    trainer.train()
    trainer.close()

    step = next(entry for entry in trainer.state.log_history if "kd_loss" in entry)
    supervised = step["supervised_tokens"]
    per_token = (step["teacher_bytes_per_token"] * supervised - 8 * 8 * supervised) / supervised
    assert 0 <= step["teacher_wait_fraction"] <= 1
    assert per_token > 12  # tail, entropy, gold log-probability, and the frame's header
    assert step["teacher_forward_s"] > 0 and step["teacher_encode_s"] > 0
    assert step["train_tokens_per_s"] > 0


def test_pbr_49_the_trainer_names_the_sample_whose_row_is_refused(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = random_rows([9, 60])
    with running_teacher(models[0], dtype="float32", max_model_len=40) as running:
        args = make_args(tmp_path, per_device_train_batch_size=2)
        trainer = make_trainer(models[1], remote(running.url), args, rows)
        with pytest.raises(RequestInvalid) as refused:
            trainer.train()
        trainer.close()

    message = str(refused.value)
    assert "has 60 tokens, limit 40" in message
    row = message.split("row ")[1][0]
    assert f"row {row} is sample sample-1" in message


def test_pbr_51_without_a_teacher_it_ends_in_time_and_names_the_url() -> None:
    url = f"localhost:{free_port()}"
    start = time.monotonic()

    with pytest.raises(TeacherUnreachable) as ended:
        remote(url, connect_timeout_s=1.5).connect()

    assert time.monotonic() - start < 10
    assert f"no teacher answered at {url} within 1.5 s" in str(ended.value)


def test_pbr_51_a_teacher_that_comes_later_is_waited_for(models: tuple[Path, Path]) -> None:
    port = free_port()
    started: list[Any] = []
    source = remote(f"localhost:{port}", connect_timeout_s=60)
    waiter = threading.Thread(target=lambda: started.append(source.connect()))
    waiter.start()

    with running_teacher(models[0], dtype="float32", port=port):
        waiter.join(60)
        source.close()

    assert started and started[0].vocab_size == 64


def test_pbr_51_a_teacher_that_loads_for_too_long_is_named(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "slow", seed=1, num_layers=8, hidden_size=256)
    with running_teacher(folder, is_awaited=False, dtype="float32") as running:
        with pytest.raises(TeacherNotReady, match="is not ready after 0 s"):
            remote(running.url, ready_timeout_s=0).connect()


def test_pbr_51_another_grpc_service_on_the_port_is_refused_at_once() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("localhost:0")
    server.start()

    with pytest.raises(VersionMismatch, match=f"localhost:{port} answers gRPC but serves no"):
        remote(f"localhost:{port}").connect()

    server.stop(None)


def test_pbr_51_a_web_server_on_the_port_ends_in_time_and_is_named() -> None:
    server = http.server.HTTPServer(("localhost", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"localhost:{server.server_port}"

    with pytest.raises(TeacherUnreachable, match=f"no teacher answered at {url}"):
        remote(url, connect_timeout_s=1).connect()

    server.shutdown()
    server.server_close()
    thread.join()


def test_a_silent_port_ends_in_time_and_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        silent.listen()
        url = f"localhost:{silent.getsockname()[1]}"

        with pytest.raises(TeacherUnreachable, match=f"no teacher answered at {url}"):
            remote(url, connect_timeout_s=1).connect()


def test_pbr_21_a_token_map_with_two_ids_swapped_is_refused_by_the_first_ids(
    models: tuple[Path, Path], url: str, tmp_path: Path
) -> None:
    student = make_tiny_llama(tmp_path / "student", seed=2)
    make_number_tokenizer(64, swapped=(10, 40)).save_pretrained(student)

    with pytest.raises(IdentityMismatch) as refused:
        make_trainer(student, remote(url), make_args(tmp_path), random_rows([9]))

    assert "2 ids differ, first id 10: student 'w40', teacher 'w10'" in str(refused.value)


def test_pbr_21_a_vocabulary_of_another_size_is_refused_with_both(url: str, tmp_path: Path) -> None:
    student = make_tiny_llama(tmp_path / "student", seed=2, vocab_size=60)

    with pytest.raises(IdentityMismatch, match="has a vocabulary of 64 tokens, the student has 60"):
        make_trainer(student, remote(url), make_args(tmp_path), random_rows([9], vocab_size=60))


def test_pbr_16_an_answer_of_another_length_is_refused_by_sample(
    models: tuple[Path, Path], url: str, tmp_path: Path
) -> None:
    """One side alone truncates: the teacher sees a row, the student the row cut."""
    rows = random_rows([30])
    trainer = make_trainer(models[1], remote(url), make_args(tmp_path), rows)
    batch = trainer.data_collator([{**rows[0]}])
    cut = trainer.data_collator(
        [{key: rows[0][key][:12] if key != "sample_id" else "sample-0" for key in rows[0]}]
    )
    (prepared,), num_items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    for name in ("input_ids", "attention_mask", "positions", "gold_ids", "position_rows", "rows"):
        prepared[name] = cut[name]

    with pytest.raises(ValueError, match=r"answered 20 positions.*has 2: samples sample-0"):
        trainer.training_step(trainer.model, prepared, num_items)
    trainer.close()


def test_other_weights_behind_the_url_are_refused_in_mid_run(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=9)
    port = free_port()
    source = remote(f"localhost:{port}")
    request = make_request([[5, 6, 7]], TOPK)
    with running_teacher(models[0], dtype="float32", port=port):
        source.connect()
        source.submit(request, sample_ids=("a",)).result(30)
    with running_teacher(other, dtype="float32", port=port):
        with pytest.raises(IdentityMismatch, match="expects weights"):
            source.submit(request, sample_ids=("a",)).result(30)
    source.close()


def test_a_teacher_that_restarts_is_waited_for_and_nothing_is_lost(
    models: tuple[Path, Path],
) -> None:
    port = free_port()
    source = remote(f"localhost:{port}", max_outage_s=60)
    request = make_request([[5, 6, 7]], TOPK)
    with running_teacher(models[0], dtype="float32", port=port):
        source.connect()
        first = source.submit(request, sample_ids=("a",)).result(30)
    pending = source.submit(dataclasses.replace(request, request_id="b"), sample_ids=("a",))
    with running_teacher(models[0], dtype="float32", port=port):
        second = pending.result(60)
    source.close()

    for name, tensor in first.target.tensors.items():
        torch.testing.assert_close(second.target.tensors[name], tensor, rtol=0, atol=0)


def test_an_outage_longer_than_allowed_ends_with_the_samples_names(
    models: tuple[Path, Path],
) -> None:
    source = remote("unused", max_outage_s=0.5)
    with running_teacher(models[0], dtype="float32") as running:
        source.url = running.url
        source.connect()
    pending = source.submit(make_request([[5, 6, 7]], TOPK), sample_ids=("sample-7",))

    with pytest.raises(TeacherUnreachable, match="row 0 is sample sample-7"):
        pending.result(60)
    source.close()


def test_closing_ends_what_is_under_way(models: tuple[Path, Path]) -> None:
    with running_teacher(models[0], dtype="float32", max_wait_ms=20_000) as running:
        source = remote(running.url, max_outage_s=60)
        source.connect()
        request = make_request([np.arange(3, 60).tolist()], TOPK)
        pending = source.submit(request, sample_ids=("a",))
        start = time.monotonic()
        source.close()

    assert pending.done()
    assert time.monotonic() - start < 25
