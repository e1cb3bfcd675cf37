"""APOLLO (arXiv 2412.05270), Fira (arXiv 2410.01623) and adafactor-8bit 0.1.9's Adafactor in a
subspace in numpy, slow and obvious: what the C++ is held against.
"""

import numpy as np


def next_seed(seed):
    """The seed of the following refresh: the last of 15 numbers below 2^63 - 1 that an MT19937
    begun with the low 32 bits draws.
    """
    state = np.random.RandomState(seed & 0xFFFFFFFF)
    words = state.randint(0, 2**32, size=30, dtype=np.uint64)
    return int((int(words[28]) << 32 | int(words[29])) % (2**63 - 1))


def torch_projection(seed, rows, cols, rank):
    """What the authors' code draws on a CPU: N(0, 1) / sqrt(rank), [rank, C] for R >= C,
    [R, rank] for R < C.
    """
    import torch

    shape = (rank, cols) if rows >= cols else (rows, rank)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / rank**0.5).numpy()


def singular_projection(g, rank):
    """The leading singular vectors: rows of V^T for R >= C, columns of U for R < C."""
    u, _, vh = np.linalg.svd(g, full_matrices=False)
    return vh[:rank] if g.shape[0] >= g.shape[1] else u[:, :rank]


def project(g, p):
    return g @ p.T if g.shape[0] >= g.shape[1] else p.T @ g


def back(x, p, tall):
    return x @ p if tall else p @ x


class Limiter:
    """The norm may grow by gamma a step."""

    def __init__(self, gamma=1.01):
        self.gamma, self.previous = gamma, None

    def __call__(self, norm):
        """What to divide by."""
        if self.previous is None:
            self.previous = norm
            return 1.0
        factor = max(norm / (self.previous + 1e-8), self.gamma) / self.gamma
        self.previous = norm / factor
        return factor


class LowRank:
    """One parameter. method: apollo or fira;
    projections: called with the number of the refresh and the gradient.
    """

    def __init__(
        self,
        method,
        rank,
        projections,
        gap=200,
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-6,
        weight_decay=0.0,
        scale=1.0,
        tensor=False,
        scale_front=False,
        gamma=1.01,
        dtype=np.float32,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.limiter, self.t, self.m, self.v = Limiter(gamma), 0, 0.0, 0.0

    def step(self, p, g):
        f = self.dtype
        p, g = p.astype(f), g.astype(f)
        tall = g.shape[0] >= g.shape[1]
        if self.t % self.gap == 0:
            self.projection = self.projections(self.t // self.gap, g).astype(f)
        self.t += 1
        alpha = f(self.scale) if self.method == "fira" else f(1)
        low = project(g, self.projection)
        self.m = f(self.beta1) * self.m + f(1 - self.beta1) * low
        self.v = f(self.beta2) * self.v + f(1 - self.beta2) * low**2
        n = self.m / (np.sqrt(self.v) + f(self.eps))
        eta = f(self.lr * (1 - self.beta2**self.t) ** 0.5 / (1 - self.beta1**self.t))
        axis = None if self.tensor else (1 if tall else 0)
        s = np.sqrt((n * n).sum(axis)) / (np.sqrt((low * low).sum(axis)) + f(1e-8))
        s = s if self.tensor else np.expand_dims(s, axis)
        if self.method == "fira":
            rest = (g - alpha * back(low, self.projection, tall)) * s
            rest = rest / f(self.limiter(float(np.sqrt((rest * rest).sum()))))
            u = alpha * back(n, self.projection, tall) + rest
        else:
            u = g * s
            if self.scale_front:
                u = u * f(self.scale**0.5)
            u = u / f(self.limiter(float(np.sqrt((u * u).sum()))))
            if not self.scale_front:
                u = u * f(self.scale**0.5)
        p = p - eta * u
        return p - f(self.lr * self.weight_decay) * p


class LowRankAdafactor:
    """One parameter of adafactor-8bit 0.1.9 with a rank. eps is under the root; margin is its
    limiter's, None without one.
    """

    def __init__(
        self,
        rank,
        projections,
        gap=200,
        lr=1e-2,
        beta2=None,
        beta2_decay=-0.8,
        eps=1e-8,
        eps2=1e-3,
        d=1.0,
        weight_decay=0.0,
        decay_by="lr",
        relative_step=True,
        scale_parameter=True,
        margin=None,
        tensor=False,
        dtype=np.float32,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.limiter, self.t, self.v = Limiter(1.0 + (margin or 0.0)), 0, None

    def step(self, p, g):
        f, begins = self.dtype, self.t % self.gap == 0
        p, g = p.astype(f), g.astype(f)
        tall = g.shape[0] >= g.shape[1]
        if begins:
            self.projection = self.projections(self.t // self.gap, g).astype(f)
        self.t += 1
        low = project(g, self.projection)
        weight = f(self.t**self.beta2_decay if self.beta2 is None else 1 - self.beta2)
        self.v = low**2 if begins else self.v + weight * (low**2 - self.v)
        n = low / np.sqrt(self.v + f(self.eps))
        axis = None if self.tensor else (1 if tall else 0)
        s = np.sqrt((n * n).sum(axis)) / (np.sqrt((low * low).sum(axis)) + f(1e-8))
        u = g * (s if self.tensor else np.expand_dims(s, axis))
        if self.margin is not None:
            u = u / f(self.limiter(float(np.sqrt((u * u).sum()))))
        rho = min(self.lr, self.t**-0.5) if self.relative_step else self.lr
        rms = float(np.sqrt((p * p).mean()))
        alpha = rho * max(self.eps2, rms) if self.scale_parameter else rho
        clip = float(np.sqrt((u * u).mean())) / self.d if self.d is not None else 0.0
        decay = self.weight_decay * {"lr": self.lr, "rho": rho, "alpha": alpha}[self.decay_by]
        return p * f(1 - decay) - f(alpha / max(1.0, clip)) * u


# The cases of tests/golden/lowrank.bin: name, shape, method, rank, hyperparameters. The first three
# are what the authors' own code left.
COMMON = dict(lr=1e-2, weight_decay=0.1)
CASES = [
    ("apollo_ch", (16, 256), "apollo", 8, dict(gap=2)),
    ("apollo_tall_ch", (96, 64), "apollo", 8, dict(gap=2)),
    ("fira", (16, 256), "fira", 8, dict(scale=0.25)),
    ("mini_front", (16, 256), "apollo", 1, dict(gap=2, tensor=True, scale=128.0, scale_front=True)),
    ("mini_tall", (96, 64), "apollo", 1, dict(gap=2, tensor=True, scale=128.0)),
    ("fira_tall", (96, 64), "fira", 8, dict(scale=0.25)),
]
SHAPES = [(16, 256), (96, 64)]
STEPS = 4


def long_side_first(p, shape):
    """P as the library keeps it: [min(R, C), rank]."""
    return p.T if shape[0] >= shape[1] else p


def golden(path):
    """Of each shape once: p0, g1..g4. Of each case: the projection of steps 1-2 and of 3-4 [min(R,
    C), rank], p4, exp_avg, exp_avg_sq, [limiter's norm].
    """
    flat, at = np.fromfile(path, np.float32), 0

    def take(*shapes):
        nonlocal at
        out = []
        for s in shapes:
            out.append(flat[at : at + np.prod(s)].reshape(s))
            at += int(np.prod(s))
        return out

    inputs = {shape: take(*[shape] * (1 + STEPS)) for shape in SHAPES}
    cases = {}
    for name, shape, _, rank, _ in CASES:
        small = (shape[0], rank) if shape[0] >= shape[1] else (rank, shape[1])
        rest = take(*[(min(shape), rank)] * 2, shape, small, small, (1,))
        cases[name] = inputs[shape] + rest
    assert at == flat.size
    return cases


def run(case, arrays, dtype, projections=None):
    _, shape, method, rank, hyper = case
    p, *g = arrays[: 1 + STEPS]

    def stored(refresh, _):
        return long_side_first(arrays[1 + STEPS + refresh], shape)

    rule = LowRank(method, rank, projections or stored, dtype=dtype, **COMMON, **hyper)
    for x in g:
        p = rule.step(p, x)
    return p, rule


def write_golden(peers, path):
    """From the arrays that the authors' code left (CPU, float32). Its singular vectors are not
    reproducible to 1e-6 on another processor, but they can be had from exp_avg, which is P^T times
    a known sum of gradients."""
    inputs = {
        shape: [peers[source + "/p0"]]
        + [peers[f"g{i}_{shape[0]}x{shape[1]}"] for i in range(1, STEPS + 1)]
        for shape, source in zip(SHAPES, ("apollo_ch", "apollo_tall_ch"), strict=True)
    }
    out = [a for shape in SHAPES for a in inputs[shape]]
    for name, shape, method, rank, hyper in CASES:
        by_peer = name in ("apollo_ch", "apollo_tall_ch", "fira")
        g = inputs[shape][1:]
        if method == "apollo":
            p = [torch_projection(seed, *shape, rank) for seed in (1, next_seed(1))]
        elif by_peer:
            mean = sum(0.1 * 0.9 ** (STEPS - 1 - i) * g[i].astype(float) for i in range(STEPS))
            p = [np.linalg.lstsq(mean.T, peers["fira/exp_avg"].astype(float).T, rcond=None)[0]] * 2
        else:
            p = [singular_projection(g[0].astype(float), rank)] * 2
        arrays = [long_side_first(x, shape) for x in p]
        if by_peer:
            norm = peers[name + ("/scaling_grad" if method == "fira" else "/scaled_grad")]
            arrays += [peers[f"{name}/{k}"] for k in ("p4", "exp_avg", "exp_avg_sq")] + [norm]
        else:
            case = (name, shape, method, rank, hyper)
            p4, rule = run(
                case, [*inputs[shape], *(a.astype(np.float32) for a in arrays)], np.float64
            )
            arrays += [p4, rule.m, rule.v, np.float64(rule.limiter.previous)]
        out += arrays
    np.concatenate([np.ascontiguousarray(a, np.float32).ravel() for a in out]).tofile(path)


if __name__ == "__main__":
    import sys

    write_golden(np.load(sys.argv[1]), sys.argv[2])
