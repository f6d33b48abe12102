"""A pipeline as its YAML file declares it: source, transforms, sink. Every error names file, line and key; they are
all told at once.

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
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from skylark.pipelines.errors import PipelineError, raise_all
from skylark.pipelines.own_options import wrong_options
from skylark.spark.options import BadOption, duration_ms, option_names

Key = tuple[str | int, ...]
"""Where a value stands: `("transforms", 0, "sql")`."""

Scalar = str | int | float | bool
_MAX_FILE_BYTES: Final = 1 << 20
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_NAME: Final = r"^[A-Za-z0-9][\w.-]*$"
_A_TRIGGER: Final = "expected once, continuous or a time such as 10s"
_IN_WORDS: Final = {
    "str": "a text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}


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


_Part = tuple[type[msgspec.Struct], Mapping[str, Any], Key]


class Mistake(PipelineError):
    """One at a line of a file."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


class Document:
    """A file and where its keys stand in it; without lines it is something else, such as a command line."""

    def __init__(self, name: str, lines: Mapping[Key, int], blocks: frozenset[Key] = frozenset()) -> None:
        self.name = name
        self._lines = lines
        self._blocks = blocks

    def error(self, key: Key, text: str, *, line_within: int = 1) -> Mistake:
        """An error at `key`, or at what stands around it when the key is missing."""
        if not self._lines:
            return Mistake(f"{self.name}: {text}", 0)
        place = key
        while place and place not in self._lines:
            place = place[:-1]
        line = self._lines.get(place, 1)
        if place == key and key in self._blocks:
            line += line_within  # the text of a block begins on the line after its key
        return Mistake(f"{self.name}:{line}: {dotted(key)}: {text}" if key else f"{self.name}:{line}: {text}", line)


class Declared(msgspec.Struct, frozen=True):
    """A pipeline, and the document that its errors point into. Relative paths are relative to `directory`."""

    pipeline: Pipeline
    document: Document
    directory: Path

    def located(self, path: str) -> str:
        """`path` as Spark should see it: URLs as they are, others absolute."""
        return _located(path, self.directory)

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
    mistakes: list[Mistake] = [*_wrong_keys(Pipeline, tree, (), document), *_wrong_values(Pipeline, tree, (), document)]
    mistakes += _wrong_meanings(tree, document, directory)
    mistakes.sort(key=lambda mistake: mistake.line)
    raise_all(mistakes)
    return Declared(msgspec.convert(tree, Pipeline), document, directory)


def check_options(declared: Declared) -> None:
    """Of a pipeline that was not read from a file. All mistakes are raised at once."""
    raise_all(
        [
            mistake
            for part in (declared.pipeline.source, declared.pipeline.sink)
            for mistake in _wrong_own_options(part, declared.document, declared.directory)
        ]
    )


def options_of(declared: Declared, part: Literal["source", "sink"]) -> dict[str, str]:
    """The options of source or sink as Spark takes them: texts."""
    return _as_texts(getattr(declared.pipeline, part).options)


def settings_of(declared: Declared) -> dict[str, str]:
    """Spark's settings in the file."""
    return _as_texts(declared.pipeline.spark.conf)


def _located(path: str, directory: Path) -> str:
    return path if re.match(r"^[a-z][a-z0-9+.-]*:", path) else str((directory / path).resolve())


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


def _parts(kind: type[msgspec.Struct], tree: Mapping[str, Any], key: Key) -> Iterator[_Part]:
    """The mappings in `tree` that are structs of their own."""
    if kind is Pipeline:
        for name, part in (("source", Source), ("sink", Sink), ("spark", Spark)):
            if isinstance(tree.get(name), dict):
                yield part, tree[name], (*key, name)
        if isinstance(tree.get("transforms"), list):
            for index, item in enumerate(tree["transforms"]):
                if isinstance(item, dict):
                    yield Transform, item, (*key, "transforms", index)


def _wrong_keys(kind: type[msgspec.Struct], tree: Mapping[str, Any], key: Key, document: Document) -> Iterator[Mistake]:
    """msgspec names the first unknown key only by the mapping it is in; here each has its line, and a suggestion."""
    known = option_names(kind)
    for name, value in tree.items():
        if name not in known:
            yield document.error((*key, name), f"unknown key; {_instead(name, known)}")
        if name in ("options", "conf") and isinstance(value, dict):
            yield from _wrong_options(value, (*key, name), document)
    for part, inside, place in _parts(kind, tree, key):
        yield from _wrong_keys(part, inside, place, document)


def _wrong_options(given: Mapping[str, Any], key: Key, document: Document) -> Iterator[Mistake]:
    seen: dict[str, str] = {}
    for option, value in given.items():
        if not isinstance(value, Scalar):
            yield document.error((*key, option), "expected a text, a number, true or false")
        # Spark compares names of options without case, and would take one of the two.
        other = seen.setdefault(option.lower(), option) if key[-1] == "options" else option
        if other != option:
            yield document.error((*key, option), f"is {other} in another case: give one of them")


def _wrong_values(
    kind: type[msgspec.Struct], tree: Mapping[str, Any], key: Key, document: Document
) -> Iterator[Mistake]:
    """msgspec tells of the first one only; here each value is looked at by itself."""
    inside = list(_parts(kind, tree, key))
    meant = {close for name in tree for close in _close(name, option_names(kind))}  # misspelt, which is told already
    looked_at = {place[: len(key) + 1] for _, _, place in inside}
    for field in msgspec.structs.fields(kind):
        place = (*key, field.encode_name)
        if field.encode_name not in tree:
            if field.required and field.encode_name not in meant:
                yield document.error(key, f"the key {field.encode_name} is missing")
        elif place not in looked_at or field.encode_name == "transforms":
            yield from _wrong_value(field, tree[field.encode_name], place, document)
    for part, value, place in inside:
        yield from _wrong_values(part, value, place, document)


def _wrong_value(field: msgspec.structs.FieldInfo, value: Any, key: Key, document: Document) -> Iterator[Mistake]:
    if field.encode_name == "transforms" and isinstance(value, list):
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                yield document.error((*key, index), "expected `sql: ...` or `python: module:function`")
        return
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as e:
        reason, _, place = str(e).partition(" - at `")
        text = _A_TRIGGER if field.encode_name == "trigger" else _plain(reason, field.type)
        yield document.error((*key, *_parsed(place.rstrip("`"))), text)


def _wrong_meanings(tree: Mapping[str, Any], document: Document, directory: Path) -> Iterator[Mistake]:
    """What each part says of itself, if it can be read."""
    for kind, part, key in _parts(Pipeline, tree, ()):
        try:
            value = msgspec.convert(part, kind)
        except msgspec.ValidationError:
            continue  # told already
        if isinstance(value, Transform) and (value.sql is None) == (value.python is None):
            yield document.error(key, "expected one of sql and python")
        if isinstance(value, Source | Sink):
            wrong = list(_about_source(value) if isinstance(value, Source) else _about_sink(value, tree))
            for name, text in wrong:
                yield document.error((*key, name), text)
            if not wrong and not any(_wrong_options(value.options, (*key, "options"), document)):
                yield from _wrong_own_options(value, document, directory)
    trigger = tree.get("trigger", "once")
    if isinstance(trigger, str) and trigger not in ("once", "continuous"):
        try:
            duration_ms(trigger, "trigger")
        except BadOption:
            yield document.error(("trigger",), _A_TRIGGER)


def _wrong_own_options(part: Source | Sink, document: Document, directory: Path) -> Iterator[Mistake]:
    name = "source" if isinstance(part, Source) else "sink"
    path = None if part.path is None else _located(part.path, directory)
    for place, text in wrong_options(name, part.format, _as_texts(part.options), path):
        yield document.error((name, *place), text)


def _about_source(source: Source) -> Iterator[tuple[str, str]]:
    if source.format in ("parquet", "json", "csv") and source.path is None:
        yield "path", f"missing: the directory of the {source.format} files"
    if source.format in ("json", "csv") and source.schema is None:
        yield "schema", f"missing: a stream of {source.format} needs it, as `id bigint, name string`"
    if source.format == "rocketmq" and source.path is not None:
        yield "path", "a topic has no path; it is named by the option subscribe"
    if source.format == "rocketmq-commitlog" and source.path is None:
        yield "path", "missing: the directory of a broker's store"


def _about_sink(sink: Sink, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if sink.format == "parquet" and sink.path is None:
        yield "path", "missing: the directory that the Parquet files go to"
    if sink.format == "table" and sink.table is None:
        yield "table", "missing: the name of the table"
    if sink.table is not None and sink.table != sink.table.lower() and not _has_own_cases(sink.table, tree):
        yield (
            "table",
            f"Spark compares names of tables without case: this would be the table {sink.table.lower()}; write it so",
        )
    if sink.format in ("parquet", "table") and sink.mode != "append":
        yield "mode", f"{sink.format} files can only be appended to; use mode append"
    if sink.partition_by and sink.format not in ("parquet", "table"):
        yield "partitionBy", f"only parquet and table are partitioned, not {sink.format}"


def _has_own_cases(table: str, tree: Mapping[str, Any]) -> bool:
    """Whether the table may be in another catalog than Spark's own, which puts all names in small letters."""
    spark = tree.get("spark")
    conf = spark.get("conf") if isinstance(spark, dict) else None
    settings = conf if isinstance(conf, dict) else {}
    is_another = any(str(key).startswith(("spark.sql.catalog.", "spark.sql.defaultCatalog")) for key in settings)
    return is_another or table.count(".") > 1 or str(settings.get("spark.sql.caseSensitive")).lower() == "true"


def _parsed(path: str) -> Key:
    """msgspec's `$.transforms[0].sql` as a key."""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path)
    return tuple(int(index) if index else name for name, index in parts)


def _plain(reason: str, kind: Any) -> str:
    """What msgspec says of a value, in words; `kind` is the type that it should have."""
    if "matching regex" in reason and ":" in reason:
        return "expected a function as module:function"
    if "matching regex" in reason:
        return "expected letters, digits, dots and dashes"
    if get_origin(kind) is Literal:
        *most, last = get_args(kind)
        return f"expected {', '.join(most)} or {last}"
    types = re.fullmatch(r"Expected `([^`]+)`, got `(\w+)`", reason)
    if types:
        expected = [_IN_WORDS.get(name, name) for name in types[1].split(" | ") if name != "null"]
        return f"expected {' or '.join(expected)}, not {_IN_WORDS.get(types[2], types[2])}"
    return reason[0].lower() + reason[1:]


def _instead(name: str, known: list[str]) -> str:
    close = _close(name, known)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def _close(name: str, known: list[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1)
