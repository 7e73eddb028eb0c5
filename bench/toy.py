"""``--toy``: any bench of this folder in seconds, to see whether it works; its figures then mean nothing."""

import argparse
from typing import Any


class _Toy(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        vars(namespace).update(self.const)


def add_toy(parser: argparse.ArgumentParser, **sizes: Any) -> None:
    """Add the flag ``--toy``; given last on a command line it wins over the flags before it."""
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items())
    parser.add_argument("--toy", action=_Toy, nargs=0, const=sizes, help=f"see whether it works: {shown}")
