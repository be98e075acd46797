"""The start-up table: what is loaded, and where the memory went."""

from __future__ import annotations

from ambidex.engine.messages import EngineInfo

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """``1536`` -> ``1.50 KiB``."""
    value = float(num_bytes)
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} {_UNITS[-1]}"


def describe(info: EngineInfo) -> list[str]:
    """Lines for the log at start-up; the last two are those that vLLM users look for."""
    rows = [
        ("model", info.model),
        ("source", info.source),
        ("architecture", info.model_type),
        ("dtype", info.dtype),
        ("KV dtype", info.kv_cache_dtype),
        ("kernels", f"{info.kernels}, {info.cpu_threads} threads" if info.kernels else ""),
        ("max model length", f"{info.max_model_len} tokens"),
    ]
    rows += [(f"{row.memory}: {row.account}", format_bytes(row.num_bytes)) for row in info.memory]
    rows += [("host memory", line) for line in info.memory_nodes]
    shown = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in shown)
    lines = [f"{name:<{width}}  {value}" for name, value in shown]
    num_tokens = (info.num_blocks + info.num_gpu_blocks) * info.block_size
    lines.append(f"GPU blocks: {info.num_gpu_blocks}, CPU blocks: {info.num_blocks}")
    lines.append(
        f"Maximum concurrency for {info.max_model_len} tokens per request: "
        f"{num_tokens / info.max_model_len:.2f}x"
    )
    return lines
