"""Tables for people, of a check and of a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pallas_kernels.aot.report import bytes_text


def ceilings_text(ceilings: Mapping[str, Any]) -> str:
    """What the GPU reaches at best, in one line."""
    copy, product = ceilings["copy_bytes_per_s"] / 1e12, ceilings["product_flops_per_s"] / 1e12
    return f"ceilings: copy {copy:.2f} TB/s, bfloat16 product {product:.0f} TFLOP/s ({ceilings['product_by']})"


def fraction(entry: Mapping[str, Any], ceilings: Mapping[str, Any] | None) -> float | None:
    """How much of what the GPU can do at best the kernel does; None where that was not measured."""
    if ceilings is None or "times" not in entry:
        return None
    fastest_s = max(entry["bytes"] / ceilings["copy_bytes_per_s"], entry["flops"] / ceilings["product_flops_per_s"])
    return fastest_s / entry["times"]["kernel"]["median_s"]


def check_table(entries: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, Any] | None, clock: str) -> Table:
    """One row a case: right or not, milliseconds of each program, ratios, the fraction of the ceiling."""
    libraries = dict.fromkeys(
        name for e in entries.values() for name in e.get("times", {}) if name not in ("kernel", "unfused")
    )
    table = Table(title=f"kernels on this GPU; medians in ms by {clock}", title_justify="left")
    table.add_column("case")
    for heading in ("error", "bound", "kernel", "XLA", *libraries, "XLA / kernel", "of the ceiling"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for name, entry in entries.items():
        times = entry.get("times", {})
        error, bound = _worst(entry)
        ratio = times["unfused"]["median_s"] / times["kernel"]["median_s"] if times else None
        part = fraction(entry, ceilings)
        table.add_row(
            name,
            error,
            bound,
            *(_ms(times.get(program)) for program in ("kernel", "unfused", *libraries)),
            "" if ratio is None else f"{ratio:.2f}",
            "" if part is None else f"{part:.0%}",
            remark(entry),
        )
    return table


def _worst(entry: Mapping[str, Any]) -> tuple[str, str]:
    """The error that is nearest to its bound, and that bound."""
    if "errors" not in entry:
        return "", ""
    pairs = list(zip(entry["errors"], entry["tolerances"], strict=True))
    error, bound = next((p for p in pairs if p[0] is None), max(pairs, key=lambda p: (p[0] or 0.0) / p[1]))
    return "nan" if error is None else f"{error:.1e}", f"{bound:.1e}"


def remark(entry: Mapping[str, Any]) -> str:
    """What a reader should know beside the numbers."""
    if entry["status"] == "failed":
        return f"failed: {entry['error'].strip().splitlines()[-1][:200]}"
    if entry["status"] == "refused":
        return f"refused: {entry['reason'].strip().splitlines()[0][:200]}"
    if not entry.get("repeats", True):
        return "wrong: other bits on another run"
    return "" if entry["status"] in ("right", "compiled") else entry["status"]


def _ms(summary: Mapping[str, Any] | None) -> str:
    return "" if summary is None else f"{summary['median_s'] * 1e3:.3f}"


def dry_table(entries: Mapping[str, Mapping[str, Any]], target: str) -> Table:
    """One row a case: kernels, temporaries and bytes of ours and of XLA's program, and what our kernels need."""
    table = Table(title=f"compiled for {target}: ours | XLA's", title_justify="left")
    table.add_column("case")
    for heading in ("kernels", "temporaries", "moved", "registers", "spilled", "shared memory", "wgmma"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for name, entry in entries.items():
        if entry["status"] == "refused":
            table.add_row(name, *[""] * 7, remark(entry))
            continue
        ours, xla = entry.get("kernel"), entry.get("unfused")
        mosaic = ours["mosaic"] if ours else []
        table.add_row(
            name,
            _pair(ours, xla, lambda r: str(r["count"])),
            _pair(ours, xla, lambda r: bytes_text(r["temporaries_bytes"])),
            _pair(ours, xla, lambda r: bytes_text(r["bytes_moved"])),
            _largest(mosaic, lambda m: m["registers"], str),
            _largest(mosaic, lambda m: m["spill_store_bytes"] + m["spill_load_bytes"], bytes_text),
            _largest(mosaic, lambda m: m["smem_bytes"], bytes_text),
            str(sum(n for m in mosaic for key, n in m["tensor_core"].items() if key.startswith("wgmma"))),
            remark(entry) or ("" if mosaic or _is_triton(ours) else "no kernel of ours"),
        )
    return table


def _is_triton(ours: Any) -> bool:
    return any(launch["name"] == "triton_kernel_call" for launch in ours["kernels"])


def _pair(ours: Any, xla: Any, text: Any) -> str:
    return " | ".join("failed" if r is None else text(r) for r in (ours, xla))


def _largest(mosaic: Any, value: Any, text: Any) -> str:
    return text(max(map(value, mosaic))) if mosaic else ""
