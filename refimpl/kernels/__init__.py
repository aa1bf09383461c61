"""Kernels: torch's operator, Triton's beside it, and the gradient of both; one operation a file.

A file's public function has the operation's name and picks: on CUDA the compiled kernel, on a CPU torch's own operator.
With TRITON_INTERPRET=1 set before its import it interprets the kernel, on a CPU: right, slow, and open to a debugger.
Importing such a file imports triton (a third of a second), so `model` and `optim` do it inside the function, where a
tensor on a GPU comes along. `CASES` of each file are the calls at real sizes: one test compiles them for sm_90, another
compares them on a GPU, and `refimpl bench kernels` times them.
"""
