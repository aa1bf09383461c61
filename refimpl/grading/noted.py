"""Imported by the server that a grader's ranks are forked from: what an answer may replace is noted there, once.

A fork shares its server's memory until somebody counts a reference in it. To note 1,300 modules and classes in each
rank would copy most of their pages: of a rank that grades one small answer, a seventh of its CPU time.
"""

import refimpl.grading.rank  # noqa: F401  what it imports is noted too
from refimpl.grading.process import Process

Process.note()
