"""Programs that measure; none of them is a test. `python -m benchmarks --help` says which there are."""
