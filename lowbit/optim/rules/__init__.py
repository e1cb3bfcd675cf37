"""The update rules, a class in each file."""
