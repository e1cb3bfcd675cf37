"""The optimizers, one file for each; the classes that they share; `stats()` and its warnings;
groups of parameters.
"""
