"""Whether streamed weights should cross the link compressed: arithmetic, no torch."""

from __future__ import annotations

import math

#: Streaming must become faster by at least this factor; less is within what rates vary by.
MIN_GAIN = 1.05


def compressed_bytes_per_s(
    ratio: float, link_bytes_per_s: float, decompress_bytes_per_s: float
) -> float:
    """Bytes of weights that arrive a second, ready for use, where they cross the link compressed
    by ``ratio`` and are decompressed while others still cross it."""
    return min(ratio * link_bytes_per_s, decompress_bytes_per_s)


def worth_compressing(
    ratio: float, link_bytes_per_s: float, decompress_bytes_per_s: float
) -> tuple[bool, str]:
    """Whether compressed streaming beats raw streaming, and a sentence with the numbers.

    ``ratio`` is the bytes of all streamed weights over what crosses the link for them, those that
    do not compress included; ``decompress_bytes_per_s`` counts the bytes that come out. A link
    may be infinitely fast.
    """
    assert ratio > 0 and link_bytes_per_s > 0 and decompress_bytes_per_s > 0
    off = "Streamed weights are not compressed (--offload-compress)"
    if ratio < MIN_GAIN:
        return False, (
            f"{off}: what is streamed would shrink by a factor of {ratio:.2f}, and {MIN_GAIN} is "
            "the least that pays. Only bfloat16 weights compress."
        )
    link = _rate(link_bytes_per_s)
    arriving = compressed_bytes_per_s(ratio, link_bytes_per_s, decompress_bytes_per_s)
    if math.isinf(link_bytes_per_s) or arriving < MIN_GAIN * link_bytes_per_s:
        return False, (
            f"{off}: they are decompressed at {_rate(decompress_bytes_per_s)}, and the link "
            f"carries them as they are at {link}."
        )
    return True, (
        f"Streamed weights are compressed by a factor of {ratio:.2f}: {_rate(arriving)} of weights "
        f"over a link of {link}, decompressed at {_rate(decompress_bytes_per_s)}."
    )


def _rate(bytes_per_s: float) -> str:
    return "any rate" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.1f} GB/s"
