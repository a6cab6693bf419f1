"""The codecs: how a distribution over the vocabulary becomes few bytes, and back.

A closed registry: every `CodecId`, and so every value of the IDL's enum, has exactly
one entry here, which a test holds.
"""

from __future__ import annotations

from distill_wire.codecs.base import Codec
from distill_wire.codecs.dense import DenseCodec
from distill_wire.codecs.topk import TopKCodec
from distill_wire.types import CodecId

CODECS: dict[CodecId, Codec] = {codec.id: codec for codec in (TopKCodec(), DenseCodec())}


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
