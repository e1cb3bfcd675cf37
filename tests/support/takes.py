"""What each optimizer steps of a model."""

import lowbit


def params_of(cls, model):
    """All named parameters; for Muon the matrices, for MuonWithAdamW its groups."""
    if cls is lowbit.MuonWithAdamW:
        return lowbit.muon_param_groups(model)
    return [(name, p) for name, p in model.named_parameters() if cls is not lowbit.Muon or p.dim() > 1]  # fmt: skip
