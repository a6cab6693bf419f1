"""Oracle: the same weights run directly, one row at a time, in float64.

A real server on a socket, a plain client of the wire.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distill_wire.convert import request_to_proto
from distill_wire.types import CodecId, ScoreRequest, TargetSpec
from distill_wire.v1 import teacher_pb2 as pb
from tests.support.oracle import exact_logprobs
from tests.support.teacher import Client, RunningTeacher, make_request, running_teacher
from tests.support.tiny_models import make_number_tokenizer, make_tiny_llama

TOPK = TargetSpec(codec=CodecId.TOPK, top_k=5)
DENSE = TargetSpec(codec=CodecId.DENSE)
ROWS = [[5, 9, 11, 3], list(range(3, 40)), [7, 8]]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_pbr_10_top_k_carries_full_vocabulary_logprobs_at_the_temperature_asked_for(
    client: Client, folder: Path, temperature: float
) -> None:
    spec = TargetSpec(codec=CodecId.TOPK, top_k=5, temperature=temperature)

    target, _ = client.score(make_request(ROWS, spec))

    exact = torch.cat([exact_logprobs(folder, row, temperature) for row in ROWS])
    ids = target.tensors["token_ids"]
    found, tail = target.tensors["logprobs"].double(), target.tensors["tail_logprob"].double()
    # Values travel as 254 steps of their range, sums and statistics as float16.
    kept = exact.gather(-1, ids)
    step = float((kept.amax(-1) - kept.amin(-1)).max()) / 254
    torch.testing.assert_close(found, kept, rtol=0, atol=2.1 * step + 1e-3)
    torch.testing.assert_close(ids, exact.topk(5).indices.sort(-1).values)
    rest = exact.scatter(-1, ids, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(tail, rest, rtol=2**-10, atol=2.1 * step + 1e-3)
    entropy = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(target.entropy_N.double(), entropy, rtol=2**-11, atol=1e-5)


def test_only_wanted_positions_are_answered_and_each_is_about_the_next_token(
    client: Client, folder: Path
) -> None:
    row = [5, 9, 11, 3, 20, 21]
    mask = [False, True, False, False, True, False]

    target, _ = client.score(make_request([row], TOPK, masks=[mask]))

    exact = exact_logprobs(folder, row)
    assert target.num_positions == 2
    gold = torch.stack([exact[1, 11], exact[4, 21]])
    torch.testing.assert_close(target.gold_logprob_N.double(), gold, rtol=2**-11, atol=1e-5)


def test_pbr_50_a_row_alone_equals_the_row_in_any_batch(client: Client) -> None:
    together, _ = client.score(make_request(ROWS, TOPK))

    start = 0
    for row in ROWS:
        alone, _ = client.score(make_request([row], TOPK))
        part = slice(start, start + len(row) - 1)
        start = part.stop
        for name in ("logprobs", "tail_logprob"):
            found = together.tensors[name][part]
            torch.testing.assert_close(found, alone.tensors[name], rtol=0, atol=1e-5)


def test_requests_of_many_clients_with_mixed_codecs_get_their_own_answers(
    teacher: RunningTeacher, folder: Path
) -> None:
    def ask(index: int) -> tuple[int, Any]:
        spec = (TOPK, DENSE, TargetSpec(codec=CodecId.TOPK, top_k=3, temperature=2.0))[index % 3]
        rows = [[index + 3, index + 4, 5 + index % 20], [9, index + 3]]
        with Client(teacher.url) as own:
            return index, own.score(make_request(rows, spec, request_id=f"r{index}"))[0]

    with ThreadPoolExecutor(8) as pool:
        answers = dict(pool.map(ask, range(24)))

    for index, target in answers.items():
        rows = [[index + 3, index + 4, 5 + index % 20], [9, index + 3]]
        exact = torch.cat([exact_logprobs(folder, row) for row in rows])
        gold = torch.tensor([token for row in rows for token in row[1:]])
        expected = exact.gather(-1, gold[:, None]).squeeze(-1)
        torch.testing.assert_close(target.gold_logprob_N.double(), expected, rtol=2**-11, atol=1e-5)


def test_an_answer_tells_where_its_time_went(client: Client) -> None:
    _, timings = client.score(make_request(ROWS, TOPK))

    assert timings.batch_tokens >= 43 and timings.batch_requests >= 1
    assert timings.forward_s > 0 and timings.encode_s > 0 and timings.queue_s >= 0


def test_pbr_34_the_same_request_twice_gives_the_same_bits(client: Client) -> None:
    first, _ = client.score(make_request(ROWS, DENSE))
    second, _ = client.score(make_request(ROWS, DENSE))

    assert torch.equal(first.tensors["logits"], second.tensors["logits"])


def good(request_id: str = "good") -> pb.ScoreRequest:
    return request_to_proto(make_request([[5, 6, 7]], TOPK, request_id=request_id))


def change(**fields: Any) -> pb.ScoreRequest:
    message = good("bad")
    for name, value in fields.items():
        if name == "row_lengths":
            del message.row_lengths[:]
            message.row_lengths.extend(value)
        elif name in ("codec", "top_k", "temperature"):
            setattr(message.target, name, value)
        elif name == "hidden_layers":
            message.target.hidden_layers.extend(value)
        else:
            setattr(message, name, value)
    return message


def as_ids(*ids: int) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=token < 0) for token in ids)


BAD_REQUESTS = {
    "id_of_the_vocabulary_size": (
        change(token_ids=as_ids(5, 64, 7)),
        "row 0 of request bad holds token id 64 at position 1, this teacher has ids 0..63",
    ),
    "negative_id": (change(token_ids=as_ids(5, -1, 7)), "holds token id -1 at position 1"),
    "id_of_2_to_31": (change(token_ids=as_ids(5, 2**31, 7)), "at position 1, this teacher has ids"),
    "no_rows": (change(token_ids=b"", row_lengths=[], position_mask=b""), "holds no rows"),
    "empty_row": (change(row_lengths=[0, 3]), "row 0 of request bad is empty"),
    "lengths_that_do_not_add_up": (change(row_lengths=[5]), "row lengths add up to 5"),
    "mask_of_another_length": (change(position_mask=b"\x01\x01"), "3 tokens need 1"),
    "last_position_wanted": (change(position_mask=b"\x04"), "asks for its last position 2"),
    "row_longer_than_the_positions": (
        request_to_proto(make_request([[5, 6], [5] * 129], TOPK, request_id="bad")),
        "row 1 of request bad has 129 tokens, limit 128",
    ),
    "unknown_codec": (change(codec=77), "codec 77 is unknown here; this side knows topk"),
    "unset_codec": (change(codec=0), "codec 0 is unknown"),
    "k_of_the_vocabulary_size": (change(top_k=64), "top_k 64, limit 63"),
    "k_of_zero": (change(top_k=0), "needs top_k >= 1"),
    "layer_beyond_the_last": (
        change(hidden_layers=[3]),
        "hidden layer 3, this teacher has layers 0..2",
    ),
    "temperature_of_zero": (change(temperature=0.0), "temperature must be a finite number > 0"),
    "temperature_nan": (change(temperature=float("nan")), "temperature must be a finite number"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_pbr_49_a_bad_request_is_refused_by_name_and_the_next_good_one_works(
    client: Client, name: str
) -> None:
    message, expected = BAD_REQUESTS[name]

    error = client.refusal(message)

    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert expected in error.details()
    assert len(list(client.stub.Score(good(), timeout=30))) == 1


def test_another_wire_version_is_refused_with_both(client: Client) -> None:
    error = client.refusal(change(wire_version=7))

    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "the client speaks wire version 7, this side speaks 1" in error.details()


def test_other_weights_than_expected_are_refused_with_both(client: Client) -> None:
    error = client.refusal(change(expected_weights_fingerprint="f00d"))

    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "expects weights f00d, this teacher has" in error.details()


def test_pbr_17_and_23_nan_weights_never_become_ready(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "nan", seed=1)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(folder)

    with running_teacher(folder, is_awaited=False, dtype="float32") as running:
        fault = _fault_of(running)

    assert "differs from its own logits" in str(fault) or "not finite" in str(fault)


def _fault_of(running: RunningTeacher) -> BaseException:
    import asyncio

    app = running.app

    async def wait() -> BaseException:
        return await asyncio.wait_for(asyncio.shield(app.failed), 30)

    return asyncio.run_coroutine_threadsafe(wait(), app._loop).result(40)


def test_pbr_17_a_nan_of_one_token_fails_its_request_by_row_and_no_other(
    tmp_path: Path,
) -> None:
    folder = make_tiny_llama(tmp_path / "nan", seed=1, is_tied=False)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    model.save_pretrained(folder)

    with running_teacher(folder, dtype="float32") as running, Client(running.url) as client:
        poisoned = make_request([[5, 6, 7], [9, 50, 10, 11]], TOPK, request_id="poisoned")
        error = client.refusal(request_to_proto(poisoned))
        target, _ = client.score(make_request([[5, 6, 7]], TOPK))

    assert error.code() == grpc.StatusCode.INTERNAL
    # Attention weighs the NaN with zero for the position before it, and 0 * NaN is NaN.
    assert "first at position 0 of row 1; nothing was sent" in error.details()
    assert target.tensors["logprobs"].isfinite().all()


def test_pbr_53_a_32_mib_answer_arrives_whole_with_default_settings(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4097,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    make_number_tokenizer(4096).save_pretrained(tmp_path)
    row = torch.randint(0, 4096, (4097,)).tolist()

    with (
        running_teacher(tmp_path, dtype="float32", max_answer_bytes=40 << 20) as running,
        Client(running.url) as client,
    ):
        target, _ = client.score(make_request([row], DENSE))
        too_large = make_request([row, row], DENSE, request_id="large")
        error = client.refusal(request_to_proto(too_large))
        after, _ = client.score(make_request([[5, 6, 7]], DENSE))

    assert target.tensors["logits"].shape == (4096, 4096)  # 32 MiB in 16 bits
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"limit {40 << 20}; ask for fewer positions a request, or another codec" in (
        error.details()
    )
    assert after.num_positions == 2


def test_pbr_53_five_megabytes_of_zeros_under_gzip_meet_the_token_limit_not_grpcs(
    client: Client,
) -> None:
    zeros = make_request([[0] * 1_250_000], TOPK, request_id="zeros")

    with pytest.raises(grpc.RpcError) as refused:
        list(
            client.stub.Score(
                request_to_proto(zeros), timeout=30, compression=grpc.Compression.Gzip
            )
        )

    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "row 0 of request zeros has 1250000 tokens, limit 128" in refused.value.details()
    assert len(list(client.stub.Score(good(), timeout=30))) == 1


def test_an_empty_mask_is_answered_with_no_positions(client: Client) -> None:
    request = make_request([[5, 6, 7]], TOPK, masks=[[False] * 3])

    target, _ = client.score(request)

    assert target.num_positions == 0 and target.tensors["logprobs"].shape == (0, 5)


def test_describe_says_who_it_is(client: Client) -> None:
    description = client.describe(include_token_map=True)

    assert (description.vocab_size, description.hidden_size, description.num_layers) == (64, 32, 2)
    assert description.dtype == "float32"
    assert description.attention_implementation == "sdpa"
    assert description.token_map[:2] == ("w0", "w1")
    assert len(description.weights_fingerprint) == 32
    assert client.describe().token_map == ()


def test_a_request_may_be_made_by_hand_from_the_specification(client: Client) -> None:
    request: ScoreRequest = make_request([[5, 6, 7]], TOPK)
    message = pb.ScoreRequest(
        wire_version=1,
        request_id=request.request_id,
        token_ids=as_ids(5, 6, 7),
        row_lengths=[3],
        position_mask=b"\x03",
        target=pb.TargetSpec(codec=pb.CODEC_TOPK, temperature=1.0, top_k=5),
    )

    assert message == request_to_proto(request)
    assert len(list(client.stub.Score(message, timeout=30))) == 1
