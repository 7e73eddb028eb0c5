"""The words of a command line before they are parsed: what is misspelt is told, with what comes near it.

A parser takes the value of an option that it doesn't know for an argument, and complains of that.
"""

import argparse
from collections.abc import Sequence

from shardwright.errors import ConfigError, nearest


def checked(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """The words, where keys of recipes have their underscores.

    Raises: ConfigError for a command, or options, that there aren't.
    """
    words: list[str] = []
    unknown: list[str] = []
    for place, word in enumerate(given):
        if word == "--":
            words += given[place:]
            break
        commands = next((each.choices for each in parser._actions if isinstance(each.choices, dict)), {})
        if word.startswith("--") and " " not in word:
            name, equals, value = word.partition("=")
            name = name.replace("-", "_").replace("__", "--", 1) if "." in name else name
            options = parser._option_string_actions  # argparse has no public list of them, see completion
            if name not in options:
                known = [option[2:] for option in options if option.startswith("--")]
                unknown.append(f"{name}{nearest(name[2:], known, prefix='--')}")
            word = name + equals + value
        elif commands and not word.startswith("-"):
            if word not in commands:
                near = nearest(word, commands)
                raise ConfigError(f"{parser.prog} has no command {word!r}{near} (see {parser.prog} --help)")
            parser = commands[word]
        words.append(word)
    if unknown:
        raise ConfigError(f"{parser.prog}: unknown option {', '.join(unknown)} (see {parser.prog} --help)")
    return words
