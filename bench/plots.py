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
        figure, axes = pyplot.subplots(
            1, len(cases), figsize=(4 * len(cases) + 2, 5), sharey=True, squeeze=False
        )
        names = list(dict.fromkeys(r["name"] for c in cases for r in c["rows"]))[::-1]
        for axis, c in zip(axes[0], cases, strict=True):
            found = {r["name"]: r["ns_per_parameter"] for r in c["rows"]}
            colors = ["tab:blue" if n.startswith("lowbit") else "tab:gray" for n in names]
            axis.barh(names, [found.get(n, 0) for n in names], color=colors)
            axis.set_xscale("symlog", linthresh=1)
            axis.set_title(c["workload"], fontsize=9)
            axis.set_xlabel("ns per parameter")
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
