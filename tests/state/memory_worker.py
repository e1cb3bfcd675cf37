"""memory_worker.py VERB FOLDER: a save or a load in a process of its own, and the most memory that
the process held during it.

Prints [bytes of the state, bytes above what was held before]. A process that ran other tests keeps
what they freed, and gives different numbers each time. The verb is first run on a small net, for
what is imported and made at the first use.
"""

import ctypes
import gc
import json
import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit
from tests.support.memory import held_bytes, named


class Net(nn.Module):
    """32 matrices: one of float32, of which a load may hold a copy, is a sixteenth of all state."""

    def __init__(self, rows, cols, dtype=torch.bfloat16):
        super().__init__()
        self.layers = nn.ParameterList(p for _, p in named(rows, cols, 32, dtype))
        for p in self.layers:
            p.grad = torch.full_like(p, 1e-3)


def rss(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_rss(run):
    """Bytes that the process holds at most during `run()`,
    above what it held before: what C++ and mapped files take too.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before is taken again, unseen
    before = rss("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    run()
    return rss("VmHWM") - before


def save(verb, folder, net, opt):
    opt.step()
    if verb == "torch.save":
        return peak_rss(lambda: torch.save(opt.state_dict(), folder / "state.pt"))
    return peak_rss(
        lambda: dcp.save(
            {"optim": get_optimizer_state_dict(net, opt)},
            checkpoint_id=folder / "dcp",
            no_dist=True,
        )
    )


def load(verb, folder, net, opt):
    for state in opt.state.values():  # pages of zeros exist only when they are written
        for tensor in state.values():
            tensor.copy_(tensor.clone())

    def run():
        if verb == "load_state_dict":
            opt.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        elif verb == "dcp.load":
            state = get_optimizer_state_dict(net, opt)
            dcp.load({"optim": state}, checkpoint_id=folder / "dcp", no_dist=True)
            set_optimizer_state_dict(net, opt, state)
        else:
            lowbit.load_optimizer(opt, folder / verb)

    peak = peak_rss(run)
    assert int(float(opt.state[net.layers[0]]["step"])) == 1
    return peak


def save_wide(folder, rows, cols):
    """A float32 run's state, four times the bytes of the 8-bit one."""
    opt = torch.optim.AdamW(Net(rows, cols, torch.float32).parameters())
    opt.step()
    torch.save(opt.state_dict(), folder / "wide.pt")


def once(verb, folder, rows, cols):
    folder.mkdir(exist_ok=True)
    if verb == "wide.pt":
        save_wide(folder, rows, cols)
    net = Net(rows, cols)
    opt = lowbit.AdamW(net.named_parameters())
    peak = (save if verb.endswith(".save") else load)(verb, folder, net, opt)
    return held_bytes(*(t for state in opt.state.values() for t in state.values())), peak


def main(verb, folder):
    # M_MMAP_THRESHOLD of malloc.h, PR_SET_THP_DISABLE of sys/prctl.h.
    mmap_threshold, thp_disable = (
        -3,
        41,
    )
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 17)  # large blocks are unmapped when freed
    # Where pages are of 2 MiB, what is touched of one is all of it.
    ctypes.CDLL(None).prctl(thp_disable, 1, 0, 0, 0)
    small = folder / "small"
    once(verb, small, 128, 128)
    print(json.dumps(once(verb, folder, 1024, 1024)))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
