"""The codecs: how a distribution over the vocabulary becomes few bytes, and back.

A closed registry: every `CodecId`, and so every value of the IDL's enum, has exactly
one entry here, which a test holds. States of inner layers have two codecs of their own,
in `hidden`.
"""

from __future__ import annotations

from distill_wire.codecs.base import Codec, LossKind
from distill_wire.codecs.dense import DenseCodec
from distill_wire.codecs.hidden import Hidden8Codec
from distill_wire.codecs.threshold import ThresholdCodec
from distill_wire.codecs.topk import TopKCodec
from distill_wire.types import CodecId

__all__ = ["CODECS", "Codec", "LossKind", "check_loss", "codec_by_name"]

CODECS: dict[CodecId, Codec] = {
    codec.id: codec for codec in (TopKCodec(), DenseCodec(), ThresholdCodec(), Hidden8Codec())
}


def codec_by_name(name: str) -> Codec:
    """Find a codec by the name users write.

    Raises:
        ValueError: no codec has that name.
    """
    for codec in CODECS.values():
        if codec.name == name:
            return codec
    raise ValueError(
        f"codec {name!r} is unknown; this release has {', '.join(c.name for c in CODECS.values())}"
    )


def check_loss(codec: Codec, loss: LossKind) -> None:
    """Refuse a loss that a codec's targets cannot feed.

    Raises:
        ValueError: it names the codecs that would do.
    """
    if loss not in codec.losses:
        able = ", ".join(other.name for other in CODECS.values() if loss in other.losses)
        raise ValueError(
            f"codec {codec.name} feeds {', '.join(sorted(kind.value for kind in codec.losses))}, "
            f"not {loss.value}; codecs that do: {able}"
        )
