"""The reference implementation of every update rule: a few lines of float64 Python,
and the hyperparameters that it is held to.

A reference maps (p, g, state, t, hyper) to (p, state), all float64; its state is what the operator
keeps: slots, rows and columns of factors, numbers.
"""

import math

import numpy as np

from lowbit import ops

HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.05}
ADAFACTOR = {
    "beta2_decay": -0.8,
    "beta2": -1.0,
    "eps1": 1e-30,
    "eps2": 1e-3,
    "d": 1.0,
    "decay_by": 0.0,
    "relative_step": 0.0,
    "scale_parameter": 1.0,
    "fira_margin": -1.0,
    "add_eps": 0.0,
}
SGD = {
    "momentum": 0.9,
    "dampening": 0.2,
    "nesterov": 0.0,
    "decoupled": 0.0,
    "dampen_first": 0.0,
    "trust_coefficient": 0.02,
}
CAME = {"beta3": 0.999, "eps1": 1e-30, "eps2": 1e-16, "d": 1.0}
ADEMAMIX = {"beta3": 0.999, "alpha": 5.0, "t_alpha": 0.0, "t_beta3": 0.0}
SCHEDULE = {"average": 0.3}
MUON = {"momentum": 0.95, "nesterov": 1.0, "ratio": 0.7, "cautious": 0.0}
RMSPROP = {"alpha": 0.9, "momentum": 0.8, "least_variance": 1 / 4}
APOLLO_ADAFACTOR = {"beta2_decay": -0.8, "beta2": -1.0, "update_proj_gap": 5.0}
FAMILY = {
    "apollo_adafactor": APOLLO_ADAFACTOR,
    "adafactor": ADAFACTOR,
    "sgd": SGD,
    "lars": SGD,
    "came": CAME,
    "ademamix": ADEMAMIX,
    "rmsprop": RMSPROP,
    "adagrad": {"lr_decay": 0.1},
    "muon": MUON,
    "schedule": SCHEDULE,
}

# What else than the defaults a rule is held to.
VARIANTS = {
    "adafactor": [
        {"beta2": 0.95, "scale_parameter": 0.0, "decay_by": 2.0, "add_eps": 1.0, "eps1": 1e-12},
        {"relative_step": 1.0, "lr": 1e-2, "decay_by": 1.0, "fira_margin": 0.01, "d": 0.3},
        {"d": -1.0, "fira_margin": 0.0, "lr": 0.5},
    ],
    "apollo_adafactor": [
        {"update_proj_gap": 2.0, "eps": 1e-3},
        {"update_proj_gap": 1.0},
        {"beta2": 0.95, "update_proj_gap": 3.0},
    ],
    "came": [{"d": 0.2}],
    "lars": [{"nesterov": 1.0}, {"momentum": 0.0, "dampening": 0.0}],
    "lamb": [{"weight_decay": 0.0}],
    "sgd": [
        {"nesterov": 1.0, "dampening": 0.0},
        {"decoupled": 1.0, "dampen_first": 1.0},
    ],
    "rmsprop": [{"least_variance": 0.0}, {"alpha": 0.0, "least_variance": 0.25}],
    "lion": [{"beta1": 0.0}],
    "schedule": [{"average": 0.7, "beta1": 0.5}, {"average": 0.0, "weight_decay": 0.0}],
    "muon": [{"momentum": 0.3}, {"nesterov": 0.0, "ratio": 5.0}, {"cautious": 1.0}],
    "ademamix": [{"t_alpha": 4.0, "t_beta3": 9.0}, {"beta1": 0.0, "t_beta3": 3.0}],
}


def family_of(rule):
    if rule in FAMILY:
        return rule
    return rule.removeprefix("cautious_").split("_")[0]


def hyper_of(rule, **changes):
    """Every hyperparameter of a rule, by name."""
    values = HYPER | FAMILY.get(family_of(rule), {}) | changes
    return {name: values[name] for name in ops.rule(rule)["hyper"]}


def adam(p, g, s, t, h, *, decoupled, amsgrad):
    """arXiv:1412.6980, arXiv:1711.05101 and AMSGrad as torch.optim has them, in float64."""
    if decoupled:
        p = p * (1 - h["lr"] * h["weight_decay"])
    else:
        g = g + h["weight_decay"] * p
    m = h["beta1"] * s[0] + (1 - h["beta1"]) * g
    v = h["beta2"] * s[1] + (1 - h["beta2"]) * g * g
    state = [m, v]
    if amsgrad:
        state.append(np.maximum(s[2], v))
    denominator = np.sqrt(state[-1]) / math.sqrt(1 - h["beta2"] ** t) + h["eps"]
    return p - h["lr"] / (1 - h["beta1"] ** t) * m / denominator, state


def factored(square, row, col, weight, least=0.0):
    """Row and column means moved towards those of `square`,
    and the second moment that they stand for.
    """
    row = row + weight * (square.mean(1) - row)
    col = col + weight * (square.mean(0) - col)
    mean = max(row.mean(), least)
    return row, col, np.outer(row, col) / mean if mean else np.zeros_like(square)


def adam_factored(p, g, s, t, h, *, decoupled):
    if decoupled:
        p = p * (1 - h["lr"] * h["weight_decay"])
    else:
        g = g + h["weight_decay"] * p
    m = s[0] + (1 - h["beta1"]) * (g - s[0])
    row, col, v = factored(g * g, s[1], s[2], 1 - h["beta2"])
    denominator = np.sqrt(v) / math.sqrt(1 - h["beta2"] ** t) + h["eps"]
    return p - h["lr"] / (1 - h["beta1"] ** t) * m / denominator, [m, row, col]


def rms(x):
    return math.sqrt(np.mean(x * x))


def adafactor(p, g, s, t, h, *, full, momentum):
    """arXiv:1804.04235, with momentum, relative steps and Fira's limiter where asked for."""
    weight = 1 - h["beta2"] if h["beta2"] >= 0 else t ** h["beta2_decay"]
    rho = min(h["lr"], 1 / math.sqrt(t)) if h["relative_step"] else h["lr"]
    alpha = rho * (max(h["eps2"], rms(p)) if h["scale_parameter"] else 1)
    p = p * (1 - h["weight_decay"] * (h["lr"], rho, alpha)[int(h["decay_by"])])
    square = g * g + (h["eps1"] if h["add_eps"] else 0)
    state, rest = [], list(s[1:] if momentum else s)
    if momentum:
        m = s[0] + (1 - h["beta1"]) * (g - s[0])
        state, g = [m], m
    if full:
        v = rest[0] + weight * (square - rest[0])
        state.append(v)
    else:
        row, col, v = factored(square, rest[0], rest[1], weight, h["eps1"])
        state += [row, col]
    if momentum and h["beta1"] >= 0 and h["beta2"] >= 0 and not h["relative_step"]:
        g = g / (1 - h["beta1"] ** t)
        v = v / (1 - h["beta2"] ** t)
    u = g / np.sqrt(np.maximum(v, max(h["eps1"] ** 2, 2.0**-126)))
    n, before = math.sqrt((u * u).sum()), float(s[-1].item())
    if h["fira_margin"] >= 0:
        most = 1 + h["fira_margin"]
        limit = 1.0 if before == 0 else 1 / (max(n / (before + 1e-8), most) / most)
        n, u = n * limit, u * limit
        before = n
    state.append(np.array([before]))
    clip = max(1.0, n / (math.sqrt(u.size) * h["d"])) if h["d"] > 0 else 1.0
    return p - alpha / clip * u, state


def came(p, g, s, t, h, *, full):
    """arXiv:2307.02047"""
    square = g * g + h["eps1"]
    if full:
        v = s[1] + (1 - h["beta2"]) * (square - s[1])
        kept = [v]
    else:
        row, col, v = factored(square, s[1], s[2], 1 - h["beta2"])
        kept = [row, col]
    u = g / np.sqrt(v)
    u = u / max(1.0, rms(u) / h["d"])
    m = s[0] + (1 - h["beta1"]) * (u - s[0])
    step = m
    if not full:
        row, col, w = factored((u - m) ** 2 + h["eps2"], s[3], s[4], 1 - h["beta3"])
        kept += [row, col]
        step = m / np.sqrt(w)
    return p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * step, [m, *kept]


def norm(x):
    return math.sqrt((x * x).sum())


def lamb(p, g, s, t, h):
    """arXiv:1904.00962"""
    m = h["beta1"] * s[0] + (1 - h["beta1"]) * g
    v = h["beta2"] * s[1] + (1 - h["beta2"]) * g * g
    r = m / (1 - h["beta1"] ** t) / (np.sqrt(v / (1 - h["beta2"] ** t)) + h["eps"])
    r = r + h["weight_decay"] * p
    ratio = norm(p) / norm(r) if norm(p) and norm(r) else 1.0
    return p - h["lr"] * ratio * r, [m, v]


def lars(p, g, s, t, h):
    """arXiv:1708.03888"""
    wd, ratio = h["weight_decay"], 1.0
    if norm(p) and norm(g):
        ratio = h["trust_coefficient"] * norm(p) / (norm(g) + wd * norm(p) + h["eps"])
    d = (g + wd * p) * ratio
    buf = d if t == 1 else h["momentum"] * s[0] + (1 - h["dampening"]) * d
    return p - h["lr"] * (d + h["momentum"] * buf if h["nesterov"] else buf), [buf]


def sgd(p, g, s, t, h, *, momentum):
    lr, wd = h["lr"], h["weight_decay"]
    d = g if h["decoupled"] else g + wd * p
    if h["decoupled"]:
        p = p * (1 - lr * wd)
    if not momentum:
        return p - lr * d, []
    dampened = t > 1 or h["dampen_first"]
    buf = h["momentum"] * s[0] + (1 - h["dampening"] if dampened else 1) * d
    return p - lr * (d + h["momentum"] * buf if h["nesterov"] else buf), [buf]


def lion(p, g, s, t, h):
    """arXiv:2302.06675"""
    u = h["beta1"] * s[0] + (1 - h["beta1"]) * g
    p = p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * np.sign(u)
    return p, [h["beta2"] * s[0] + (1 - h["beta2"]) * g]


def rmsprop(p, g, s, t, h, *, centered, momentum):
    g = g + h["weight_decay"] * p
    v = h["alpha"] * s[0] + (1 - h["alpha"]) * g * g
    state, inside = [v], v
    if centered:
        mean = h["alpha"] * s[-1] + (1 - h["alpha"]) * g
        inside = np.maximum(v - mean * mean, h["least_variance"] * v)
    step = g / (np.sqrt(inside) + h["eps"])
    if momentum:
        step = h["momentum"] * s[1] + step
        state.append(step)
    return p - h["lr"] * step, [*state, mean] if centered else state


def adagrad(p, g, s, t, h):
    g = g + h["weight_decay"] * p
    total = s[0] + g * g
    return p - h["lr"] / (1 + (t - 1) * h["lr_decay"]) * g / (np.sqrt(total) + h["eps"]), [total]


def ademamix(p, g, s, t, h):
    """arXiv:2409.03137"""
    alpha, beta1, beta3 = h["alpha"], h["beta1"], h["beta3"]
    if h["t_alpha"] > 0:
        alpha = min(t * alpha / h["t_alpha"], alpha)
    if h["t_beta3"] > 0:
        share, log3 = t / h["t_beta3"], math.log(beta3)
        log1 = math.log(beta1) if beta1 else -1e9
        beta3 = min(math.exp(log1 * log3 / ((1 - share) * log3 + share * log1)), beta3)
    fast = beta1 * s[0] + (1 - beta1) * g
    slow = beta3 * s[1] + (1 - beta3) * g
    v = h["beta2"] * s[2] + (1 - h["beta2"]) * g * g
    step = fast / (1 - beta1**t) + alpha * slow
    step = step / (np.sqrt(v / (1 - h["beta2"] ** t)) + h["eps"])
    return p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * step, [fast, slow, v]


def apollo_inner(p, g, s, t, h):
    """Adam's direction itself, uncorrected, instead of the parameter (arXiv:2412.05270)."""
    m = h["beta1"] * s[0] + (1 - h["beta1"]) * g
    v = h["beta2"] * s[1] + (1 - h["beta2"]) * g * g
    return m / (np.sqrt(v) + h["eps"]), [m, v]


def apollo_adafactor(p, g, s, t, h):
    """adafactor-8bit 0.1.9 in its subspace, instead of the parameter;
    a new projection forgets the second moment.
    """
    weight = 1 - h["beta2"] if h["beta2"] >= 0 else t ** h["beta2_decay"]
    begins = (t - 1) % h["update_proj_gap"] == 0
    v = g * g if begins else s[0] + weight * (g * g - s[0])
    return g / np.sqrt(v + h["eps"]), [v]


def muon_momentum(p, g, s, t, h):
    """The update of torch.optim.Muon before it is orthogonalized, instead of the parameter."""
    m = h["momentum"] * s[0] + (1 - h["momentum"]) * g
    return h["momentum"] * m + (1 - h["momentum"]) * g if h["nesterov"] else m, [m]


def muon(p, g, s, t, h):
    """The step of torch.optim.Muon by an orthogonalized update."""
    decay = np.where((g * p >= 0) | (h["cautious"] == 0), h["lr"] * h["weight_decay"], 0.0)
    return p * (1 - decay) - h["lr"] * h["ratio"] * g, []


def schedule_free_adamw(p, g, s, t, h):
    """arXiv:2405.15682, as the package schedulefree has it: p is y."""
    v = h["beta2"] * s[1] + (1 - h["beta2"]) * g * g
    d = g / (np.sqrt(v / (1 - h["beta2"] ** t)) + h["eps"]) + h["weight_decay"] * p
    c, z = h["average"], p if t == 1 else s[0]
    return (1 - c) * p + c * z - h["lr"] * (1 - h["beta1"] * (1 - c)) * d, [z - h["lr"] * d, v]


def cautious(plain, *, decoupled):
    """arXiv:2411.16085: the update of another rule where it agrees with the gradient."""

    def reference(p, g, s, t, h):
        moved, state = plain(p, g, s, t, h)
        if decoupled or h.get("decoupled"):
            p = p * (1 - h["lr"] * h["weight_decay"])
        else:
            g = g + h["weight_decay"] * p
        mask = (p - moved) * g > 0
        return p - (p - moved) * mask / max(mask.mean(), 1e-3), state

    return reference


# Instead of the parameter.
WRITES_UPDATES = ("apollo_inner", "apollo_adafactor", "muon_momentum")

REFERENCE = {
    "adamw": lambda *a: adam(*a, decoupled=True, amsgrad=False),
    "adam": lambda *a: adam(*a, decoupled=False, amsgrad=False),
    "adamw_amsgrad": lambda *a: adam(*a, decoupled=True, amsgrad=True),
    "adam_amsgrad": lambda *a: adam(*a, decoupled=False, amsgrad=True),
    "adamw_factored": lambda *a: adam_factored(*a, decoupled=True),
    "adam_factored": lambda *a: adam_factored(*a, decoupled=False),
    "adafactor": lambda *a: adafactor(*a, full=False, momentum=False),
    "adafactor_full": lambda *a: adafactor(*a, full=True, momentum=False),
    "adafactor_momentum": lambda *a: adafactor(*a, full=False, momentum=True),
    "adafactor_full_momentum": lambda *a: adafactor(*a, full=True, momentum=True),
    "came": lambda *a: came(*a, full=False),
    "came_full": lambda *a: came(*a, full=True),
    "lamb": lamb,
    "lars": lars,
    "sgd": lambda *a: sgd(*a, momentum=False),
    "sgd_momentum": lambda *a: sgd(*a, momentum=True),
    "lion": lion,
    "rmsprop": lambda *a: rmsprop(*a, centered=False, momentum=False),
    "rmsprop_momentum": lambda *a: rmsprop(*a, centered=False, momentum=True),
    "rmsprop_centered": lambda *a: rmsprop(*a, centered=True, momentum=False),
    "rmsprop_centered_momentum": lambda *a: rmsprop(*a, centered=True, momentum=True),
    "adagrad": adagrad,
    "ademamix": ademamix,
    "apollo_inner": apollo_inner,
    "apollo_adafactor": apollo_adafactor,
    "muon_momentum": muon_momentum,
    "muon": muon,
    "schedule_free_adamw": schedule_free_adamw,
}
for plain in ("adamw", "adam", "adamw_amsgrad", "adam_amsgrad", "lion", "sgd_momentum"):
    of_weights = plain.startswith(("adamw", "lion"))
    REFERENCE[f"cautious_{plain}"] = cautious(REFERENCE[plain], decoupled=of_weights)
