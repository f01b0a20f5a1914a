"""pytest-benchmark suites: `python -m pytest bench/suites`. Models of real size on a GPU, tiny versions on a CPU."""
