"""The recipes that come with the package, by their names."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "recipes"

SHIPPED = {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def recipe_at(path: str | Path) -> Path:
    """``path``; where nothing is there and it is the name of a recipe of the package, with or without
    ``.toml``, that one's."""
    name = str(path)
    return Path(path) if Path(path).exists() else SHIPPED.get(name.removesuffix(".toml"), Path(path))
