"""Pictures of a result."""

from __future__ import annotations

import pathlib


def draw(result: dict, folder: pathlib.Path, name: str) -> list[str]:
    """Writes folder/name-*.png and returns the file names; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    if result.get("step"):
        made.append(f"{name}-step.png")
        cases = [c for c in result["step"] if c["threads"] == result["step"][0]["threads"]]
        cases = [cases[0], *cases[2:3]]  # one large tensor and many small ones
        figure, axes = pyplot.subplots(
            1, len(cases), figsize=(5.4 * len(cases) + 2.5, 5.4), sharey=True, squeeze=False
        )
        times = {r["name"]: r["ns_per_parameter"] for r in cases[0]["rows"]}
        names = sorted(times, key=times.__getitem__, reverse=True)
        colors = ["tab:blue" if n.startswith("lowbit") else "dimgray" for n in names]
        for axis, c in zip(axes[0], cases, strict=True):
            found = {r["name"]: r["ns_per_parameter"] for r in c["rows"]}
            shown = [found.get(n, float("nan")) for n in names]
            axis.hlines(names, min(found.values()) / 1.6, shown, colors=colors, lw=1.5)
            axis.scatter(shown, names, c=colors, s=36, zorder=3)
            for n, t in zip(names, shown, strict=True):
                axis.annotate(f"{t:.3g}", (t, n), (7, 0), textcoords="offset points", va="center")
            axis.set_xscale("log")
            ticks = [0.3, 0.5, 1, 2, 5, 10, 20, 50, 100]
            axis.set_xticks(ticks, [f"{t:g}" for t in ticks], minor=False)
            axis.set_xticks([], minor=True)
            axis.set_xlim(min(found.values()) / 1.6, 2 * max(found.values()))
            axis.set_title(c["workload"])
            axis.set_xlabel(f"ns per parameter, {c['threads']} thread: less is better")
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="x", alpha=0.3)
        figure.tight_layout()
        figure.savefig(folder / made[-1], dpi=90)
        pyplot.close(figure)
    if result.get("growth"):
        made.append(f"{name}-growth.png")
        figure, axis = pyplot.subplots(figsize=(7, 4))
        for label, points in result["growth"]["ns_per_parameter"].items():
            axis.plot([n for n, _ in points], [t for _, t in points], marker="o", label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("elements of one tensor")
        axis.set_ylabel("ns per parameter")
        axis.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(folder / made[-1], dpi=90)
        pyplot.close(figure)
    return made
