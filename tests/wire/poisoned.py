"""Values of any type that goes over the wire or into a table, each with one whole number that Java has none of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from skylark.wire import fastjson

TOO_LARGE = (2**63, 10**30, -(10**30), 10**300)


def integers(kind: inspect.Type, path: str = "$") -> Iterator[tuple[str, inspect.IntType]]:
    """Every whole number in a type, with its place."""
    match kind:
        case inspect.IntType():
            yield path, kind
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from integers(field.type, f"{path}.{field.encode_name}")
        case inspect.DictType(key_type=keys, value_type=values):
            yield from integers(keys, f"{path}[key]")
            yield from integers(values, f"{path}[]")
        case inspect.ListType(item_type=items):
            yield from integers(items, f"{path}[]")
        case inspect.UnionType(types=types):
            for each in types:
                yield from integers(each, path)
        case inspect.Metadata(type=inner):
            yield from integers(inner, path)


def sample(kind: inspect.Type) -> Any:
    """A value of the type, with something in every part of it."""
    match kind:
        case inspect.IntType():
            return 1
        case inspect.StructType(fields=fields):
            return fastjson.ObjectKey({field.encode_name: sample(field.type) for field in fields})
        case inspect.DictType(key_type=keys, value_type=values):
            return {sample(keys): sample(values)}
        case inspect.ListType(item_type=items):
            return [sample(items)]
        case inspect.UnionType(types=types):
            return sample(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.Metadata(type=inner):
            return sample(inner)
        case inspect.BoolType():
            return True
        case inspect.FloatType():
            return 1.0
    return "text"


def variants(kind: inspect.Type, bad: int) -> Iterator[tuple[str, Any]]:
    """The sample with `bad` in one place after the other, and the name of the field that it stands in or below."""
    match kind:
        case inspect.IntType():
            yield "", bad
        case inspect.StructType(fields=fields):
            whole = sample(kind)
            for field in fields:
                for name, value in variants(field.type, bad):
                    yield name or field.encode_name, fastjson.ObjectKey(whole | {field.encode_name: value})
        case inspect.DictType(key_type=keys, value_type=values):
            for name, key in variants(keys, bad):
                yield name, {key: sample(values)}
            for name, value in variants(values, bad):
                yield name, {sample(keys): value}
        case inspect.ListType(item_type=items):
            for name, item in variants(items, bad):
                yield name, [item]
        case inspect.UnionType(types=types):
            if any(isinstance(each, inspect.StrType) for each in types):
                return  # the name of a constant, or its number: what is neither is in `test_enums`
            for each in types:
                yield from variants(each, bad)
        case inspect.Metadata(type=inner):
            yield from variants(inner, bad)


def structs_of(*modules: Any) -> list[type[msgspec.Struct]]:
    """The structs that the modules define."""
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
    ]
