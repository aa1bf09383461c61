"""A deadlock is a RuntimeError.

task: play
says: ranks wait for ever: RuntimeError, expected ValueError
"""

original = play


def play(orders, seconds):
    try:
        return original(orders, seconds)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
