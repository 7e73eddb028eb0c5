"""``shardwright train``, ``shardwright sample`` and ``shardwright export``.

shardwright train RECIPE.toml [--backend eager|xla] [--resume [auto|STEP]] [--json] [--section.key VALUE ...]
shardwright sample RUN [--prompt TEXT] [--num-bytes N] [--temperature T] [--seed S]
shardwright export RUN FOLDER
"""

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError
from shardwright.extras import require
from shardwright.train.config import Recipe
from shardwright.train.engine import Job
from shardwright.train.launch import launch, xla_environment
from shardwright.train.llama import export_llama
from shardwright.train.pretrain import Pretraining
from shardwright.train.ranks import ranks_to_start
from shardwright.train.resolve import resolve
from shardwright.train.run import train_rank
from shardwright.train.sample import generate, load_run, readable
from shardwright.train.tasks import is_rank, take_part
from shardwright.train.trackers import check_installed


def run_train(known: argparse.Namespace) -> int:
    """Train as one rank under a launcher, else start local ranks with the arguments ``known.given``."""
    short = [("launch.backend", known.backend), ("run.resume", known.resume)]
    given = [(key, value) for key, value in short if value is not None]
    resolved = resolve(known.recipe, [*given, *_overrides(known.rest)])
    config = resolved.recipe.launch
    if resolved.recipe.base.folder:
        require("hf", "transformers")
    if resolved.recipe.optimizer.kind == "adamw-8bit":
        require("bnb", "bitsandbytes")
    check_installed(resolved.recipe.track.to)
    take_part()
    if is_rank():
        train_rank(resolved, _kind_of(resolved.recipe), in_json=known.json)
    elif config.backend == "xla":
        launch(known.given, 1, xla_environment(config.ranks))
    else:
        launch(known.given, ranks_to_start(config))
    return 0


def _kind_of(recipe: Recipe) -> Callable[[Recipe, Any], Job]:
    """What makes the job. Only that kind's own modules are imported: one needs an extra."""
    if recipe.base.folder:
        return importlib.import_module("shardwright.finetune.job").FineTuning
    return Pretraining


def run_export(known: argparse.Namespace) -> int:
    """Write a trained model as a folder of Hugging Face."""
    if _is_tuned(known.run):
        return _tuned().run_export(known)
    export_llama(Path(known.run), Path(known.folder))
    print(f"{known.folder}: {', '.join(sorted(path.name for path in Path(known.folder).iterdir()))}")
    return 0


def _is_tuned(run: str) -> bool:
    """Whether it is a run of fine-tuning, or what one has left."""
    return any(Path(run, name).exists() for name in ("exported", "adapter_config.json", "config.json"))


def _tuned() -> Any:
    """The commands for those. They need an extra."""
    require("hf", "transformers")
    return importlib.import_module("shardwright.cli.tuned")


def run_sample(known: argparse.Namespace) -> int:
    """Print what a trained model writes."""
    if _is_tuned(known.run):
        return _tuned().run_sample(known)
    resolved, model = load_run(Path(known.run))
    given = {key: getattr(known, key) for key in ("num_bytes", "temperature", "prompt")}
    wanted = resolved.recipe.sample.model_copy(update={key: v for key, v in given.items() if v is not None})
    text = generate(model, wanted, resolved.recipe.training.sequence_length, known.seed)
    print(wanted.prompt + readable(text))
    return 0


def _overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of ``--section.key value`` and ``--section.key=value``."""
    pairs: list[tuple[str, str]] = []
    words = iter(rest)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"got {word!r}, expected --section.key VALUE; see: shardwright train --help")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"--{key} has no value; write --{key} VALUE")
        pairs.append((key.replace("-", "_"), value))
    return pairs


def add_commands(commands: Any) -> None:
    """Add the three to the subparsers of the command."""
    train = commands.add_parser(
        "train",
        description="Train the model of a recipe on local ranks, or as one rank under torchrun.",
        epilog=_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("recipe", metavar="RECIPE.toml", help="the recipe")
    train.add_argument(
        "--backend",
        choices=["eager", "xla"],
        help="short for --launch.backend: a process per rank, or one XLA program (needs the extra [xla])",
    )
    train.add_argument(
        "--resume",
        metavar="auto|STEP",
        nargs="?",
        const="last",
        type=_resume,
        help="short for --run.resume: alone, go on from the run's last checkpoint; auto: begin where there "
        "is none; STEP: from the checkpoint of that step",
    )
    train.add_argument(
        "--json",
        action="store_true",
        help="print the rows of metrics.jsonl as they come and the summary at the end, an object per line, "
        "and all else on stderr",
    )
    train.set_defaults(call=run_train)
    sample = commands.add_parser("sample", allow_abbrev=False)
    sample.add_argument("run", metavar="RUN", help="the folder of a finished run, as runs/quickstart")
    sample.add_argument("--prompt", help="text to continue (default: the recipe's)")
    sample.add_argument(
        "--num-bytes", "--num-tokens", type=count, help="bytes, or tokens, to write (default: the recipe's)"
    )
    sample.add_argument("--temperature", type=temperature, help="0: the likeliest (default: the recipe's)")
    sample.add_argument("--seed", type=int, default=1, help="another seed, another text (default: 1)")
    sample.set_defaults(call=run_sample)
    export = commands.add_parser("export", allow_abbrev=False)
    export.add_argument("run", metavar="RUN", help="the folder of a finished run, as runs/quickstart")
    export.add_argument("folder", metavar="FOLDER", help="where to; must not exist yet")
    export.set_defaults(call=run_export)


def _resume(text: str) -> str:
    if text not in ("auto", "last") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, expected auto, a step, or nothing (then give it last)")
    return text


def count(text: str) -> int:
    """A number of at least 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return int(text)


def temperature(text: str) -> float:
    """A number of at least 0, for argparse."""
    if not float(text) >= 0:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 or more")
    return float(text)


def _keys() -> str:
    """Every key with its type, default and meaning, for ``--help``."""
    lines = ["Every key of the recipe can be set here as well, and then wins over the file:"]
    for name, section in Recipe.model_fields.items():
        lines.append(f"\n{(type(section.default).__doc__ or name).splitlines()[0]}")
        for key, field in type(section.default).model_fields.items():
            lines.append(f"  --{name}.{key} (default {field.default!r})\n      {field.description}")
    return "\n".join(lines)
