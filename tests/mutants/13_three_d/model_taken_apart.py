"""Pops what it needs of the caller's model.

task: best_layout
says: the caller's dict `model` was changed
"""

_right = best_layout


def best_layout(gpus, node, model, memory, bytes_of, seconds_of):
    try:
        return _right(gpus, node, model, memory, bytes_of, seconds_of)
    finally:
        model.pop("heads")
