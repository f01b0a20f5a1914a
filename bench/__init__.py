"""Programs that use the library: the training demo, the plans of known models, and the benchmarks.

`python -m bench --help` lists them. Only this folder prints; the library never does.
"""
