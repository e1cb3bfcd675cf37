"""What people meet around lowbit-ckpt: examples in --help, completions, the manual page,
and the page for a browser.
"""

import html.parser
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.paths import ROOT
from tests.support.peers.files import TOOL, need_tool
from tests.support.require import need

pytestmark = pytest.mark.slow

need_tool()
NASTY = "</script><img src=x onerror=\"document.title='owned'\">"


def run(*arguments, code=0, cwd=None):
    done = subprocess.run(
        [TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=600, cwd=cwd
    )
    assert done.returncode == code, f"{arguments}: exit {done.returncode}, {done.stderr}"
    return done.stdout


def commands():
    """Names of the subcommands, as --help has them."""
    text = run("--help")
    return re.findall(r"^  ([a-z]+) ", text[text.index("Commands:") :], re.M)


def options(command):
    """Long options of a subcommand, as its --help has them."""
    return re.findall(r"^  (?:-\w,)?(--[a-z][a-z-]*)", run(command, "--help"), re.M)


def trained(steps=3, full_precision=64):
    """A small net after some steps of AdamW."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(full_precision, 96), nn.GELU(), nn.Linear(96, 8))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(steps):
        net(torch.randn(4, full_precision)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return net, opt


def saved(path, **more):
    """A directory as FSDP runs leave it: names for keys."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net, opt = trained()
    model, optim = get_state_dict(net, opt)
    dcp.save({"model": model, "optim": optim, **more}, checkpoint_id=path, no_dist=True)
    return path


# --help


def lines_of_help():
    texts = [run("--help"), *(run(name, "--help") for name in commands())]
    return [line for text in texts for line in re.findall(r"^  (lowbit-ckpt .*)$", text, re.M)]


def test_every_command_has_an_example_and_the_common_tasks_are_in_the_first_help():
    for name in commands():
        assert re.search(rf"^  lowbit-ckpt {name} ", run(name, "--help"), re.M), name
    first = run("--help")
    for task in {"inspect", "verify", "convert", "reshard", "diff"} & set(commands()):
        assert re.search(rf"^  lowbit-ckpt {task} ", first, re.M), task
    if "convert" in commands():
        for words in ("--to lowbit --state-format 8bit", "--to torchao", "step-1000.pt"):
            assert words in first
    for text in (first, *(run(name, "--help") for name in commands())):
        assert len(text.splitlines()) < 90


def test_every_example_in_help_runs(tmp_path):
    lines = list(dict.fromkeys(lines_of_help()))
    assert len(lines) >= len(commands())
    saved(tmp_path / "step-1000")
    if any("bnb.pt" in line for line in lines):
        need(
            "bitsandbytes",
            find_spec("bitsandbytes") is not None,
            "bitsandbytes is not installed: pip install bitsandbytes",
        )
        import bitsandbytes

        net, _ = trained(full_precision=128)
        opt = bitsandbytes.optim.AdamW8bit(net.parameters())
        net(torch.randn(2, 128)).sum().backward()
        opt.step()
        torch.save(opt.state_dict(), tmp_path / "bnb.pt")
    path = f"{Path(TOOL).parent}:{os.environ['PATH']}"
    # In an order in which what one reads was written by another.
    lines.sort(key=lambda line: (" diff " in line, "-8bit " in line and " convert " in line))
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{line}: exit {done.returncode}, {done.stderr}"
        if "--dry-run" in line:
            assert not (tmp_path / shlex.split(line)[3]).exists()
    left = {p.name for p in tmp_path.iterdir()}
    assert not [name for name in left if name.startswith(".")]


# What a page types to make a file for the others.
OWN = ["lowbit-ckpt convert step-1000 bnb.pt --to bitsandbytes --container torch"]


def test_lines_in_the_docs_are_those_of_help():
    known = lines_of_help()
    pages = {"README.md": 0, "docs/ckpt.md": 5}  # how many lines at least
    for page, least in pages.items():  # other lines of other pages run in tests/repo/test_docs.py
        text = (ROOT / page).read_text()
        lines = [
            line.split("#")[0].strip() for line in re.findall(r"^(lowbit-ckpt .*)$", text, re.M)
        ]
        lines = [line for line in lines if line not in OWN]
        assert len(lines) >= least, page
        assert not [line for line in lines if line not in known], page


def test_the_reference_is_what_help_says():
    """docs/reference/ckpt-options.md; `python docs/site/ckpt_options.py` writes it."""
    path = ROOT / "docs" / "site" / "ckpt_options.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.page(lambda *command: run(*command, "--help"))
    assert script.PAGE.read_text() == made
    for name in commands():
        section = made[made.index(f"\n## {name}\n") :].split("\n## ")[1]
        missing = [o for o in options(name) if f"| `{o}" not in section]
        assert missing in ([], ["--help"]), name


# Completions


def complete(*words):
    """What bash offers for the last word."""
    program = """
source <("$1" completion bash)
shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_lowbit_ckpt
printf '%s\\n' "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "-c", program, "bash", TOOL, "lowbit-ckpt", *words],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return set(done.stdout.split("\n")) - {""}


def test_bash_completes_commands_options_values_and_files(tmp_path, monkeypatch):
    names = commands()
    assert "man" not in names and complete("") == {*names}
    assert complete("-") == {"-h", "--help", "--version"}
    assert complete("ver") == {"verify"}
    for name in names:
        assert complete(name, "--") == {*options(name)}, name
        assert complete(name, "x", "-") == {"-h", *options(name)}, name
    assert complete("--version", "ins") == {"inspect"}
    assert complete("completion", "") == {"bash", "zsh", "fish"}
    assert complete("completion", "f") == {"fish"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step 1").mkdir()
    (tmp_path / "step-2.pt").touch()
    (tmp_path / "other").touch()
    assert complete("verify", "st") == {"step 1", "step-2.pt"}
    assert complete("verify", "") == {"step 1", "step-2.pt", "other"}
    assert complete("verify", "--threads", "") == set()
    for name in names:  # an option with choices offers them, also behind '='
        for option, choices in re.findall(
            r"^  (--[a-z-]+) [A-Z]+:\{([^}]*)\}", run(name, "--help"), re.M
        ):
            assert complete(name, option, "") == set(choices.split(","))
            assert complete(name, option, "=", "") == set(choices.split(","))


def test_convert_offers_dialects_and_containers():
    assert {"torch", "lowbit"} <= complete("convert", "a", "b", "--to", "")
    assert complete("convert", "--from", "") - complete("convert", "--to", "") == {
        "megatron",
        "transformers",
    }
    assert "megatron" not in run("convert", "--help")
    assert {"dcp", "torch", "safetensors"} <= complete("convert", "--container", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(shell, tmp_path):
    script = tmp_path / "script"
    script.write_text(run("completion", shell))
    text = script.read_text()
    for name in commands():
        assert name in text
        for option in options(name):
            assert (option if shell == "zsh" else f" -l {option[2:]}") in text, (name, option)
    program = shutil.which(shell)
    need(shell, program is not None, f"{shell} is not installed, so its script was only read")
    assert program is not None
    done = subprocess.run([program, "-n", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr
    if shell == "fish":
        ask = (
            f"source {script}; complete -C 'lowbit-ckpt ver'; complete "
            "-C 'lowbit-ckpt verify --thr'"
        )
        out = subprocess.run([program, "-c", ask], capture_output=True, text=True, timeout=600)
        assert "verify" in out.stdout and "--threads" in out.stdout
    else:
        ask = f"autoload -U compinit; compinit -D -u; source {script}; print $_comps[lowbit-ckpt]"
        out = subprocess.run(
            [program, "-f", "-c", ask], capture_output=True, text=True, timeout=600
        )
        assert out.stdout.strip() == "_lowbit_ckpt", out.stderr


# The manual page


def test_manual_page_has_every_command_and_option():
    page = run("man").replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    for name in commands():
        start = page.index(f".SS {name}\n")
        section = page[start : page.index("\n.S", start + 1)]
        for option in options(name):
            assert re.search(rf"^(-\w, )?{option}\b", section, re.M), (name, option)
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "EXAMPLES", "FILES"):
        assert f".SH {heading}\n" in page
    for line in lines_of_help():
        assert line.replace("'", "\\(aq") in page


def test_manual_page_renders_without_a_warning():
    groff = shutil.which("groff")
    need("groff", groff is not None, "groff is not installed: apt-get install groff-base")
    assert groff is not None
    done = subprocess.run(
        [groff, "-man", "-Tutf8", "-ww", "-rHY=0"],
        input=run("man"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stderr == ""
    text = re.sub(r"\x1b\[[\d;]*m|.\x08", "", done.stdout)
    for name in commands():
        assert f"lowbit-ckpt {name}" in text
    assert "--include '*.exp_avg_sq'" in text or "--include" not in text


# The page for a browser


class Page(html.parser.HTMLParser):
    """What a page shows: its text by element, without scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.cards, self.title, self.all = [], [], [], "", []
        self.open, self.hidden, self.styles = [], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        if tag in ("script", "style"):
            self.hidden += 1
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if given.get("class") == "card":
            self.cards.append([])
        if "style" in given:
            self.styles.append(given["style"])
        if tag != "wbr":  # has no end
            self.open.append((tag, given.get("class")))

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.hidden -= 1
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.hidden:
            return
        tag, _ = self.open[-1] if self.open else ("", None)
        if tag == "title":
            self.title += data
        if tag in ("td", "th"):
            self.rows[-1][-1] += data
        if self.cards and any(c == "card" for _, c in self.open):
            self.cards[-1].append(data)
        self.all.append(data)

    def table(self, *heads):
        """Rows of the table with these heads."""
        at = self.rows.index(list(heads))
        out = []
        for row in self.rows[at + 1 :]:
            if len(row) != len(heads) or row[0] in ("name", "kind"):
                break
            out.append(row)
        return out


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def browse(page, tmp_path, *, dark=False, picture=None):
    """The document as the browser has it after its scripts ran;
    a screenshot where one is asked for.
    """
    need("chromium", BROWSER is not None, "no chromium: apt-get install chromium")
    what = [f"--screenshot={picture}"] if picture else ["--dump-dom"]
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--force-device-scale-factor=1",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1200,3000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *what,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def pixels(path):
    """A picture as numbers: [height, width, 3]."""
    from matplotlib.image import imread  # of the test extras

    return torch.from_numpy(imread(path)[:, :, :3] * 255).round().to(torch.int64)


def size(count):
    """Bytes as the page writes them."""
    units, u = ["B", "KiB", "MiB", "GiB", "TiB"], 0
    while count >= 1024 and u < 4:
        count, u = count / 1024, u + 1
    return f"{count:.1f} {units[u]}" if u else f"{count} B"


def share(part, of):
    if not of:
        return "-"
    return f"{100 * part / of:.{4 if part and part / of < 0.001 else 2}f} %"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page, and the JSON of the same checkpoint."""
    folder = tmp_path_factory.mktemp("page")
    source = saved(folder / "run", **{NASTY: torch.arange(6.0), "note": NASTY, "state": {NASTY: 1}})
    out = folder / "page.html"
    run("inspect", source, "--html", out)
    return out, json.loads(run("inspect", source, "--json", "--health"))


def probe(page, tmp_path, **how):
    """Where the canvases are, how many colours each has, and the page's own colours."""
    script = """<script>
const found = [...document.querySelectorAll("canvas")].map(c => {
  const {x, y, width, height} = c.getBoundingClientRect();
  const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  const colours = new Set();
  for (let i = 0; i < d.length; i += 4)
    colours.add(d[i] << 24 | d[i + 1] << 16 | d[i + 2] << 8 | d[i + 3]);
  return {kind: c.className, x, y, width, height, colours: colours.size};
});
const style = getComputedStyle(document.body);
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = JSON.stringify({
  canvases: found, title: document.title, images: document.images.length,
  dark: matchMedia("(prefers-color-scheme: dark)").matches, text: style.color,
  back: style.backgroundColor});
document.body.append(probe);
</script>"""
    copy = tmp_path / "probe.html"
    copy.write_text(page.read_text().replace("</body>", script + "</body>"))
    text = browse(copy, tmp_path, **how)
    found = re.search(r'<pre id="probe">(.*?)</pre>', text, re.S)
    assert found, text[-2000:]
    return json.loads(found[1])


def test_page_is_one_file_that_fetches_nothing(page):
    text = page[0].read_text()
    assert "default-src 'none'" in text
    assert not re.search(
        r"(src|href)\s*=|https?://|@import|url\(|fetch\(|XMLHttpRequest|eval\(|innerHTML",
        text.replace(NASTY, "").replace("\\u003cimg src=x", ""),
    )


def test_page_is_for_phones_and_people(page, tmp_path):
    text = page[0].read_text()
    assert '<meta name="viewport" content="width=device-width' in text
    assert "anywhere" not in text  # no word is broken in a column
    shown = browse(page[0], tmp_path)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", shown)
    assert captions and not any("2^" in c or re.search(r"\d\.\d{4}", c) for c in captions)
    assert shown.count('class="axis"') == len(captions) and 'type="search"' in shown


PHONE = 390  # pixels
LONG = "model.layers.{}.block_sparse_moe.experts.7.feed_forward.gate_projection.base_layer.weight"


@pytest.fixture(scope="module")
def page_of_long_names(tmp_path_factory):
    """As `page`, of names wider than a phone, one of them without a dot. A group lists all."""
    folder = tmp_path_factory.mktemp("long")
    names = [LONG.format(1), LONG.format(2), "gate_projection_base_layer" * 4]
    params = [(name, nn.Parameter(torch.ones(8, 32))) for name in names]
    opt = torch.optim.AdamW(params)
    for _, p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    weights = {name: p.detach() for name, p in params}
    torch.save({"model": weights, "optimizer": opt.state_dict()}, folder / "run.pt")
    out = folder / "page.html"
    run("inspect", folder / "run.pt", "--html", out)
    return out, json.loads(run("inspect", folder / "run.pt", "--json", "--health"))


@pytest.mark.parametrize("names", ["page", "page_of_long_names"])
def test_search_filters_and_nothing_is_cut_on_a_phone(names, request, tmp_path):
    """In a frame as wide as a phone, since a browser's window is never as narrow."""
    script = """<script>{
const box = document.querySelector("input[type=search]");
const seen = e => e.offsetParent !== null;
const shown = () => [...document.querySelectorAll("tr, .card")].filter(seen).length;
const before = shown();
const look = text => {
  box.value = text;
  box.dispatchEvent(new Event("input", {bubbles: true}));
  return shown();
};
const some = look("SEARCHED"), none = look("no such name anywhere");
const after = look("");
const wide = document.documentElement.scrollWidth;
const cut = [...document.querySelectorAll("body *")].filter(e => {
  const r = e.getBoundingClientRect();
  if (!r.width || r.right <= innerWidth + 1) return false;
  for (let p = e.parentElement; p; p = p.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(p).overflowX)) return false;
  return true;
}).map(e => e.tagName + "." + e.className);
const widest = Math.max(...[...document.querySelectorAll("td.name")].map(e => e.offsetWidth));
parent.postMessage(
  JSON.stringify({before, some, none, after, wide, inner: innerWidth, cut, widest}), "*");
}</script>"""
    path, report = request.getfixturevalue(names)
    name = report["states"][0]["parameter"]
    text = path.read_text().replace("</body>", script.replace("SEARCHED", name) + "</body>")
    (tmp_path / "inner.html").write_text(text)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<!doctype html><iframe src="inner.html" width="{PHONE}" height="900" '
        'frameborder="0"></iframe><pre id="probe"></pre><script>onmessage = e => '
        'document.getElementById("probe").textContent = e.data</script>'
    )
    found = re.search(r'<pre id="probe">(.+?)</pre>', browse(frame, tmp_path), re.S)
    assert found
    said = json.loads(html.unescape(found[1]))
    assert said["inner"] == PHONE
    assert 0 < said["some"] < said["before"] and said["none"] < said["some"], said
    assert said["after"] == said["before"]
    assert said["wide"] <= PHONE and not said["cut"], said
    assert said["widest"] <= 0.7 * PHONE, "a name leaves room for the column beside it"


def test_page_shows_what_the_json_says(page, tmp_path):
    path, report = page
    shown = Page(browse(path, tmp_path))
    everything = "\n".join(shown.all)
    assert report["container"] in everything and report["dialect"] in everything
    assert report["tensors"] and report["states"] and report["groups"]
    assert shown.table("name", "dtype", "shape", "chunks", "bytes", "kind") == [
        [
            t["name"],
            t["dtype"],
            "[" + ", ".join(map(str, t["shape"])) + "]",
            str(t["chunks"]),
            size(t["bytes"]),
            t["kind"],
        ]
        for t in report["tensors"]
    ]
    kinds = sorted(report["bytes_by_kind"].items(), key=lambda item: -item[1]["bytes"])
    rows = shown.table("kind", "tensors", "bytes", " ")
    assert [row[:3] for row in rows] == [[k, str(s["tensors"]), size(s["bytes"])] for k, s in kinds]
    widths = [math.floor(300 * s["bytes"] / max(1, report["bytes"]) + 0.5) for _, s in kinds]
    assert [s for s in shown.styles if s.startswith("width")] == [f"width: {w}px;" for w in widths]
    assert len(shown.cards) == len(report["states"])
    for card, state in zip(shown.cards, report["states"], strict=True):
        health, text = state["health"], "\n".join(card)
        assert card[0] == state["parameter"]
        sizes = ", ".join(map(str, state["shape"]))
        assert (
            card[1]
            == f"{state['state']} · {state['stored_as']} · [{sizes}] · {size(state['bytes'])}"
        )
        assert f"zero {share(health['zero'], health['elements'])}" in text
        if "saturated" in health:
            assert f"saturated {share(health['saturated'], health['elements'])}" in text
    assert shown.tags.count("canvas") == 2 * sum(
        1 for s in report["states"] if s["health"]["elements"]
    )
    values = dict(shown.table("name", "value"))
    assert set(values) == set(report["values"])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_paints_its_pictures(page, tmp_path, dark):
    path = page[0]
    found = probe(path, tmp_path, dark=dark)
    assert found["dark"] is dark, "the browser was not asked for the scheme"
    back, text = ([int(n) for n in re.findall(r"\d+", found[k])[:3]] for k in ("back", "text"))
    assert (sum(back) < 150 and sum(text) > 550) if dark else (sum(back) > 700 and sum(text) < 250)
    assert found["canvases"]
    for canvas in found["canvases"]:
        assert canvas["colours"] >= 2, canvas
    picture = tmp_path / "page.png"
    browse(path, tmp_path, dark=dark, picture=picture)
    image = pixels(picture)
    assert image[2, 2].tolist() == back
    seen = 0
    for canvas in found["canvases"]:
        x, y, w, h = (round(canvas[k]) for k in ("x", "y", "width", "height"))
        if y + h > image.shape[0]:
            continue
        part = image[y : y + h, x : x + w].reshape(-1, 3)
        assert len(part.unique(dim=0)) >= 2, canvas
        seen += 1
    assert seen >= min(4, len(found["canvases"]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_hostile_name_is_text_and_runs_nothing(page, tmp_path, dark):
    path, report = page
    names = [t["name"] for t in report["tensors"]]
    assert NASTY in names and NASTY in json.dumps(report["values"]).replace('\\"', '"')
    assert NASTY not in path.read_text(), "the name must not stand in the page as it is"
    found = probe(path, tmp_path, dark=dark)
    assert found["images"] == 0 and found["title"] != "owned"
    shown = Page(browse(path, tmp_path, dark=dark))
    assert "img" not in shown.tags and shown.title != "owned"
    assert NASTY in [row[0] for row in shown.rows if row]
    assert shown.tags.count("script") == 2
