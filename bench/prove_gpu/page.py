"""The page of results, in Markdown."""

import time
from typing import Any

from bench.prove_gpu.device import Device


def page(device: Device, about: dict[str, str], sections: list[Any]) -> str:
    """about: what figures were taken with. Then each section's result, its tables and its errors."""
    told = "simulated: figures mean nothing" if device.simulated else "measured on a device"
    if device.shared:
        told = "ranks share a card: times mean nothing; order, bits, memory and events do"
    lines = [f"# prove-gpu, {time.strftime('%Y-%m-%d')} ({told})", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "| section | result | s |", "| --- | --- | ---: |"]
    lines += [f"| {each.title} | {_result(each)} | {each.took_s:.0f} |" for each in sections]
    for section in sections:
        lines += ["", f"## {section.title}"]
        for name, rows in section.tables.items():
            lines += ["", f"{name[0].upper()}{name[1:]}:", "", *_table(rows, device.simulated)]
        for error in section.errors:
            lines += ["", "Failed:", "", "```text", error.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def _result(section: Any) -> str:
    if section.errors:
        return "failed"
    return "passed" if section.tables else "not run"


def _table(rows: list[dict[str, Any]], simulated: bool) -> list[str]:
    """Rows by world, where there is one; of a simulated device, each column of figures says so."""
    rows = sorted(rows, key=lambda row: row.get("world", 0))
    names = list(rows[0])
    figures = {name for name in names if not any(isinstance(row.get(name), str) for row in rows)}
    marked = figures.union(["largest difference"]) - {"world", "steps"} if simulated else ()
    heads = [f"{name} (simulated)" if name in marked else name for name in names]
    return [
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---:' if name in figures else '---' for name in names)} |",
        *(f"| {' | '.join(str(row.get(name, '')) for name in names)} |" for row in rows),
    ]
