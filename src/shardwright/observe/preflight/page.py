"""What a preflight has found, as a page that is read in ten seconds. Pure."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from shardwright.columns import in_columns, in_words
from shardwright.observe.preflight.findings import HostReport, Readiness, Trouble, clocks, is_loopback
from shardwright.observe.watch.diagnosis import spans

_MOST_IN_GRID = 12


def page(found: Readiness, troubles: Sequence[Trouble], took_s: float) -> str:
    """The verdict, hosts, links, what all share; then what is wrong, each with its remedy."""
    verdict = f"{len(troubles)} FAILED" if troubles else "all is well"
    came = "" if len(found.hosts) == found.world else f"{len(found.hosts)} of "
    lines = [
        f"preflight: {came}{found.world} rank(s) on {len(found.names)} host(s), in {took_s:.1f} s: {verdict}",
        "",
    ]
    lines += [*_hosts(found), "", *_links(found), *_shared(found)]
    for trouble in troubles:
        lines += ["", f"FAILED  {trouble.what}: {spans(trouble.ranks)}: {trouble.text}"]
        lines += [f"        {trouble.remedy}"]
    return "\n".join(lines)


def _hosts(found: Readiness) -> list[str]:
    """A row for each host; of several ranks the worst number."""
    rows = [
        ["ranks", "host", "Gloo takes", "address", "mtu", "NCCL takes", "shm free", "disk w/r MB/s", "device"]
    ]
    for name in found.names:
        ranks = [rank for rank in sorted(found.hosts) if found.hosts[rank].host == name]
        reports = [found.hosts[rank] for rank in ranks]
        first = reports[0]
        link = f"{first.interface or '?'}{_speed(first)}"
        disk = "/".join(f"{min(each.disk[way] for each in reports) / 1e6:,.0f}" for way in range(2))
        rows.append(
            [
                spans(ranks).partition(" ")[2],
                name,
                "lo" if is_loopback(first.address) else link,
                first.address or "none",
                str(first.link[1]),
                first.nccl or "none",
                "?" if first.shared_nbytes < 0 else in_words(first.shared_nbytes),
                disk,
                first.device,
            ]
        )
    return in_columns(rows, "<")


def _speed(report: HostReport) -> str:
    return f" ({report.link[2] / 1000:g} Gbit/s)" if report.link[2] else ""


def _links(found: Readiness) -> list[str]:
    rows = [["links", "pairs", "latency us, median and worst", "MB/s of a connection, median and worst"]]
    for between, name in ((False, "in a host"), (True, "between hosts")):
        latencies, flows = found.latencies(between=between), found.flows(between=between)
        if latencies or flows:
            times = {pair: 1e6 * s for pair, s in latencies.items()}
            rates = {pair: rate / 1e6 for pair, rate in flows.items()}
            rows.append([name, str(len(latencies)), _worst(times, max), _worst(rates, min)])
    if len(rows) == 1:
        return []
    lines = in_columns(rows, "<")
    grid = ["", *_grid(found)] if 2 < len(found.hosts) <= _MOST_IN_GRID else []
    return [*lines, *grid, ""]


def _worst(values: Mapping[tuple[int, int], float], worst: Callable[..., tuple[int, int]]) -> str:
    if not values:
        return "-"
    pair = worst(values, key=lambda each: values[each])
    return f"{median(values.values()):,.0f}, {values[pair]:,.0f} ({pair[0]} to {pair[1]})"


def _grid(found: Readiness) -> list[str]:
    """Who sees whom: MB/s of each connection that was measured, else the latency."""
    ranks = sorted(found.hosts)
    times = found.latencies(between=True) | found.latencies(between=False)
    rates = found.flows(between=True) | found.flows(between=False)
    rows = [["MB/s (us)", *(f"to {rank}" for rank in ranks)]]
    for a in ranks:
        cells = []
        for b in ranks:
            rate = f"{rates[a, b] / 1e6:,.0f} " if (a, b) in rates else ""
            time = f"({1e6 * times[a, b]:,.0f})" if (a, b) in times else "no"
            cells.append("" if a == b else rate + time)
        rows.append([f"from {a}", *cells])
    return in_columns(rows, "<")


def _shared(found: Readiness) -> list[str]:
    """One line each: versions, clocks, the folder."""
    if not found.hosts:
        return []
    first = found.hosts[min(found.hosts)]
    ahead = clocks(found)
    lines = ["versions  " + ", ".join(f"{name} {version}" for name, version in first.versions.items())]
    if len(ahead) > 1:
        calls = [call for report in found.links.values() for call in report.calls]
        error = max((call.latency_s for call in calls if call.to == min(found.hosts)), default=0.0)
        apart = max(ahead.values()) - min(ahead.values())
        lines.append(f"clocks    {1e3 * apart:.2f} ms apart at the most, known to {1e3 * error:.2f} ms")
    sharers = [rank for rank, report in found.links.items() if not report.unseen]
    if found.world > 1:
        who = "all ranks" if len(sharers) == found.world else f"{len(sharers)} of {found.world} ranks"
        lines.append(f"folder    {found.folder}: {who} see what the others wrote")
    return lines
