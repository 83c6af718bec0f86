"""Arguments of the commands of the workbench."""

import argparse
from collections.abc import Callable


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Returns an argparse type for numbers that are not below a bound."""

    def read(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}; found {text}")
        return value

    read.__name__ = kind.__name__  # Where the text is not a number, argparse says "invalid int value".
    return read
