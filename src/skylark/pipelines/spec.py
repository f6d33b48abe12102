"""A pipeline as its YAML file declares it: source, transforms, sink. Every error names file, line and key.

    name: paid
    source:
      format: rocketmq
      options: {nameServer: "localhost:9876", subscribe: orders, startingOffsets: earliest}
    transforms:
      - sql: select body, 'paid' as tags from input where tags = 'payment'
    sink:
      format: rocketmq
      options: {nameServer: "localhost:9876", topic: paid-orders}

`read` knows only what can be seen in the file; whether its SQL makes sense is asked of Spark (`checking.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from skylark.pipelines.errors import PipelineError
from skylark.spark.options import BadOption, duration_ms, option_names

Key = tuple[str | int, ...]
"""Where a value stands: `("transforms", 0, "sql")`."""

Scalar = str | int | float | bool
_MAX_FILE_BYTES: Final = 1 << 20
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_NAME: Final = r"^[A-Za-z0-9][\w.-]*$"


class Source(msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Where rows come from. `schema` (in SQL: `id bigint, name string`) is needed for json and csv."""

    format: Literal["rocketmq", "rocketmq-commitlog", "parquet", "json", "csv"]
    options: dict[str, Any] = {}
    path: str | None = None
    schema: str | None = None


class Transform(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One step. SQL sees the rows so far as the table `input`, those of the source as `source`. A Python function gets
    the rows so far as a DataFrame and returns another one.
    """

    sql: str | None = None
    python: Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")] | None = None


class Sink(msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Where rows go: a topic, Parquet files, a table of Spark's catalog, or the terminal."""

    format: Literal["rocketmq", "parquet", "table", "console"]
    options: dict[str, Any] = {}
    path: str | None = None
    table: str | None = None
    mode: Literal["append", "update", "complete"] = "append"
    partition_by: list[str] = []


class Spark(msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    master: str = "local[*]"
    conf: dict[str, Any] = {}


class Pipeline(msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A whole file. `trigger` is `continuous` (a batch as soon as there is something), `once` or a time: `10s`."""

    name: Annotated[str, Meta(pattern=_NAME, max_length=100)]
    source: Source
    sink: Sink
    transforms: list[Transform] = []
    trigger: str = "continuous"
    checkpoint: str | None = None
    spark: Spark = Spark()


class Document:
    """A file and where its keys stand in it; without lines it is something else, such as a command line."""

    def __init__(self, name: str, lines: Mapping[Key, int], blocks: frozenset[Key] = frozenset()) -> None:
        self.name = name
        self._lines = lines
        self._blocks = blocks

    def error(self, key: Key, text: str, *, line_within: int = 1) -> PipelineError:
        """An error at `key`, or at what stands around it when the key is missing."""
        if not self._lines:
            return PipelineError(f"{self.name}: {text}")
        place = key
        while place and place not in self._lines:
            place = place[:-1]
        line = self._lines.get(place, 1)
        if place == key and key in self._blocks:
            line += line_within  # the text of a block begins on the line after its key
        return PipelineError(f"{self.name}:{line}: {dotted(key)}: {text}" if key else f"{self.name}:{line}: {text}")


class Declared(msgspec.Struct, frozen=True):
    """A pipeline, and the document that its errors point into. Relative paths are relative to `directory`."""

    pipeline: Pipeline
    document: Document
    directory: Path

    def located(self, path: str) -> str:
        """`path` as Spark should see it: URLs as they are, others absolute."""
        return path if re.match(r"^[a-z][a-z0-9+.-]*:", path) else str((self.directory / path).resolve())

    @property
    def checkpoint(self) -> str:
        return self.located(self.pipeline.checkpoint or f"checkpoints/{self.pipeline.name}")


def read(path: Path) -> Declared:
    """The pipeline in a file. Raises PipelineError."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise PipelineError(f"{path} is larger than a pipeline may be ({_MAX_FILE_BYTES:,} bytes)")
        text = path.read_text()
    except OSError as e:
        raise PipelineError(f"cannot read the pipeline {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise PipelineError(f"cannot read the pipeline {path}: {e}") from e
    return parse(text, str(path), path.parent)


def parse(text: str, name: str, directory: Path) -> Declared:
    """The same for a text; `name` is what errors call it."""
    reading = _Reading(name)
    tree = reading.value_of(text)
    document = Document(name, reading.lines, frozenset(reading.blocks))
    if not isinstance(tree, dict):
        raise document.error((), "a pipeline is a mapping with the keys name, source, transforms and sink")
    _check_keys(Pipeline, tree, (), document)
    try:
        pipeline = msgspec.convert(tree, Pipeline)
    except msgspec.ValidationError as e:
        reason, _, place = str(e).partition(" - at `")
        raise document.error(_parsed(place.rstrip("`")), _plain(reason)) from None
    declared = Declared(pipeline, document, directory)
    _check_meaning(declared)
    return declared


def options_of(declared: Declared, part: Literal["source", "sink"]) -> dict[str, str]:
    """The options of source or sink as Spark takes them: texts."""
    return _as_texts(getattr(declared.pipeline, part).options)


def settings_of(declared: Declared) -> dict[str, str]:
    """Spark's settings in the file."""
    return _as_texts(declared.pipeline.spark.conf)


def _as_texts(given: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}


def dotted(key: Key) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


class _Reading:
    """YAML's nodes as plain values, with the line of every key."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lines: dict[Key, int] = {(): 1}
        self.blocks: set[Key] = set()

    def value_of(self, text: str) -> Any:
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            self._constructor = yaml.SafeLoader("")
            return self._value(node, ()) if node is not None else None
        except yaml.MarkedYAMLError as e:
            line = e.problem_mark.line + 1 if e.problem_mark else 1
            raise PipelineError(f"{self._name}:{line}: {e.problem or e.context}") from None
        except yaml.YAMLError as e:
            raise PipelineError(f"{self._name}: not YAML: {e}") from None

    def _value(self, node: yaml.Node, key: Key) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            values = []
            for index, item in enumerate(node.value):
                self.lines[*key, index] = item.start_mark.line + 1
                values.append(self._value(item, (*key, index)))
            return values
        if node.style in ("|", ">"):
            self.blocks.add(key)
        return self._constructor.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            name: Hashable = self._constructor.construct_object(name_node)
            if not isinstance(name, str):
                raise PipelineError(f"{self._name}:{line}: a key must be a text, not {name!r}")
            if name in found:
                raise PipelineError(f"{self._name}:{line}: {dotted((*key, name))} is given twice")
            self.lines[*key, name] = line
            found[name] = self._value(value_node, (*key, name))
        return found


def _check_keys(kind: type[msgspec.Struct], tree: Mapping[str, Any], key: Key, document: Document) -> None:
    """msgspec names the first unknown key only by the mapping it is in; here each has its line, and a suggestion."""
    parts: dict[str, type[msgspec.Struct]] = {"source": Source, "sink": Sink, "spark": Spark} if not key else {}
    known = option_names(kind)
    for name, value in tree.items():
        if name not in known:
            raise document.error((*key, name), f"unknown key; {_instead(name, known)}")
        if name in parts and isinstance(value, dict):
            _check_keys(parts[name], value, (name,), document)
        if name == "transforms" and not key and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    _check_keys(Transform, item, ("transforms", index), document)
        if name in ("options", "conf") and isinstance(value, dict):
            for option, given in value.items():
                if not isinstance(given, Scalar):
                    raise document.error((*key, name, option), "expected a text, a number, true or false")


def _check_meaning(declared: Declared) -> None:
    pipeline, document = declared.pipeline, declared.document
    for index, transform in enumerate(pipeline.transforms):
        if (transform.sql is None) == (transform.python is None):
            raise document.error(("transforms", index), "expected one of sql and python")
    source, sink = pipeline.source, pipeline.sink
    if source.format in ("parquet", "json", "csv") and source.path is None:
        raise document.error(("source", "path"), f"missing: the directory of the {source.format} files")
    if source.format in ("json", "csv") and source.schema is None:
        raise document.error(
            ("source", "schema"), f"missing: a stream of {source.format} needs it, as `id bigint, name string`"
        )
    if source.format == "rocketmq" and source.path is not None:
        raise document.error(("source", "path"), "a topic has no path; it is named by the option subscribe")
    if source.format == "rocketmq-commitlog" and source.path is None:
        raise document.error(("source", "path"), "missing: the directory of a broker's store")
    if sink.format == "parquet" and sink.path is None:
        raise document.error(("sink", "path"), "missing: the directory that the Parquet files go to")
    if sink.format == "table" and sink.table is None:
        raise document.error(("sink", "table"), "missing: the name of the table")
    if sink.format in ("parquet", "table") and sink.mode != "append":
        raise document.error(("sink", "mode"), f"{sink.format} files can only be appended to; use mode append")
    if sink.partition_by and sink.format not in ("parquet", "table"):
        raise document.error(("sink", "partitionBy"), f"only parquet and table are partitioned, not {sink.format}")
    if pipeline.trigger not in ("once", "continuous"):
        try:
            duration_ms(pipeline.trigger, "trigger")
        except BadOption:
            raise document.error(("trigger",), "expected once, continuous or a time such as 10s") from None


def _parsed(path: str) -> Key:
    """msgspec's `$.transforms[0].sql` as a key."""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path)
    return tuple(int(index) if index else name for name, index in parts)


def _plain(reason: str) -> str:
    missing = re.fullmatch(r"Object missing required field `(\w+)`", reason)
    if missing:
        return f"the key {missing[1]} is missing"
    if "matching regex" in reason and ":" in reason:
        return "expected a function as module:function"
    if "matching regex" in reason:
        return "expected letters, digits, dots and dashes"
    return reason[0].lower() + reason[1:]


def _instead(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
