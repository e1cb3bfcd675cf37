"""What hypothesis draws: every run the same examples, so that what passed passes again. Others are
drawn by pytest --hypothesis-profile=default, the option's word being the last.
"""

try:
    import hypothesis
except ImportError:  # a machine with a GPU may have none, and no test that needs it
    pass
else:
    hypothesis.settings.register_profile(
        "same",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # the machine is, not the example
    )
    hypothesis.settings.load_profile("same")
