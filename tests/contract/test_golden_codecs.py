"""Oracle: bytes that were written once; whoever wrote them can still be read, and the other way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distill_wire.codecs import CODECS
from distill_wire.codecs.hidden import restore_states
from distill_wire.errors import FrameCorrupt
from distill_wire.types import CodecId, ScoreRequest, StateCodecId, TargetSpec
from tests.unit.distill_wire.answers import describe, encode, frame_of, make_request, read

V = 40
SPECS = {
    "topk": TargetSpec(codec=CodecId.TOPK, top_k=3),
    "dense": TargetSpec(codec=CodecId.DENSE),
    "threshold": TargetSpec(codec=CodecId.THRESHOLD, num_draws=8, seed=5),
    "hidden8": TargetSpec(codec=CodecId.HIDDEN8),
    "mid8": TargetSpec(codec=CodecId.HIDDEN8, hidden_layers=(1,), state_codec=StateCodecId.MID8),
    "mid4": TargetSpec(codec=CodecId.HIDDEN8, hidden_layers=(1,), state_codec=StateCodecId.MID4),
}
GOLDEN = {
    "topk": (
        "4b445731da00000049df2f8e9c7d2f6b82a46d65746184aa726571756573745f6964a3722d31a563"
        "6f64656301ad6e756d5f706f736974696f6e7302b3776569676874735f66696e6765727072696e74"
        "a177a774656e736f727387a86964735f6869676894a575696e743891030003a76964735f6c6f7794"
        "a575696e743891031013a5636f64657394a575696e74389202032026a47374657094a862666c6f61"
        "7431369202013034a47461696c94a7666c6f617431369202014044a7656e74726f707994a7666c6f"
        "6174313691025054ac676f6c645f6c6f6770726f6294a7666c6f6174313691026064000000000000"
        "424e050000000000000000000000000072bc7000000000000000000000000000fc7e00a900fd0000"
        "0000000000000000023bc23a0000000000000000000000001c3c473d000000000000000000000000"
        "4241604100000000000000000000000085c427c1"
    ),
    "dense": (
        "4b44573194000000943d249bffdaca2f82a46d65746184aa726571756573745f6964a3722d31a563"
        "6f64656302ad6e756d5f706f736974696f6e7302b3776569676874735f66696e6765727072696e74"
        "a177a774656e736f727383a66c6f6769747394a7666c6f6174313692022800cca0a7656e74726f70"
        "7994a7666c6f617431369102cca0cca4ac676f6c645f6c6f6770726f6294a7666c6f617431369102"
        "ccb0ccb400000000000000000000000080c7c0c1e0c500bd40c440c740c1a0c500bc00c400c7c0c0"
        "60c500ba80c3c0c640c020c500b800c380c680bfe0c400b480c240c680bea0c4000000c200c680bd"
        "60c460c780c1c0c580bc20c420c700c160c500ba80c3c0c640c020c500b800c380c680bfe0c400b4"
        "80c240c680bea0c4000000c200c680bd60c460c780c1c0c580bc20c420c700c180c500bbc0c3e0c6"
        "80c040c500b940c3a0c600c000c500b64241604100000000000000000000000085c427c1"
    ),
    "threshold": (
        "4b445731c7000000d25ac296c38b84f182a46d65746184aa726571756573745f6964a3722d31a563"
        "6f64656303ad6e756d5f706f736974696f6e7302b3776569676874735f66696e6765727072696e74"
        "a177a774656e736f727386a86964735f6869676894a575696e743891040004a76964735f6c6f7794"
        "a575696e743891071017a969735f6c696b656c7994a575696e743891022022a5636f64657394a575"
        "696e743891043034a7656e74726f707994a7666c6f6174313691024044ac676f6c645f6c6f677072"
        "6f6294a7666c6f617431369102505400000000000000000042fbdc06000000000000000000000000"
        "b340c76feb807000000000000000000030050000000000000000000000000000e8caffe000000000"
        "00000000000000004241604100000000000000000000000085c427c1"
    ),
    "hidden8": (
        "4b445731a80000002ec6b3b76904787782a46d65746184aa726571756573745f6964a3722d31a563"
        "6f64656304ad6e756d5f706f736974696f6e7302b3776569676874735f66696e6765727072696e74"
        "a177a774656e736f727384a668696464656e94a4696e74389202280050ac68696464656e5f736361"
        "6c6594a862666c6f617431369202015054a7656e74726f707994a7666c6f6174313691026064ac67"
        "6f6c645f6c6f6770726f6294a7666c6f61743136910270740000000000000000b8e714a9200b3e13"
        "1a08100605c7e5aafec8cf2f1e425593dff948871e7ec7fef11a7a3fc8464f5e0df913ed0f1c5ff1"
        "41eceddf7fe1cce0f9b7eb4c2a143baebaa833ae0b6ed8c0ce54004afd667637903d943d00000000"
        "00000000000000004241604100000000000000000000000085c427c1"
    ),
    "mid8": (
        "4b445731dc00000095c28f20fb39951382a46d65746184aa726571756573745f6964a3722d31a563"
        "6f64656304ad6e756d5f706f736974696f6e7302b3776569676874735f66696e6765727072696e74"
        "a177a774656e736f727386a668696464656e94a4696e74389202280050ac68696464656e5f736361"
        "6c6594a862666c6f617431369202015054a7656e74726f707994a7666c6f6174313691026064ac67"
        "6f6c645f6c6f6770726f6294a7666c6f6174313691027074a76c617965725f3194a4696e74389202"
        "28cc80ccd0ad6c617965725f315f7363616c6594a862666c6f61743136920201ccd0ccd400000000"
        "b8e714a9200b3e131a08100605c7e5aafec8cf2f1e425593dff948871e7ec7fef11a7a3fc8464f5e"
        "0df913ed0f1c5ff141eceddf7fe1cce0f9b7eb4c2a143baebaa833ae0b6ed8c0ce54004afd667637"
        "903d943d0000000000000000000000004241604100000000000000000000000085c427c100000000"
        "0000000000000000ccc317da06ee0916ef041701c7ddf6dcf9c3f0f4081f11c8f72f1caafc31cb24"
        "0c017f11f203ff0e43c72139ed0449e62dd6e7bf7ff8c524ee88162222e2f0d8b1b807c3db31cecb"
        "d466e92d453e46d5783d2c3d"
    ),
    "mid4": (
        "4b445731dd0000000fa31a5bd3e9149882a46d65746184aa726571756573745f6964a3722d31a563"
        "6f64656304ad6e756d5f706f736974696f6e7302b3776569676874735f66696e6765727072696e74"
        "a177a774656e736f727386a668696464656e94a4696e74389202280050ac68696464656e5f736361"
        "6c6594a862666c6f617431369202015054a7656e74726f707994a7666c6f6174313691026064ac67"
        "6f6c645f6c6f6770726f6294a7666c6f6174313691027074a76c617965725f3194a575696e743892"
        "0220cc80ccc0ad6c617965725f315f7363616c6594a862666c6f61743136920202ccc0ccc8000000"
        "b8e714a9200b3e131a08100605c7e5aafec8cf2f1e425593dff948871e7ec7fef11a7a3fc8464f5e"
        "0df913ed0f1c5ff141eceddf7fe1cce0f9b7eb4c2a143baebaa833ae0b6ed8c0ce54004afd667637"
        "903d943d0000000000000000000000004241604100000000000000000000000085c427c100000000"
        "0000000000000000345a78a9878a53573777b939c71ac8b4899f8798888888888888888888888888"
        "5cba877c6a478fa517a96a674458b655f5b6cd5d888888888888888888888888403f8d3f433f1f3f"
    ),
}


def logits() -> torch.Tensor:
    # Multiples of 1/8, so that no platform rounds them otherwise.
    return ((torch.arange(2 * V).view(2, V) * 37) % 61).float() / 8


def made(name: str) -> tuple[ScoreRequest, bytes]:
    spec = SPECS[name]
    request = make_request(2, spec)
    states = {layer: logits() - 3 for layer in spec.hidden_layers}
    return request, bytes(frame_of(encode(logits(), spec, states=states), request))


def test_every_codec_has_golden_bytes() -> None:
    assert {spec.codec for spec in SPECS.values()} == set(CODECS)
    assert {spec.state_codec for spec in SPECS.values()} == set(StateCodecId)
    assert set(GOLDEN) == set(SPECS)


@pytest.mark.parametrize("name", ["topk", "dense", "threshold"])
def test_an_answer_is_written_as_the_golden_bytes(name: str) -> None:
    _, frame = made(name)

    assert frame.hex() == GOLDEN[name]


@pytest.mark.parametrize("name", SPECS)
def test_the_golden_bytes_are_read_as_the_answer(name: str) -> None:
    request, frame = made(name)

    found = read(bytes.fromhex(GOLDEN[name]), request, vocab_size=V)

    expected = read(frame, request, vocab_size=V)
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        # The rotation's sums round as the processor likes: a code may be off by one.
        assert (found.tensors[key].float() - tensor.float()).abs().nan_to_num().max() <= (
            1 if key == "hidden" else 0
        )
    for layer in request.target.hidden_layers:
        states = [restore_states(*target.states[layer], width=V) for target in (found, expected)]
        step = expected.states[layer][1].float().max()
        assert (states[0] - states[1]).abs().max() <= 1.01 * step


@pytest.mark.parametrize("name", SPECS)
def test_every_cut_and_every_flipped_byte_is_refused(name: str) -> None:
    request, frame = made(name)
    cuts = (frame[:end] for end in range(len(frame)))
    flips = (
        frame[:place] + bytes([frame[place] ^ 0x55]) + frame[place + 1 :]
        for place in range(len(frame))
    )

    for damaged in (*cuts, *flips):
        with pytest.raises(FrameCorrupt):
            read(damaged, request, vocab_size=V)


@pytest.mark.parametrize("name", SPECS)
def test_whatever_the_tensors_hold_is_read_or_refused(name: str) -> None:
    # Damage under a right checksum: what a broken or hostile teacher could send.
    request, frame = made(name)
    from distill_wire.frame import Frame, FrameTensor, read_frame, write_frame

    parsed = read_frame(frame)
    generator = np.random.default_rng(0)
    for key, tensor in parsed.tensors.items():
        for _ in range(20):
            noise = generator.integers(0, 256, tensor.data.nbytes, dtype=np.uint8)
            broken = FrameTensor(dtype=tensor.dtype, shape=tensor.shape, data=noise)
            tensors = dict(parsed.tensors) | {key: broken}
            rewritten = write_frame(Frame(meta=parsed.meta, tensors=tensors))
            try:
                target = read(bytes(rewritten), request, vocab_size=V)
            except FrameCorrupt:
                continue
            assert not any(t.isnan().any() for t in target.tensors.values())
            assert target.num_positions == 2 and describe(V).vocab_size == V
