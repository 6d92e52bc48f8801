"""One picture per benchmark, from its JSON record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_GOAL = {"color": "black", "linestyle": "--", "linewidth": 1}


def draw(record: dict[str, Any], path: Path) -> None:
    """The plot of a record, as PNG."""
    panels = _PANELS.get(record["name"], 1)
    size = ({1: 7.5, 5: 15}.get(panels, 12), 3.6)
    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained")
    _DRAW[record["name"]](axes, record)
    where = record["conditions"]
    figure.supxlabel(f"{where['cpu']}, {where['cores']} cores, load {where['load_average']}", fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _copy(axes: Axes, record: dict[str, Any]) -> None:
    rows = record["rows"]
    _bars(
        axes,
        [f"{row['geometry']}\n{row['piece_bytes'] / 1024:,.0f} KiB pieces" for row in rows],
        {way: [row[f"{way}_vs_pieces"] for row in rows] for way in ("write", "read")},
    )
    axes.axvline(record["goals"][0]["limit"], label="goal", **_GOAL)
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.set(title="Block copies to and from the arena", xlabel="speed, memcpy in the same pieces = 1")
    _legend(axes)


def _transport(axes: Axes, record: dict[str, Any]) -> None:
    rows = [row for row in record["rows"] if "case" in row]
    names = [name for name in ("tcp", "ucx") if f"{name}_vs_raw" in rows[0]]
    _bars(
        axes, [row["case"] for row in rows], {name: [row[f"{name}_vs_raw"] for row in rows] for name in names}
    )
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.axvline(record["goals"][0]["limit"], label="goal for blocks", **_GOAL)
    axes.set(title="Reads from another process over loopback", xlabel="speed, a raw socket = 1")
    _legend(axes)


def _handoff(axes: Axes, record: dict[str, Any]) -> None:
    """Each row as far as it goes in half of the hand-offs, and in 99 of 100."""
    rows = [row for row in record["rows"] if "last_blocks" in row]
    names = [
        f"{row['transport']}, last {row['last_blocks']} x {row['block_bytes'] >> 10:,} KiB" for row in rows
    ]
    _bars(
        axes,
        names,
        {name: [row[f"{name}_us"] / 1e3 for row in rows] for name in ("block", "p50", "p99")},
    )
    axes.axvline(10, label="goal, without the block", **_GOAL)
    axes.set(title="From the last seal to the other store's match", xlabel="ms; block: a read of one")
    _legend(axes)


def _match(axes: Axes, record: dict[str, Any]) -> None:
    for row in record["rows"]:
        rate = f"{row['rate_blocks_s']:,.0f} blocks/s each" if row["rate_blocks_s"] else "unpaced"
        label = f"{row['savers']} sessions save, {rate}" if row["savers"] else "nobody saves"
        values = np.sort(row["seconds"]) * 1e3
        axes.plot(values, 100 * np.arange(1, len(values) + 1) / len(values), label=label)
    axes.axvline(2, label="goal for 99 %", **_GOAL)
    axes.axhline(99, color="grey", linewidth=0.5)
    axes.set(
        title=f"Match of {record['parameters']['keys']:,} keys",
        xlabel="ms (log)",
        ylabel="% of matches done",
        xscale="log",
    )
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    _legend(axes)


def _seal(axes: Axes, record: dict[str, Any]) -> None:
    rows = record["rows"]
    names = [
        f"{row['sessions']} session{'s' * (row['sessions'] > 1)}, batches of {row['batch']}, "
        + ("credits" if row["credits"] else "reserve")
        for row in rows
    ]
    _bars(axes, names, {"": [row["blocks_s"] / 1000 for row in rows]})
    axes.axvline(20, label="goal", **_GOAL)
    axes.set(title="Blocks through reserve and seal", xlabel="1,000 blocks/s, all sessions together")
    _legend(axes)


def _memory(axes: Axes, record: dict[str, Any]) -> None:
    rows = record["rows"]
    axes.bar(range(len(rows)), [row["files_mb"] for row in rows], label="program files")
    bottoms = [row["files_mb"] for row in rows]
    axes.bar(range(len(rows)), [row["anonymous_mb"] for row in rows], bottom=bottoms, label="own memory")
    axes.set_xticks(range(len(rows)), [f"{row['blocks']:,} blocks" for row in rows])
    axes.axhline(record["goals"][0]["limit"], label="goal", **_GOAL)
    axes.set(title="Memory of the store beyond the arena", ylabel="MB")
    _legend(axes)


def _restart(axes: Axes, record: dict[str, Any]) -> None:
    rows = record["rows"]
    _bars(
        axes,
        [f"run {i + 1}" for i in range(len(rows))],
        {f"{engine} engine": [row[f"{engine}_ttft_s"] for row in rows] for engine in ("first", "second")},
    )
    axes.set(title="The same prompt before and after an engine restart", xlabel="time to first token, s")
    _legend(axes)


def _overhead(axes: Axes, record: dict[str, Any]) -> None:
    rows = record["rows"]
    boxes = [row["ratios"] for row in rows]
    axes.boxplot(boxes, orientation="horizontal", whis=(0, 100), widths=0.6)
    axes.set_yticks(range(1, len(rows) + 1), [f"{row['model']}, {row['phase']}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(record["goals"][0]["limit"], label="goal (prefill)", **_GOAL)
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.set(title="Speed with the connector", xlabel="without the connector = 1; medians, quartiles, range")
    _legend(axes)


def _traces(panels: Any, record: dict[str, Any]) -> None:
    """Waits by policy over a real and a synthetic trace, and misses by replacement over the real one."""
    rows = record["rows"]
    real = rows[0]["trace"]
    shared = [row["trace"] for row in rows if row["policy"] == "index-share"]
    for axes, trace in zip(panels, [real, *shared[:1]], strict=False):
        some = [row for row in rows if row["trace"] == trace and row["replacement"] == "clock"]
        _lines(axes, some, "policy", "wait_us_batch_8")
        axes.set(title=f"Prefetch: {trace}", ylabel="exposed wait, us per layer, batch 8")
    some = [row for row in rows if row["trace"] == real and row["policy"] == "none"]
    _lines(panels[-1], some, "replacement", "misses")
    k = record["parameters"]["k"]
    panels[-1].set(title=f"Replacement: {real}", ylabel=f"misses per layer and step, k = {k:,}")
    for axes in panels:
        axes.set(xlabel="hot rows / k (log)", xscale="log", ylim=(0, 1.45 * axes.get_ylim()[1]))
        axes.set_xticks([1, 1.5, 2, 4], ["1", "1.5", "2", "4"], fontsize=7)
        axes.minorticks_off()
        axes.set_title(axes.get_title(), fontsize=9)
        axes.legend(fontsize=6, loc="upper right", ncols=2)


def _scale(panels: Any, record: dict[str, Any]) -> None:
    """How full each thing is, and what a host's link and the directory carry, over the number of hosts."""
    rows = record["rows"]
    hosts = [row["hosts"] for row in rows]
    for i, name in enumerate(rows[0]["used"]):
        some = [(row["hosts"], row["used"][name]) for row in rows if row["used"][name] > 0]
        panels[0].plot(*zip(*some, strict=True), marker="os^vDxP"[i], markersize=4, linewidth=1, label=name)
    panels[0].axhline(1, label="full", **_GOAL)
    panels[0].set(title="Used, of one of each", yscale="log", ylim=(1e-3, 1e4))
    for name, label in (
        ("prefill_out_gb_s", "out of a prefill host, mean"),
        ("decode_in_gb_s", "into a decode host, mean"),
        ("host_link_p99_gb_s", "any host's link, 99 % of 0.1 s"),
        ("host_link_peak_gb_s", "any host's link, most in 0.1 s"),
    ):
        panels[1].plot(hosts, [row[name] for row in rows], marker="o", markersize=4, linewidth=1, label=label)
    panels[1].axhline(record["parameters"]["nic_bytes_s"] / 1e9, label="the link", **_GOAL)
    panels[1].set(
        title="Bytes on a host's link",
        ylabel="GB/s",
        ylim=(0, 1.6 * record["parameters"]["nic_bytes_s"] / 1e9),
    )
    for name, label in (
        ("directory_ops_s", "commands/s"),
        ("proxy_events_s", "stream events/s, all proxies"),
    ):
        panels[2].plot(hosts, [row[name] for row in rows], marker="o", markersize=4, linewidth=1, label=label)
    panels[2].plot(
        hosts,
        [row["directory_gb"] * 1e6 for row in rows],
        marker="s",
        markersize=4,
        linewidth=1,
        label="directory, KB",
    )
    panels[2].set(title="Directory and proxies", yscale="log")
    for axes in panels:
        axes.set(xlabel="hosts (log)", xscale="log")
        axes.set_xticks(hosts, [f"{number:,}" for number in hosts])
        axes.minorticks_off()
        axes.legend(fontsize=6, loc="upper left")


def _quality(panels: Any, record: dict[str, Any]) -> None:
    """Recall by budget and by layer, perplexity and pass keys by budget; a list of blocks per KV head."""
    blocks = (None, record["parameters"]["block_tokens"])
    rows = [
        row
        for row in record["rows"]
        if not row["shared"] and not row.get("dense_layers") and row.get("block_tokens") in blocks
    ]
    budgets = record["parameters"]["budgets"]
    names = [name for name in dict.fromkeys(row["selector"] for row in rows) if name != "dense"]
    styles = {name: {"color": f"C{i}", "linewidth": 1} for i, name in enumerate(names)}
    for axes, part, value, title in (
        (panels[0], "recall", "recall", "Attention in the picked blocks"),
        (panels[2], "perplexity", "ratio", "Perplexity, dense = 1"),
        (panels[3], "filler", "accuracy", "Pass keys found in text that repeats"),
        (panels[4], "prose", "accuracy", "Pass keys found in prose"),
    ):
        some = [row for row in rows if row["part"] == part]
        for name in dict.fromkeys(row["selector"] for row in some):
            own = [row for row in some if row["selector"] == name]
            if name == "dense":
                axes.axhline(np.mean([row[value] for row in own]), label=name, **_GOAL)
                continue
            at = sorted({row["budget_tokens"] for row in own})
            means = [np.mean([row[value] for row in own if row["budget_tokens"] == each]) for each in at]
            axes.plot(at, means, marker="o", markersize=3, label=name, **styles[name])
        axes.set(title=title, xlabel="budget, tokens (log)", xscale="log")
        axes.set_xticks(budgets, [f"{each:,}" for each in budgets])
        axes.minorticks_off()
    budget = max(each for each in budgets if each <= 1024)
    for row in rows:
        if row["part"] == "recall" and row["budget_tokens"] == budget and row["text"] == rows[0]["text"]:
            panels[1].plot(row["layers"], label=row["selector"], **styles[row["selector"]])
    for axes in panels[3:]:
        axes.set(ylim=(0, 1.1))
    panels[1].set(title=f"The same by layer, {budget:,} tokens", xlabel="layer")
    for axes in panels:
        axes.set_title(axes.get_title(), fontsize=9)
        if axes.has_data():
            axes.legend(fontsize=6)


def _lines(axes: Axes, rows: list[dict[str, Any]], group: str, value: str) -> None:
    """A line per value of `group`, over hot_rows_k."""
    for i, name in enumerate(dict.fromkeys(row[group] for row in rows)):
        some = [row for row in rows if row[group] == name]
        style = "--" if name == "previous-step" else "-"  # lies on "none"
        axes.plot(
            [row["hot_rows_k"] for row in some],
            [row[value] for row in some],
            style,
            marker="os^vDx"[i % 6],
            markersize=3,
            linewidth=1,
            label=name,
        )


def _bars(axes: Axes, names: list[str], groups: dict[str, list[float]]) -> None:
    """Horizontal bars with their values, one group beside the other."""
    height = 0.8 / len(groups)
    for i, (label, values) in enumerate(groups.items()):
        places = [at + i * height for at in range(len(names))]
        bars = axes.barh(places, values, height, label=label or None)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks([at + 0.4 - height / 2 for at in range(len(names))], names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.1)


def _legend(axes: Axes) -> None:
    """Above the axes, where no data is; the title goes to the left."""
    axes.set_title(axes.get_title(), loc="left")
    axes.set_title("")
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


_DRAW = {
    "copy": _copy,
    "transport": _transport,
    "handoff": _handoff,
    "match": _match,
    "seal": _seal,
    "memory": _memory,
    "restart": _restart,
    "overhead": _overhead,
    "traces": _traces,
    "scale": _scale,
    "quality": _quality,
}
_PANELS = {"traces": 3, "scale": 3, "quality": 5}
