"""The goals of `make gpu`: what was measured for each, and whether it was met.
One table over all stages.

A goal without a measurement is open and says why. It counts as neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu.large import RUNS
from bench.measuring.workload import MANY, QUARTER, Workload
from bench.pages.page import table

# Contestants by name: `make gpu` imports this file before lowbit is built.
EIGHT, IN_GRAPH = (
    "lowbit 8-bit, bf16 stochastic",
    "lowbit 8-bit, bf16 stochastic, in a CUDA graph",
)
BASELINES = (
    "torch fused, float32",
    "torchao AdamW8bit compiled, bf16 stochastic",
    "bitsandbytes AdamW8bit, bf16 nearest",
    "FlashOptim AdamW, bf16 + 8 bits",
)
SPEED = ((QUARTER, 0.85), (MANY, 0.80))  # minimum share of the copy's speed
SECONDS = 600

Line = dict[str, Any]  # asked, measured: sentences; met: True, False, or None if open


def lines(report: dict) -> list[Line]:
    """The lines for a report of bench/gpu/__main__.py."""
    stages, cases = stages_and_cases(report)
    return [
        *speeds(cases),
        *comparisons(cases),
        tests(stages),
        graphs(stages),
        *(sanitizer(stages, name) for name in ("memcheck", "racecheck")),
        *large(stages.get("large")),
        line(
            f"everything inside {SECONDS // 60} minutes",
            f"{report['seconds'] / 60:.1f} minutes",
            report["seconds"] <= SECONDS,
        ),
    ]


def stages_and_cases(report: dict) -> tuple[dict[str, dict], list[dict]]:
    """The stages by name, and the timed workloads of all."""
    cases = [c for s in report["stages"] for c in s.get("result", {}).get("step", [])]
    return {s["name"]: s for s in report["stages"]}, cases


def bad_tests(count: dict[str, int]) -> int:
    return count.get("failed", 0) + count.get("failures", 0) + count.get("errors", 0)


def verdict(report: dict) -> str | None:
    """A sentence on bits and one on speed, once the tests and a step are known."""
    stages, cases = stages_and_cases(report)
    count = stages.get("cuda-tests", {}).get("tests")
    found = next(((c, r) for c in cases if (r := row(c, EIGHT))), None)
    if count is None or found is None:
        return None
    case, eight = found
    took, share = eight["ns_per_parameter"] * case["numel"] / 1e6, eight["of_copy_speed"]
    speed = f", {share:.0%} of a copy's speed" if share else ""
    return (
        f"{count['passed']} of {count['passed'] + bad_tests(count)} tests have the CPU's bits; "
        f"AdamW with 8-bit state over {case['workload']}: {took:.3f} ms{speed}"
    )


def line(asked: str, measured: str, met: bool | None) -> Line:
    return {"asked": asked, "measured": measured, "met": met}


def row(case: dict, name: str) -> dict | None:
    return next((r for r in case["rows"] if r["name"] == name), None)


def absence(case: dict | None, workload: str, name: str) -> str:
    """The reason why a contestant has no row."""
    if case is None:
        return f"not measured: {workload} was not reached"
    missing = case["missing"]
    return f"not measured: {missing.get(name) or missing.get('all') or 'it did not run'}"


def speeds(cases: list[dict]) -> Iterator[Line]:
    """The bytes of a step over its time, as a share of the copy's speed: step by step, host time
    included, and replayed as a graph.
    """
    for workload, minimum in SPEED:
        case = one(cases, workload)
        for name, how in ((EIGHT, ""), (IN_GRAPH, ", in a CUDA graph")):
            asked = f"8-bit step at {minimum:.0%} or more of the copy's speed, {workload.name}{how}"
            found = row(case, name) if case else None
            if case is None or found is None or found["of_copy_speed"] is None:
                yield line(asked, absence(case, workload.name, name), None)
                continue
            share = found["of_copy_speed"]
            cut = f" ({case['cut']}, as memory allows)" if case["cut"] else ""
            measured = f"{share:.1%}: {found['gb_per_second']:,.0f} GB/s{cut}"
            yield line(asked, measured, None if cut and share >= minimum else share >= minimum)


def one(cases: list[dict], workload: Workload) -> dict | None:
    return next((c for c in cases if c["workload"] == workload.name), None)


def comparisons(cases: list[dict]) -> Iterator[Line]:
    """Our time over theirs, the median over the rounds of both, in every workload with both."""
    from bench.measuring import clock

    for baseline in BASELINES:
        asked = f"8-bit step faster than {baseline}"
        found = {}
        for case in cases:
            ours, theirs = row(case, EIGHT), row(case, baseline)
            if ours and theirs:
                found[case["workload"]] = clock.ratio(ours["seconds"], theirs["seconds"])
        if not found:
            why = next((c for c in cases if c["rows"]), cases[0] if cases else None)
            yield line(asked, absence(why, "a workload", baseline), None)
            continue
        measured = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
        yield line(asked, f"its time is 1, ours: {measured}", all(r < 1 for r in found.values()))


def tests(stages: dict[str, dict]) -> Line:
    stage = stages.get("cuda-tests")
    asked = "the CUDA test suite is green"
    if stage is None or "tests" not in stage:
        return line(
            asked,
            unfinished(stage),
            None if stage is None or stage["status"] != "failed" else False,
        )
    count = stage["tests"]
    bad = bad_tests(count)
    measured = f"{count['passed']} passed, {bad} failed"
    measured += f", {count['skipped']} skipped" if count.get("skipped") else ""
    if stage["status"] != "passed":
        measured += f"; {unfinished(stage)}"
    return line(asked, measured, met(stage, bad))


def graphs(stages: dict[str, dict]) -> Line:
    """The line of the tests with "graph" in their names."""
    asked = "graph-captured steps equal eager ones"
    stage = stages.get("cuda-tests")
    if stage is None or "graphs" not in stage:
        return line(asked, unfinished(stage), None)
    count = stage["graphs"]
    measured = f"{count['passed']} tests passed, {count['failed']} failed"
    if count["failed"] or count["passed"] == 0:
        return line(asked, measured, False if count["failed"] else None)
    return line(asked, measured, True if stage["status"] in ("passed", "failed") else None)


def sanitizer(stages: dict[str, dict], name: str) -> Line:
    asked, stage = f"compute-sanitizer's {name} is clean over the small tests", stages.get(name)
    if stage is None or "summary" not in stage:
        return line(asked, unfinished(stage), None)
    measured = f"{stage['summary']}; {stage['tests']['passed']} tests passed"
    if stage["status"] != "passed":
        measured += f"; {unfinished(stage)}"
    return line(asked, measured, met(stage, len(stage["errors"])))


def large(stage: dict | None) -> Iterator[Line]:
    """A model of 8 B parameters inside 24 GiB, its peak beside the estimate, and its speed."""
    fits, near = "8 B parameters inside 24 GiB", "its peak within 5 % of lowbit.estimate"
    runs = (stage or {}).get("large", {})
    ours = [(name, found) for name, found in runs.items() if name.startswith("lowbit")]
    if not ours:
        for asked in (fits, near):
            yield line(asked, unfinished(stage), None)
        return
    left = {name for name in RUNS if name.startswith("lowbit")} - {name for name, _ in ours}
    failed = [f"{name}: {found['error']}" for name, found in ours if "error" in found]
    done = [(name, found) for name, found in ours if "error" not in found]
    peaks = [f"{name}: {found['peak'] / 2**30:.2f} GiB" for name, found in done]
    yield line(fits, "; ".join([*peaks, *failed]), False if failed else None if left else True)
    ratios = [found["ratio"] for _, found in done]
    measured = ", ".join(f"{ratio:.3f}" for ratio in ratios) or "not measured"
    far = any(abs(ratio - 1) > 0.05 for ratio in ratios)
    yield line(near, measured, False if far else None if left or failed else True)


def met(stage: dict, bad: int) -> bool | None:
    """Whether a stage met its goal, given its number of errors.
    A stage stopped early without errors proves nothing.
    """
    if stage["status"] == "passed":
        return bad == 0
    return False if bad or stage["status"] == "failed" else None


def unfinished(stage: dict | None) -> str:
    if stage is None:
        return "not reached"
    if stage["status"] in ("missing", "left out"):
        return stage["tail"]
    return stage["status"]


WORDS = {True: "yes", False: "**no**", None: "open"}


def page(found: list[Line]) -> str:
    return table(
        ["asked", "measured", "met"],
        [[x["asked"], x["measured"].replace("|", "/"), WORDS[x["met"]]] for x in found],
    )
