// The page of `inspect --html`: one file, nothing fetched, names from the checkpoint only ever as
// text.
#include "pipeline/commands.h"

namespace lowbit::ckpt {
namespace {

constexpr const char* kHead = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Checkpoint</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #1c2430; background: #fff; }
h1 { font-size: 1.5em; } h1, p, .small, .warning { overflow-wrap: break-word; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: top; }
th { color: #5b6675; font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } td { white-space: nowrap; } td.value { white-space: normal; min-width: 16em; overflow-wrap: break-word; }
.name { font-family: ui-monospace, monospace; overflow-wrap: break-word; } td.name { white-space: normal; } .found td.name { min-width: 11em; }
@media (max-width: 44em) { td.name { max-width: 60vw; } }
input { font: inherit; width: 100%; max-width: 30em; box-sizing: border-box; padding: .3em .5em; margin-top: 1em; color: inherit; background: transparent; border: 1px solid #93a0b0; border-radius: 4px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); gap: 1em; }
.card { border: 1px solid #d7dde5; border-radius: 6px; padding: .8em; }
.card .pictures { display: flex; flex-wrap: wrap; gap: .8em; margin-top: .5em; }
.axis { display: flex; justify-content: space-between; color: #5b6675; font-size: .8em; font-variant-numeric: tabular-nums; }
canvas { background: #f3f5f8; image-rendering: pixelated; } figure { margin: 0; }
figcaption, .small { color: #5b6675; font-size: .85em; }
.bar { background: #3565a8; height: .8em; display: inline-block; vertical-align: middle; }
.bad { color: #a32020; font-weight: 600; } .warning { color: #8a5a00; }
@media (prefers-color-scheme: dark) {
  body { color: #dbe2ea; background: #14181e; } .card { border-color: #333c48; } canvas { background: #20262e; }
  th, figcaption, .axis, .small { color: #93a0b0; } .bar { background: #6f9fe0; } .bad { color: #ff8a80; } .warning { color: #e0b060; }
}
</style></head><body><main id="page"></main>
<script type="application/json" id="report">)html";

constexpr const char* kTail = R"html(</script>
<script>
"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const page = document.getElementById("page");
function add(parent, tag, text, cls) {
  const e = document.createElement(tag);
  if (text !== undefined && text !== null) e.textContent = text;
  if (cls) e.className = cls;
  parent.appendChild(e);
  return e;
}
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let u = 0;
  while (bytes >= 1024 && u < 4) { bytes /= 1024; u++; }
  return (u ? bytes.toFixed(1) : bytes) + " " + units[u];
}
function share(n, of) { return of ? (100 * n / of).toFixed(n && n / of < 0.001 ? 4 : 2) + " %" : "-"; }
function number(x) { return x === 0 ? "0" : x >= 0.01 && x < 10000 ? String(Number(x.toPrecision(3))) : x.toExponential(1); }
function axis(figure, left, right) {
  const row = add(figure, "div", null, "axis");
  add(row, "span", left);
  add(row, "span", right);
}
function shown(value) {
  if (Array.isArray(value)) return "[" + value.map(shown).join(", ") + "]";
  return value === null ? "None" : typeof value === "object" ? JSON.stringify(value) : String(value);
}
function named(e, name) { // lines may end behind a dot or a stroke
  e.append(...name.split(/(?<=[._\/])/).flatMap((part, i) => i ? [document.createElement("wbr"), part] : [part]));
}
function table(parent, heads, rows) {
  const t = add(add(parent, "div", null, "wide"), "table"), head = add(t, "tr");
  for (const h of heads) add(head, "th", h.replace(/^#/, ""), h.startsWith("#") ? "n" : "");
  for (const row of rows) {
    const tr = add(t, "tr", null, heads[0] === "name" ? "found" : "");
    row.forEach((cell, i) => {
      const td = add(tr, "td", typeof cell === "object" || !i ? null : cell, heads[i].startsWith("#") ? "n" : heads[i] === "value" ? "value" : i ? "" : "name");
      if (!i) named(td, cell);
      if (typeof cell === "object") { const bar = add(td, "span", null, "bar"); bar.style.width = cell.width + "px"; }
    });
  }
}
function colour(t) { // dark blue to yellow, lighter as it grows
  const r = Math.round(255 * Math.min(1, Math.max(0, 1.6 * t - 0.4))), g = Math.round(255 * (0.1 + 0.8 * t)), b = Math.round(255 * (0.45 + 0.35 * Math.sin(Math.PI * t)) * (1 - 0.6 * t * t));
  return "rgb(" + r + "," + g + "," + b + ")";
}
function scales(parent, cells) {
  const figure = add(parent, "figure"), c = add(figure, "canvas", null, "scales");
  c.width = 144; c.height = 144;
  const g = c.getContext("2d"), known = cells.log2.filter(x => x !== null);
  const low = Math.min(...known), high = Math.max(...known);
  for (let r = 0; r < cells.rows; r++) for (let k = 0; k < cells.columns; k++) {
    const x = cells.log2[r * cells.columns + k];
    g.fillStyle = x === null ? "#888" : colour(high > low ? (x - low) / (high - low) : 0.5);
    const left = Math.floor(144 * k / cells.columns), top = Math.floor(144 * r / cells.rows);
    g.fillRect(left, top, Math.ceil(144 * (k + 1) / cells.columns) - left, Math.ceil(144 * (r + 1) / cells.rows) - top);
  }
  axis(figure, "columns →", "rows ↓");
  add(figure, "figcaption", known.length ? "magnitudes " + number(Math.pow(2, low)) + " to " + number(Math.pow(2, high)) : "all zero");
}
function histogram(parent, h) {
  const figure = add(parent, "figure"), c = add(figure, "canvas", null, "codes");
  c.width = 168; c.height = 144;
  const g = c.getContext("2d"), top = Math.log1p(Math.max(...h.histogram));
  const coded = h.levels !== undefined;
  let from = 0, to = h.histogram.length;
  if (!coded) {
    while (from < to - 1 && !h.histogram[from]) from++;
    while (to > from + 1 && !h.histogram[to - 1]) to--;
  }
  g.fillStyle = getComputedStyle(document.querySelector(".bar") || document.body).backgroundColor;
  if (g.fillStyle === "rgba(0, 0, 0, 0)") g.fillStyle = "#3565a8";
  for (let i = from; i < to; i++) {
    const left = 168 * (i - from) / (to - from), height = top ? 144 * Math.log1p(h.histogram[i]) / top : 0;
    g.fillRect(left, 144 - height, Math.max(1, 168 / (to - from) - (to - from < 40 ? 1 : 0)), height);
  }
  axis(figure, coded ? "0" : number(Math.pow(2, from - 64)), coded ? String(to - 1) : number(Math.pow(2, to - 64)));
  add(figure, "figcaption", "how often each " + (coded ? "code" : "magnitude") + " occurs, on a log scale up to " + Math.max(...h.histogram));
}
document.title = report.path;
add(page, "h1", report.path);
add(page, "p", [report.container, report.dialect ? report.dialect + (report.algorithm ? " " + report.algorithm : "") : "no optimizer state that is known",
  report.tensors.length + " tensors", size(report.bytes), report.steps.length ? "step " + report.steps.join(", ") : ""].filter(Boolean).join(" · "));
for (const fact of report.facts) add(page, "div", fact, "small");
for (const warning of report.warnings) add(page, "div", "warning: " + warning, "warning");
const search = add(page, "input");
search.type = "search";
search.placeholder = "search names";
search.setAttribute("aria-label", "search names");
search.addEventListener("input", () => {
  const word = search.value.toLowerCase();
  for (const e of document.querySelectorAll(".card, tr.found"))
    e.hidden = !e.firstChild.textContent.toLowerCase().includes(word);
});
add(page, "h2", "What takes the room");
table(page, ["kind", "#tensors", "#bytes", " "], Object.entries(report.bytes_by_kind).sort((a, b) => b[1].bytes - a[1].bytes)
  .map(([kind, sum]) => [kind, sum.tensors, size(sum.bytes), {width: Math.round(300 * sum.bytes / Math.max(1, report.bytes))}]));
if (report.groups && report.groups.length) {
  add(page, "h2", "Groups");
  report.groups.forEach((group, i) => {
    add(page, "p", "group " + i + ", " + group.parameters + " parameters: " +
      Object.entries(group.settings).map(([k, v]) => k + " = " + shown(v)).join(", "));
  });
}
if (report.states && report.states.length) {
  add(page, "h2", "State");
  const cards = add(page, "div", null, "cards");
  for (const s of report.states) {
    const card = add(cards, "div", null, "card"), h = s.health;
    add(card, "div", s.parameter, "name");
    add(card, "div", s.state + " · " + s.stored_as + " · [" + s.shape.join(", ") + "] · " + size(s.bytes), "small");
    if (!h) continue;
    const facts = ["zero " + share(h.zero, h.elements)];
    if (h.saturated !== undefined) facts.push("saturated " + share(h.saturated, h.elements), h.used + " of " + h.levels + " codes");
    if (h.most) facts.push(number(h.least) + " to " + number(h.most));
    add(card, "div", facts.join(" · "), "small");
    if (h.nan + h.infinite) add(card, "div", (h.nan + h.infinite) + " values are not finite", "bad");
    if (!h.elements) continue;
    const pictures = add(card, "div", null, "pictures");
    scales(pictures, h.cells);
    histogram(pictures, h);
  }
}
add(page, "h2", "Tensors");
table(page, ["name", "dtype", "shape", "#chunks", "#bytes", "kind"],
  report.tensors.map(t => [t.name, t.dtype, "[" + t.shape.join(", ") + "]", t.chunks, size(t.bytes), t.kind]));
const values = Object.entries(report.values);
if (values.length) {
  add(page, "h2", "Values");
  table(page, ["name", "value"], values.map(([name, value]) => [name, shown(value)]));
}
</script></body></html>
)html";

}  // namespace

std::string html_page(const Json& report) {
  // '<' in a name must not end the element that holds the report.
  std::string json;
  for (const char c : report.dump(-1, ' ', true, Json::error_handler_t::replace)) {
    if (c == '<') {
      json += "\\u003c";
    } else {
      json += c;
    }
  }
  return kHead + json + kTail;
}

}  // namespace lowbit::ckpt
