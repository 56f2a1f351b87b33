"""The models and texts of the examples, tests and benchmarks, fetched from the package registry."""
