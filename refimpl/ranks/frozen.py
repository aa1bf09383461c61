"""Imported by the server last: what it has loaded by then is nobody's garbage, and no rank looks for garbage in it.

A rank is a fork of the server, so their memory is one until either writes to it. The first collection would: it writes
to each of some 300,000 objects, and 0.3 s of CPU time in every rank would go into copying their pages. See `gc.freeze`.
A rank that is asked where it stands (SIGUSR1) before it can answer must not end of the question.
"""

import gc
import signal

gc.collect()
gc.freeze()
gc.enable()  # off since `loading`
signal.signal(signal.SIGINT, signal.default_int_handler)  # as the ranks have it; the server ignores it from here on
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
