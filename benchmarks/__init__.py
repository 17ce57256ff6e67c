"""Side-by-side measurements with peers; never part of the tests. `python -m benchmarks` runs them all."""
