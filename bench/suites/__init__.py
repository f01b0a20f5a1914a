"""pytest-benchmark suites: `python -m pytest bench/suites`. Models of real size on a GPU, their tiny ones on a CPU."""
