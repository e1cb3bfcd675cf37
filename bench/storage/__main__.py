"""`python -m bench.storage`. Ranks that it starts import `measured`, which is not a main module."""

from bench.storage.measured import main

if __name__ == "__main__":
    main()
