"""One short module for each framework that has a place for optimizers of others; docs/frameworks.md says how each is used, and which need none."""
