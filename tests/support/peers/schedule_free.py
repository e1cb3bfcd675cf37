"""The layout of schedulefree 1.4.1, made by hand."""

# Of a group: all that it keeps besides z and exp_avg_sq of each parameter.
GROUP = (
    "lr",
    "betas",
    "eps",
    "r",
    "k",
    "warmup_steps",
    "train_mode",
    "weight_sum",
    "lr_max",
    "scheduled_lr",
    "weight_lr_power",
    "weight_decay",
    "foreach",
    "params",
)


def of_the_authors(opt):
    """The state dict of an optimizer with float32 state and one group, as theirs."""
    saved = opt.state_dict()
    state = {i: {k: s[k].clone() for k in ("z", "exp_avg_sq")} for i, s in saved["state"].items()}
    return {"state": state, "param_groups": [{k: saved["param_groups"][0][k] for k in GROUP}]}
