"""Oracle: what an operator sees: exit codes, one line on stderr, health, readiness."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from distill_wire.convert import request_to_proto
from distill_wire.types import CodecId, TargetSpec
from tests.support.teacher import (
    Client,
    free_port,
    make_request,
    running_teacher,
    teacher_process,
)
from tests.support.tiny_models import make_tiny_llama

SERVICE = "distill_wire.v1.Teacher"


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def health(channel: grpc.Channel, service: str) -> str:
    answer = health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service=service), timeout=10
    )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    with grpc.insecure_channel(url) as channel:
        while time.monotonic() < deadline:
            try:
                if health(channel, SERVICE) == "SERVING":
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.1)
    raise AssertionError(f"no teacher became ready at {url}")


def test_the_control_plane_tells_alive_ready_metrics_and_identity(folder: Path) -> None:
    with running_teacher(folder, dtype="float32") as running, Client(running.url) as client:
        client.score(make_request([[5, 6, 7]], TargetSpec(codec=CodecId.TOPK, top_k=3)))
        alive, ready = get(f"{running.http_url}/healthz"), get(f"{running.http_url}/readyz")
        _, metrics = get(f"{running.http_url}/metrics")
        _, description = get(f"{running.http_url}/v1/describe")

    assert alive == (200, "alive") and ready == (200, "ready")
    assert 'teacher_requests_total{code="OK"} 1.0' in metrics
    assert "teacher_ready 1.0" in metrics
    assert "teacher_tokens_total 3.0" in metrics
    assert 'teacher_model_info{attention_implementation="sdpa"' in metrics
    assert json.loads(description)["codecs"] == ["topk", "dense", "threshold", "hidden8"]


def test_health_and_reflection_speak_for_the_service(folder: Path) -> None:
    with (
        running_teacher(folder, dtype="float32") as running,
        grpc.insecure_channel(running.url) as channel,
    ):
        assert health(channel, "") == "SERVING"
        assert health(channel, SERVICE) == "SERVING"
        assert SERVICE in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_pbr_51_and_66_a_teacher_that_loads_is_alive_but_not_ready(tmp_path: Path) -> None:
    # A folder that never becomes a model: the state between start and failure is "loading".
    folder = make_tiny_llama(tmp_path / "model", seed=1, num_layers=8, hidden_size=256)
    with running_teacher(folder, is_awaited=False, dtype="float32") as running:
        with grpc.insecure_channel(running.url) as channel:
            assert health(channel, "") == "SERVING"
            first = health(channel, SERVICE)
        wait_until_ready(running.url)

    assert first == "NOT_SERVING"


def test_pbr_33_a_checkpoint_that_lacks_weights_is_refused_by_their_names(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_llama(tmp_path / "model", seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["renamed"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with teacher_process("--model", str(folder), "--port", "0", "--http-port", "-1") as server:
        _, errors = server.communicate(timeout=60)

    assert server.returncode == 2
    assert "lacks 1 weights, first model.layers.1.mlp.up_proj.weight" in errors


def test_a_missing_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    with teacher_process("--model", missing, "--port", "0", "--http-port", "-1") as server:
        output, errors = server.communicate(timeout=60)

    assert server.returncode == 2
    assert output == ""
    line = f"teacher-server: {missing} cannot be served: there is no model folder {missing}\n"
    assert errors == line


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_taken_port_is_one_line_and_exit_code_2(folder: Path, flag: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        ports = {"--port": "0", "--http-port": "0"} | {flag: port}
        flags = [word for pair in ports.items() for word in pair]
        with teacher_process("--model", str(folder), *flags) as server:
            _, errors = server.communicate(timeout=60)

    assert server.returncode == 2
    assert errors == (
        f"teacher-server: cannot listen on 127.0.0.1:{port}: Address already in use; "
        f"choose another {flag}\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model is required"),
        (["--model", "x", "--dtype", "int3"], "dtype must be auto, bfloat16, float16 or float32"),
        (["--model", "x", "--wrong-flag", "1"], "unknown arguments --wrong-flag 1"),
        (["--model", "x", "--max-queue-tokens", "10"], "max_queue_tokens (10) must be >="),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(flags: list[str], message: str) -> None:
    with teacher_process(*flags) as server:
        _, errors = server.communicate(timeout=60)

    assert server.returncode == 2
    assert errors.startswith("teacher-server: ") and message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_pbr_63_a_signal_ends_an_idle_teacher_with_exit_code_0(folder: Path, number: int) -> None:
    port = free_port()
    flags = ("--model", str(folder), "--dtype", "float32", "--http-port", "-1")
    with teacher_process(*flags, TEACHER_PORT=str(port)) as server:
        wait_until_ready(f"localhost:{port}")
        server.send_signal(number)
        _, errors = server.communicate(timeout=30)

    assert server.returncode == 0, errors
    assert "Traceback" not in errors


def test_pbr_63_accepted_requests_are_answered_after_sigterm_and_new_ones_refused(
    folder: Path,
) -> None:
    port = free_port()
    # A wait of 3 s for company keeps the first request in the queue when the signal comes.
    flags = ("--model", str(folder), "--dtype", "float32", "--http-port", "-1")
    request = make_request([[5, 6, 7]], TargetSpec(codec=CodecId.TOPK, top_k=3))
    with (
        teacher_process(
            *flags, "--port", str(port), "--max-wait-ms", "3000", "--max-request-tokens", "4096"
        ) as server,
        Client(f"localhost:{port}") as client,
    ):
        wait_until_ready(f"localhost:{port}")
        first = client.stub.Score(request_to_proto(request), timeout=30)
        while client.describe().queue_requests == 0:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        late = None
        while late is None:
            try:
                client.describe()
            except grpc.RpcError as exc:
                late = exc
        chunks = list(first)
        server.communicate(timeout=30)

    assert len(chunks) == 1
    assert late.code() == grpc.StatusCode.UNAVAILABLE
    assert server.returncode == 0


def test_the_health_command_tells_by_its_exit_code(folder: Path) -> None:
    import sys

    command = [sys.executable, "-m", "teacher_server", "health", "--url"]
    with running_teacher(folder, dtype="float32") as running:
        good = subprocess.run([*command, running.url], capture_output=True, text=True, timeout=60)
    port = free_port()
    bad = subprocess.run(
        [*command, f"localhost:{port}"], capture_output=True, text=True, timeout=60
    )

    assert (good.returncode, good.stdout) == (0, f"{running.url}: SERVING\n")
    assert bad.returncode == 1 and f"localhost:{port}: UNAVAILABLE" in bad.stderr
