"""Configuration: arguments, presets, overrides, and lpmm's configuration files."""
