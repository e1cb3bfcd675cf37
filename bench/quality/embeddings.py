"""What the state of input embeddings and output heads may be: a small GPT with a vocabulary of
16,384 words, most of whose rows get no gradient in most steps.

    python -m bench.quality.embeddings                 # runs what is missing, the most useful
                                                       first; stop it at any time
    python -m bench.quality.embeddings --minutes 60    # no new run after an hour
    python -m bench.quality.embeddings --list          # what is there and what is missing
    python -m bench.quality --page                     # docs/quality.md has the section

The body has 8-bit state, all weights are bfloat16 with stochastic rounding, and only the state of
the embedding, of the head, or of the matrix that is both differs. All runs of a seed begin with
the same weights and see the same batches. Each finished run is a line of
bench/results/quality_embeddings.jsonl; an interrupted one starts over, as it takes a minute.

Words are those of Python files that are on every machine: the standard library's from scratch, and
those of torch's own modules for fine-tuning a model that was trained on the former.
"""

from __future__ import annotations

import argparse
import collections
import math
import pathlib
import re
import statistics
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lowbit
from bench import ROOT
from bench.measuring import machine
from bench.measuring.recipe import load_recipe
from bench.quality.runs import Lines, append, best_of, found, read

RESULTS = ROOT / "bench" / "results" / "quality_embeddings.jsonl"
TRAINED = ROOT / "out" / "quality"  # of the models that are fine-tuned
VOCABULARY, CONTEXT, BATCH = 16_384, 64, 4
MODEL = {"width": 64, "depth": 2, "heads": 2, "context": CONTEXT}
WARM_UP, WEIGHT_DECAY, BETAS = 20, 0.1, (0.9, 0.999)
HELD_OUT = (8, 32)  # batches and sequences of each
SEEDS, MORE_SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9), 100
# Classes of words by how often one comes in a step, at least, in the mean.
CLASSES = {"every step": 1.0, "every 10th": 0.1, "every 100th": 0.01, "rarer": 0.0}
NOT_READ = {"site-packages", "test", "tests", "idle_test", "encodings"}
# Each number is a word, and each sign; indentation counts by its depth.
WORD = re.compile(r"\n[ ]*|[A-Za-z]+|\d|[^\sA-Za-z\d]")


@dataclass(frozen=True)
class Kind:
    """What is trained.

    Attributes:
        tied: one matrix is the embedding and the head.
        steps: of a run.
        rates: learning rates, of which all runs take the one that is best with float32 state.
        base: the steps of the model that is fine-tuned; None is from scratch.
    """

    tied: bool
    steps: int
    rates: tuple[float, ...]
    base: int | None = None


KINDS = {
    "untied": Kind(False, 400, (1e-3, 2e-3, 4e-3, 8e-3)),
    "tied": Kind(True, 400, (5e-4, 1e-3, 2e-3)),
    "untied, fine-tuned": Kind(False, 150, (5e-4, 1e-3, 2e-3, 4e-3), 1500),
    "tied, fine-tuned": Kind(True, 150, (5e-4, 1e-3, 2e-3, 4e-3), 1500),
}
SAME = "float32"  # for all: what others are compared with
AGAIN = "float32, other random bits"  # differs in nothing: how far chance alone moves a loss
HIGHER, HIGHER_BY = "float32, rate 5 % higher", 1.05  # what a small difference in steps does
CONTROLS = (AGAIN, HIGHER)
FORMATS = ("8bit", "4bit", "bfloat16_stochastic")


def contestants(kind: Kind) -> dict[str, tuple[str, str]]:
    """By name, the state format of the embedding and that of the head."""
    same = dict.fromkeys((SAME, *CONTROLS), (SAME, SAME))
    if kind.tied:
        return same | {f"{f} for both": (f, f) for f in FORMATS}
    return (
        same
        | {f"{f} embedding": (f, SAME) for f in FORMATS}
        | {f"{f} head": (SAME, f) for f in FORMATS}
        | {"8bit for both": ("8bit", "8bit")}
    )


@dataclass(frozen=True)
class Run:
    kind: str
    name: str
    lr: float
    seed: int

    def key(self) -> dict[str, Any]:
        return {"study": self.kind, "run": self.name, "lr": self.lr, "seed": self.seed}


class Words:
    """Numbered words of a text; the last twentieth of its files is held out."""

    def __init__(self, words: list[list[str]], numbers: dict[str, int]) -> None:
        files = [
            torch.tensor([numbers.get(w, 0) for w in file], dtype=torch.long) for file in words
        ]
        held = max(1, len(files) // 20)
        self.train, self.held_out = torch.cat(files[:-held]), torch.cat(files[-held:])
        count = torch.bincount(self.train, minlength=VOCABULARY).double()
        in_step = count / len(self.train) * BATCH * CONTEXT
        at_least = torch.tensor(list(CLASSES.values()), dtype=torch.float64)
        self.classes = (in_step[:, None] < at_least).sum(1)  # by word, an index in CLASSES

    def batch(self, seed: int, step: int, size: int = BATCH, held_out: bool = False) -> Any:
        """int64 [size, CONTEXT + 1]."""
        text = self.held_out if held_out else self.train
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=draw)
        return torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()])


def texts() -> dict[str, Words]:
    """The text of training from scratch, and that of fine-tuning."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    places = {"scratch": library, "fine-tuned": pathlib.Path(torch.__file__).parent / "nn"}
    words: dict[str, list[list[str]]] = {}
    for name, root in places.items():
        paths = [p for p in root.rglob("*.py") if not NOT_READ & set(p.relative_to(root).parts)]
        # by their names' checksums, so that held-out files are of all subjects
        paths.sort(key=lambda p: (zlib.crc32(p.name.encode()), p))
        words[name] = [WORD.findall(p.read_text(errors="replace")) for p in paths]
    counts = collections.Counter(w for files in words.values() for file in files for w in file)
    known = sorted(counts, key=lambda w: (-counts[w], w))[: VOCABULARY - 1]
    numbers = {w: i + 1 for i, w in enumerate(known)}  # 0 is any other word
    return {name: Words(files, numbers) for name, files in words.items()}


def make(recipe: Any, tied: bool, seed: int) -> nn.Module:
    """The recipe's GPT with the vocabulary; weights are bfloat16, products float32."""
    torch.manual_seed(seed)
    model = recipe.GPT(**MODEL, compute=torch.float32)
    model.tokens = nn.Embedding(VOCABULARY, MODEL["width"])
    model.head = recipe.Linear(MODEL["width"], VOCABULARY, bias=False)
    nn.init.normal_(model.tokens.weight, std=0.02)
    nn.init.normal_(model.head.weight, std=0.02)
    if tied:
        model.head.weight = model.tokens.weight
    return model.to(torch.bfloat16)


def optimizer(model: Any, run: Run, seed: int) -> torch.optim.Optimizer:
    embedding, head = contestants(KINDS[run.kind])[run.name]
    special = {id(model.head.weight): head, id(model.tokens.weight): embedding}
    groups: dict[str, list[Any]] = {}
    for name, p in model.named_parameters():
        groups.setdefault(special.get(id(p), "8bit"), []).append((name, p))
    return lowbit.AdamW(
        [{"params": named, "state_format": state} for state, named in groups.items()],
        lr=run.lr,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        seed=seed,
    )


def steps(
    recipe: Any, model: Any, text: Words, run: Run, count: int, seed: int
) -> tuple[list[float], bool]:
    """The losses of training, and whether all are finite."""
    opt = optimizer(model, run, seed)
    highest = run.lr * (HIGHER_BY if run.name == HIGHER else 1.0)
    losses = []
    for step in range(count):
        warm = min(1.0, (step + 1) / WARM_UP)
        lr = highest * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / count)))
        for group in opt.param_groups:
            group["lr"] = lr
        loss = recipe.loss_of(model, text.batch(run.seed, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return losses, False
    return losses, True


def held_out(model: Any, text: Words) -> dict[str, Any]:
    """The mean loss of held-out words, and that by the class of the word that is to be said
    (`said`, a row of the head) and of the word before (`read`, a row of the embedding).
    """
    losses, said, read = [], [], []
    with torch.no_grad():
        for i in range(HELD_OUT[0]):
            ids = text.batch(1, i, HELD_OUT[1], held_out=True)
            logits = model(ids[:, :-1]).float().flatten(0, 1)
            losses.append(F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none"))
            said.append(text.classes[ids[:, 1:].flatten()])
            read.append(text.classes[ids[:, :-1].flatten()])
    loss = torch.cat(losses).double()

    def by_class(several: list[torch.Tensor]) -> dict[str, float]:
        number = torch.cat(several)
        return {name: rounded(loss[number == i]) for i, name in enumerate(CLASSES)}

    return {"held_out_loss": rounded(loss), "said": by_class(said), "read": by_class(read)}


def rounded(losses: torch.Tensor) -> float:
    return round(losses.mean().item(), 5)


class Runner:
    """The texts, the machine and the trained models of runs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.recipe, self.texts = load_recipe(), texts()
        facts = machine.describe("cpu")
        self.settings = {
            **MODEL,
            "vocabulary": VOCABULARY,
            "batch": BATCH,
            "warm_up": WARM_UP,
            "weight_decay": WEIGHT_DECAY,
            "betas": list(BETAS),
            "text_crc32": [zlib.crc32(t.train.numpy()) for t in self.texts.values()],
        }
        self.machine = {k: facts[k] for k in ("cpu", "isa", "python")}
        self.machine["torch"] = torch.__version__

    def lines(self) -> Lines:
        return [x for x in read(RESULTS) if x["settings"] == self.settings]

    def base(self, kind: str, steps_before: int) -> dict[str, Any]:
        """The weights of a model that was trained with float32 state."""
        scratch = kind.removesuffix(", fine-tuned")
        path = TRAINED / f"words-{scratch}-{steps_before}-{self.settings['text_crc32'][0]}.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            run = Run(scratch, SAME, KINDS[scratch].rates[1], TUNING_SEED + 1)
            model = make(self.recipe, KINDS[kind].tied, run.seed)
            steps(self.recipe, model, self.texts["scratch"], run, steps_before, run.seed)
            print(f"the trained model: {held_out(model, self.texts['scratch'])}", flush=True)
            torch.save(model.state_dict(), path)
        return torch.load(path, weights_only=True)

    def run(self, run: Run) -> dict[str, Any]:
        kind = KINDS[run.kind]
        model = make(self.recipe, kind.tied, run.seed)
        text = self.texts["fine-tuned" if kind.base else "scratch"]
        base = None
        if kind.base:
            weights = self.base(run.kind, kind.base)
            base = digest_of(weights)
            others = {x.get("base") for x in self.lines() if x["study"] == run.kind} - {base}
            if others:
                raise SystemExit(
                    f"the lines of {run.kind!r} in {RESULTS.name} are of another trained model "
                    f"({', '.join(map(str, others))}, here {base}): move them away, since only "
                    "runs that begin with the same weights are pairs"
                )
            model.load_state_dict(weights)
        seed = run.seed + (1000 if run.name == AGAIN else 0)
        began = time.process_time()
        losses, finite = steps(self.recipe, model, text, run, kind.steps, seed)
        made = held_out(model, text) if finite else {"held_out_loss": None}
        line = {
            **run.key(),
            **made,
            "losses": [
                round(statistics.fmean(losses[i : i + 20]), 4) for i in range(0, len(losses), 20)
            ],
            "highest": round(max(losses[WARM_UP:], default=math.inf), 4),
            "steps": kind.steps,
            **({} if base is None else {"base": base}),
            "processor_seconds": round(time.process_time() - began, 1),
            "settings": self.settings,
            "machine": self.machine,
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        }
        append(RESULTS, line)
        return line


def digest_of(weights: dict[str, Any]) -> int:
    """Of the model that is fine-tuned: a CRC-32 of its weights."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].contiguous().view(torch.uint8).numpy(), crc)
    return crc


def tuning(kind: str) -> list[Run]:
    return [Run(kind, SAME, lr, TUNING_SEED) for lr in KINDS[kind].rates]


def best_rate(lines: Lines, kind: str) -> float | None:
    """The rate of the least loss of float32 state, None unless all have run."""
    return best_of(lines, tuning(kind))


def seeds_of(kind: str, times: float) -> tuple[int, ...]:
    """Tied weights have more: with one matrix for both, runs part more by chance."""
    return (*SEEDS, *MORE_SEEDS) if (kind, times) == ("tied", 0.5) else SEEDS


def compared(
    lines: Lines,
    kind: str,
    formats: tuple[str, ...] | None = None,
    times: float = 1.0,
) -> Iterator[Run]:
    """The runs of contestants whose names begin with `formats` at a multiple of the best rate,
    seed by seed; none before that is known.
    """
    best = best_rate(lines, kind)
    names = [n for n in contestants(KINDS[kind]) if formats is None or n.startswith(formats)]
    for seed in seeds_of(kind, times) if best else ():
        yield from (Run(kind, name, best * times, seed) for name in names if name not in CONTROLS)


def controls(lines: Lines, kind: str, name: str, times: float = 1.0) -> Iterator[Run]:
    """The runs of float32 state that differ in chance or in the rate alone."""
    yield from (replace(r, name=name) for r in compared(lines, kind, (SAME,), times))


def planned(lines: Lines) -> Iterator[Run]:
    """All runs in order. What follows a tuning is known when that is done."""
    scratch, tuned = list(KINDS)[:2], list(KINDS)[2:]
    for kinds, formats, times in (
        (scratch, (SAME, "8bit"), 1.0),
        (tuned, (SAME, "8bit"), 1.0),
        # The best rate of tied weights is so high that runs part by chance.
        (["tied"], (SAME, "8bit"), 0.5),
        (["tied"], None, 0.5),
        (["untied"], (SAME, "8bit for both"), 0.5),
        (scratch, None, 1.0),
        (tuned, None, 1.0),
        (["untied"], (SAME, "8bit for both"), 2.0),
    ):
        for kind in kinds:
            yield from tuning(kind)
            yield from compared(lines, kind, formats, times)
        if kinds is tuned:
            for kind in scratch:
                yield from controls(lines, kind, HIGHER, 0.5)
            for kind in tuned:
                yield from controls(lines, kind, HIGHER)
            yield from controls(lines, "tied", AGAIN, 0.5)
            for kind in list(KINDS)[::2]:
                yield from controls(lines, kind, AGAIN)


def missing(lines: Lines) -> list[Run]:
    return [run for run in dict.fromkeys(planned(lines)) if found(lines, run) is None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    runner = Runner()
    if args.list:
        for line in runner.lines():
            print({k: v for k, v in line.items() if k not in ("losses", "settings", "machine")})
        for run in missing(runner.lines()):
            print(f"missing: {run.kind}: {run.name}, rate {run.lr:g}, seed {run.seed}")
        return
    end = time.monotonic() + args.minutes * 60
    while time.monotonic() < end and (todo := missing(runner.lines())):
        line = runner.run(todo[0])
        shown = {k: line.get(k) for k in ("held_out_loss", "said", "read", "processor_seconds")}
        print(line["date"], todo[0].key(), shown, flush=True)


if __name__ == "__main__":
    main()
