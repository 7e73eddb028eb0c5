"""The answer of a plan in words: a sentence that is read in ten seconds, then what fits. Pure.

The words are made of the data alone that ``Estimate.answer`` returns, so that a program reads what people do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.columns import in_columns
from shardwright.plan.cluster import GIB

Data = Mapping[str, Any]

_SHOWN = 8
_LEVERS = {
    "groups": "{} groups",
    "recomputed": "{:.0%} of the blocks computed again",
    "shards": "sharded over {}",
    "reshards": "resharded after the forward: {}",
    "kept": "{:.0%} of the groups kept for the backward",
    "ahead": "{} gathered ahead",
    "split": "microbatches split in {}",
    "offload": "on the host: {}",
    "base": "frozen weights: {}",
}


def in_words(found: Data) -> str:
    """Lines for people."""
    lines = [_sentence(found), *_assumed(found)]
    if "ways" in found:
        lines += ["", *_ways(found)]
    elif "levers" in found:
        lines += ["", *_savings(found)]
    return "\n".join(lines)


def _sentence(found: Data) -> str:
    where = f"{found['ranks']:,} x {found['device']}"
    hosts = f" in {found['hosts']:,} hosts" if found["hosts"] > 1 else ""
    model = f"{found['model']} ({_counted(found['parameters'])} parameters)"
    verb, says = ("fits", _speed(found)) if found["fits"] else ("doesn't fit", _largest(found))
    return f"{_question(found)}{model} {verb} on {where}{hosts}{_how(found)}: {_memory(found)}{says}."


def _question(found: Data) -> str:
    """The value that was asked for, of ``--largest`` and ``--fewest``."""
    if "asked" not in found:
        return ""
    beyond = found["next_peak_nbytes"]
    more = f" (the next holds {_gib(beyond)} GiB)" if beyond is not None else ""
    return f"{found['asked']}: {found['value']:,}{more}. "


def _how(found: Data) -> str:
    """What was chosen."""
    reshard, kept, again = found["reshard_after_forward"], found["keep"], found["recompute"]
    resharded = f"resharded to {reshard}" if reshard else "not resharded after the forward"
    ranks = " of the ranks that share them" if found.get("mesh") else ""
    words = [
        f" with {found['microbatches']} x {found['microbatch_tokens']:,} tokens on each{ranks} a step",
        f"a mesh of {found['mesh']}" if found.get("mesh") else "",
        f"{found['groups']} groups sharded over {found['shards']}",
        f"{again:.0%} of the blocks computed again" if again else "",
        f"{kept:.0%} of the groups kept for the backward" if kept else "",
        "" if reshard is True else resharded,
        {"none": "", "all": "all on the host"}.get(found["offload"], f"{found['offload']} on the host"),
        "frozen weights in 4 bits" if found["base"] == "nf4" else "",
        "" if found["runtime"] == "shardwright" else f"by {found['runtime']}",
    ]
    return ", ".join(filter(None, words))


def _memory(found: Data) -> str:
    whole, room, host = found["memory_nbytes"], found["room_nbytes"], found["host_nbytes"]
    left = "its budget" if found["has_budget"] else f"{_gib(whole)} less a reserve of {_gib(whole - room)}"
    held = f"{_gib(found['peak_nbytes'])} (+- {found['memory_error']:.0%}) of {_gib(room)} GiB ({left})"
    there = f" of {_gib(found['host_room_nbytes'])}" if found["host_room_nbytes"] else ""
    return f"a step holds {held}" + (f", and each host {_gib(host)}{there} GiB" if host else "")


def _largest(found: Data) -> str:
    sizes = sorted(found["peak_by_category"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in sizes if nbytes >= 0.05 * GIB)
    return f", {_gib(found['over_nbytes'])} GiB too many ({parts}, {found['peak_at']})"


def _speed(found: Data) -> str:
    price, speed = found["price_per_hour"], _rounded(found["tokens_per_s"])
    cost = "" if price is None else f", {_rounded(found['cost'])} at {price:g} each"
    off = "error not known" if found["error"] is None else f"+- {found['error']:.0%}"
    time = f"{_lasting(found['days'])} ({_rounded(found['device_hours'])} device-hours{cost})"
    return f", and it trains {speed} tokens/s ({off}), {_counted(found['tokens'])} tokens in {time}"


def _assumed(found: Data) -> list[str]:
    """What the numbers rest on."""
    if not found["fits"]:
        return []
    error, why, named = found["error"], found["error_why"], found["device"]
    lines = [
        f"Step {found['step_s']:.3f} s, MFU {found['mfu']:.1%} of {found['dtypes']}, {found['exposed']:.1%} "
        f"without compute, most held at: {found['peak_at']}; a checkpoint takes "
        f"{_gib(found['checkpoint_nbytes'])} GiB.",
        f"No error is known of the seconds: {why}."
        if error is None
        else f"Seconds of {why} were within {error:.0%} (mean {found['error_mean']:.0%}).",
    ]
    if found["network_assumed"]:
        rate = found["network_bytes_per_s"] / 1e9
        lines.append(
            f"Assumed between hosts: {rate:.4g} GB/s in one direction, as usual for {named}; write yours "
            "into the cluster's file (--cluster): host_bandwidth."
        )
    if found["host_nbytes"] and not found["host_room_nbytes"]:
        lines.append(
            "Not checked: the memory of a host, which its ranks share; write it into the cluster's file "
            "(--cluster): host_memory_nbytes."
        )
    return lines


def _ways(found: Data) -> list[str]:
    """Return a table of the candidates that fit, and one line of the others."""
    ways: Sequence[Data] = found["ways"]
    rows = [["GiB", "tokens/s", "step s", "what differs"]]
    rows += [[*_numbers(way), _difference(way, ways[0])] for way in ways[:_SHOWN]]
    fitting = f"{found['tried'] - found['too_large']} of {found['tried']} ways that were tried fit"
    nearest = found["nearest_over_nbytes"]
    over = f"; the nearest other one holds {_gib(nearest, 2)} GiB too many" if nearest else ""
    meshes = f"; {found['num_meshes']} meshes were priced" if found["num_meshes"] > 1 else ""
    return [*(in_columns(rows, ">>><") if ways else []), f"{fitting}{over}{meshes}."]


def _numbers(way: Data) -> tuple[str, str, str]:
    return _gib(way["peak_nbytes"]), _rounded(way["tokens_per_s"]), f"{way['step_s']:.3f}"


def _difference(way: Data, chosen: Data) -> str:
    words = (text.format(way[name]) for name, text in _LEVERS.items() if way[name] != chosen[name])
    return ", ".join(words) or "(chosen)"


def _savings(found: Data) -> list[str]:
    """What each lever frees by itself."""
    if not found["levers"]:
        return ["No lever of --search frees memory by itself."]
    rows = [["GiB less", "GiB then", "seconds more", "what differs"]]
    for lever in found["levers"]:
        then = found["peak_nbytes"] - lever["nbytes"]
        words = _LEVERS[lever["lever"]].format(lever["value"])
        rows.append([_gib(lever["nbytes"]), _gib(then), f"{lever['seconds']:.3f}", words])
    return in_columns(rows, ">>><")


def _gib(nbytes: float, digits: int = 1) -> str:
    return f"{nbytes / GIB:,.{digits}f}"


def _rounded(number: float) -> str:
    """Round to three digits."""
    return f"{float(f'{number:.3g}'):,.10g}"


def _counted(number: float) -> str:
    for unit, name in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if number >= unit:
            return f"{_rounded(number / unit)}{name}"
    return f"{number:,.0f}"


def _lasting(days: float) -> str:
    for unit, name in ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes")):
        if days >= 2 * unit:
            return f"{_rounded(days / unit)} {name}"
    return f"{days * 86400:.0f} seconds"
