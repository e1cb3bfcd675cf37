"""One short module for each framework that accepts other libraries' optimizers;
docs/frameworks.md shows their use.
"""
