"""The path from a step to the operators: step groups, phases, the cache of a repeated step,
low rank.
"""
