"""Whether streamed weights should cross the link compressed: arithmetic, no torch."""

from __future__ import annotations

import math

#: Streaming must become faster by at least this factor; less is within what rates vary by.
MIN_GAIN = 1.05


#: What weights of trained models shrink by (benchmarks/compression.py): taken where none has been
#: looked at.
TYPICAL_RATIO = 1.41


def decompressed_bytes_per_s(ratio: float, memory_bytes_per_s: float) -> float:
    """Bytes a second that come out of decompressing, on a processor that reads and writes that many
    of its own memory: it is held up by that alone (9.5 GB/s of a core's 16, measured)."""
    return memory_bytes_per_s / (1 + 1 / ratio)


def compressed_bytes_per_s(
    ratio: float,
    link_bytes_per_s: float,
    decompress_bytes_per_s: float,
    multiply_bytes_per_s: float = math.inf,
) -> float:
    """Bytes of weights a second that are used, where they cross the link compressed by ``ratio``
    while the accelerator decompresses others, and multiplies with them."""
    device_s = 1 / decompress_bytes_per_s + 1 / multiply_bytes_per_s
    return min(ratio * link_bytes_per_s, 1 / device_s)


def worth_compressing(
    ratio: float,
    link_bytes_per_s: float,
    decompress_bytes_per_s: float,
    multiply_bytes_per_s: float = math.inf,
) -> tuple[bool, str]:
    """Whether compressed streaming beats raw streaming, and a sentence with the numbers.

    ``ratio`` is the bytes of streamed weights over what crosses the link for them;
    ``decompress_bytes_per_s`` counts the bytes that come out, and ``multiply_bytes_per_s`` what the
    accelerator reads in a product of few rows. A link may be infinitely fast.
    """
    assert ratio > 0 and link_bytes_per_s > 0 and decompress_bytes_per_s > 0
    assert multiply_bytes_per_s > 0
    off = "Streamed weights are not compressed (--offload-compress)"
    if ratio < MIN_GAIN:
        return False, (
            f"{off}: what is streamed would shrink by a factor of {ratio:.2f}, and {MIN_GAIN} is "
            "the least that pays. Only bfloat16 weights compress."
        )
    link = _rate(link_bytes_per_s)
    then = ""
    if not math.isinf(multiply_bytes_per_s):
        then = f" and multiplied with at {_rate(multiply_bytes_per_s)}"
    arriving = compressed_bytes_per_s(
        ratio, link_bytes_per_s, decompress_bytes_per_s, multiply_bytes_per_s
    )
    raw = min(link_bytes_per_s, multiply_bytes_per_s)
    if math.isinf(link_bytes_per_s) or arriving < MIN_GAIN * raw:
        return False, (
            f"{off}: they are decompressed at {_rate(decompress_bytes_per_s)}{then}, and the link "
            f"carries them as they are at {link}."
        )
    return True, (
        f"Streamed weights are compressed by a factor of {ratio:.2f}: {_rate(arriving)} of weights "
        f"over a link of {link}, decompressed at {_rate(decompress_bytes_per_s)}{then}."
    )


def _rate(bytes_per_s: float) -> str:
    return "any rate" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.1f} GB/s"
