"""YAML with positions: the data, on which line each key stands, and which keys stand twice (YAML takes the last)."""

from __future__ import annotations

from typing import Any

import yaml

from cluster.errors import ConfigError

Path = tuple[Any, ...]
"""Keys and list indices from the top of a document."""


class Source:
    """One YAML document. `data` is what it holds; `duplicates` are keys that stand twice in one mapping,
    `odd_keys` those that are no text (`on:`, `8000:`, which YAML reads as true and as a number).

    Raises:
        ConfigError: an alias of what it stands in.
    """

    def __init__(self, file: str, node: yaml.Node | None, data: Any, first_line: int = 1) -> None:
        self.file = file
        self.data = data
        self.duplicates: list[Path] = []
        self.odd_keys: list[Path] = []
        self._first_line = first_line
        self._lines: dict[Path, int] = {(): first_line}
        self._blocks: dict[Path, int] = {}
        if node is not None:
            self._lines[()] = self._first_line + node.start_mark.line
            self._walk(node, (), ())

    def line(self, path: Path) -> int:
        """The line of a key, counted from 1; where there is no such key, of the nearest one around it."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def nested(self, path: Path) -> Source:
        """The YAML document in a multi-line string; its lines are those of this file.

        Raises:
            ConfigError: it is not YAML; names the line.
        """
        return load_text(self.file, self.get(path), self._blocks.get(path, self.line(path)))[0]

    def get(self, path: Path) -> Any:
        """The value at `path`, which must exist."""
        value = self.data
        for key in path:
            value = value[key]
        return value

    def _walk(self, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...]) -> None:
        """`above`: the nodes around this one."""
        if any(node is each for each in above):
            raise ConfigError(f"{self.file}:{self.line(path)}: {show_path(path)}: an alias of what it stands in")
        above = (*above, node)
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key_node, value_node in node.value:
                key = _scalar(key_node)
                if key == "<<" and key_node.tag == "tag:yaml.org,2002:merge":
                    self._walk(value_node, path, above)
                    continue
                place = (*path, key)
                self._lines[place] = self._first_line + key_node.start_mark.line
                if not isinstance(key, str):
                    self.odd_keys.append(place)
                if key in seen:
                    self.duplicates.append(place)
                seen.add(key)
                if isinstance(value_node, yaml.ScalarNode) and value_node.style in ("|", ">"):
                    self._blocks[place] = self._first_line + value_node.start_mark.line + 1
                self._walk(value_node, place, above)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[(*path, index)] = self._first_line + item.start_mark.line
                self._walk(item, (*path, index), above)


def load_file(file: str) -> list[Source]:
    """The documents of a file; an empty one counts as none.

    Raises:
        ConfigError: it cannot be read, or is not YAML; names the line.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return load_text(file, text)


def load_text(file: str, text: str, first_line: int = 1) -> list[Source]:
    """`load_file` of a text that begins on line `first_line` of the file."""
    loader = yaml.SafeLoader(text)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            documents.append(Source(file, node, loader.construct_document(node), first_line))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = first_line + (mark.line if mark else 0)
        raise ConfigError(f"{file}:{line}: not YAML: {getattr(error, 'problem', None) or error}") from error
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{file}:{first_line}: nested too deeply, or in itself") from error
    except (TypeError, ValueError) as error:  # a key that is a mapping; a date that does not exist
        raise ConfigError(f"{file}:{first_line}: {error}") from error
    finally:
        loader.dispose()
    return documents or [Source(file, None, None, first_line)]


def show_path(path: Path) -> str:
    """`applications[0].args.tp_size`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) and text else f".{part}" if text else str(part)
    return text or "file"


def _scalar(node: yaml.Node) -> Any:
    """A key as the loader constructs it."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()
