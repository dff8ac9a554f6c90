"""The CPU's own operators: C++ built where it runs, and called through `ctypes`. Torch does without, slower."""
