"""What files of other programs hold beside tensors: an optimizer's state, a call,
and arrays of numpy to compare.
"""

import json

import numpy as np
import torch


class Called:
    """What it gives is known only to who runs it."""

    def __init__(self, function=json.loads, arguments=("1",)):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 7)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(3, 5)).sum().backward()
    opt.step()
    return model, opt


def same(a, b):
    """Whether two values with arrays are the same, types and dtypes too."""
    if isinstance(a, np.ndarray):
        return (
            type(b) is np.ndarray
            and a.dtype == b.dtype
            and np.array_equal(a, b, a.dtype.kind == "f")
        )
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
