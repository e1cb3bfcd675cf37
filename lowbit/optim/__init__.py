"""What the optimizers of `lowbit.optim.rules` share; `stats()` and its warnings; groups of
parameters.
"""
