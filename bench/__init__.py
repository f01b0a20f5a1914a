"""The programs that show what the library does: the training demo, the plans of known models, benchmarks.

`python -m bench --help` lists them. Only this folder prints; the library never does.
"""
