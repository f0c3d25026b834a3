"""What shardwise promises to programs, read from the code as plain JSON: names, signatures, commands, schemas of ops.

A part is {name: facts}. A class, a function or a value that is public by several names has its facts at the shortest,
and "= that name" at the others. Nothing in it differs between versions of Python, torch and Triton: annotations as our
sources have them, no repr of an object of theirs, no member that a parent of theirs defines.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

# name -> facts, of one part
Part = dict[str, Any]
# modules that are public and no package
MODULES = ("shardwise", "shardwise.checkpoint", "shardwise.quant", "shardwise.torchrec")
# packages with an `__all__` for other rooms of ours, not for programs
ROOMS = ("shardwise.cli", "shardwise.kernels.", "shardwise.migration", "shardwise.perf", "shardwise.served")
# what we call by these names is no promise of ours but Python's
_PLAIN = (bool, int, float, str, bytes, type(None))
# methods that Python calls for what programs write: x[key], len(x), with x, a + b, {x: 1}
_SPECIAL = (
    *("__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__call__"),
    *("__enter__", "__exit__", "__bool__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__add__"),
    *("__sub__", "__mul__", "__and__", "__or__", "__getattr__", "__fspath__"),
)


def names() -> Part:
    """`__all__` of every public module, every import path of TorchRec and FBGEMM that is served, and environment."""
    values = {
        f"{module}.{name}": getattr(import_module(module), name)
        for module in public_modules()
        for name in import_module(module).__all__
        if name not in ("__version__", "TABLE")
    }
    return {**_by_one_name({**values, **_served()}), "environment": {"kind": "environment", "keys": environment()}}


def environment() -> dict[str, str]:
    """The variables of the environment that our sources name."""
    import shardwise

    root = Path(shardwise.__file__).parent
    sources = [path for folder in (root, *root.iterdir()) for path in folder.resolve().glob("**/*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in {*sources})
    # one process of ours tells another by NAMES_TAKEN
    named = {*re.findall(r'"(SHARDWISE_[A-Z_]+)"', text)} - {"SHARDWISE_NAMES_TAKEN"}
    return dict.fromkeys(sorted(named), "variable")


def public_modules() -> list[str]:
    """The modules whose `__all__` is public: the facade, those beside it, and packages below that are no rooms."""
    import shardwise

    # those beside it are asked one by one: without the links in shardwise/ no folder lists them
    beside = [import_module(f"shardwise.{name}") for name in shardwise._SUB_PACKAGES]
    found = {
        module.name
        for walked in beside
        if not walked.__name__.startswith(ROOMS)
        for module in pkgutil.walk_packages(walked.__path__, f"{walked.__name__}.")
        if module.ispkg
    }.union(each.__name__ for each in beside)
    packages = [name for name in sorted(found) if not name.startswith(ROOMS)]
    return [*MODULES, *(name for name in packages if hasattr(import_module(name), "__all__"))]


def _served() -> dict[str, Any]:
    """Every name of the tables of TorchRec's and FBGEMM's import paths."""
    from shardwise.migration import mirror

    # they begin to serve when they are imported
    for root in ("torchrec", "fbgemm_gpu"):
        import_module(f"shardwise.{root}")

    return {
        f"{path}.{name}": mirror.resolve(path, name, served_as=f"shardwise.{path}")
        for path, table in mirror._NAMES.items()
        for name in table
        if name not in ("__version__",)
    }


def _by_one_name(values: Mapping[str, Any]) -> Part:
    """The facts of each value at one name of it, ours before theirs and short before long; "= name" at the others."""
    first: dict[int, str] = {}
    part: Part = {}
    for name in sorted(values, key=lambda name: (not name.startswith("shardwise."), name.count("."), name)):
        value = values[name]
        # one number or text may be two constants
        shared = isinstance(value, (type, types.FunctionType)) and first.setdefault(id(value), name)
        part[name] = f"= {shared}" if shared and shared != name else facts(value)
    public = {id(value): value for value in values.values() if isinstance(value, type)}
    errors = {value.__name__: value for value in public.values() if issubclass(value, BaseException)}
    for name, told in part.items():
        if isinstance(told, dict) and told["kind"] in ("class", "enum", "function") and "of" not in told:
            told |= _some(bases=_bases(values[name], public), raises=_raises(values[name], errors))
    return dict(sorted(part.items()))


def _bases(value: Any, public: Mapping[int, type]) -> str:
    """What an instance is too, by `isinstance` and `except`: public classes, and those of others right above ours."""
    if not isinstance(value, type):
        return ""
    parents = value.__mro__[1:]
    ours = [parent for parent in parents if id(parent) in public]
    above = [base for parent in (value, *parents) if _is_ours(parent) for base in parent.__bases__]
    others = [base for base in above if not _is_ours(base) and base.__module__ not in ("typing", "abc")]
    return " ".join(sorted({parent.__name__ for parent in (*ours, *others)} - {"object"}))


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("shardwise")


def _raises(value: Any, errors: Mapping[str, type]) -> dict[str, str]:
    """Errors that docstrings name under "Raises": of a class by method, "" for itself and for a function."""
    holders = {"": value}
    if isinstance(value, type):
        holders |= {name: member for name, member in vars(value).items() if not name.startswith("_")}
    found = {}
    for name, holder in holders.items():
        text = inspect.cleandoc(getattr(getattr(holder, "__func__", holder), "__doc__", None) or "")
        section = re.search(r"^Raises:\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE)
        entries = re.findall(r"^ {4}(\w[\w, ]*):", section.group(1), re.MULTILINE) if section else []
        found[name] = " ".join(sorted({_error(error, errors) for each in entries for error in each.split(", ")}))
    return _some(**found)


def _error(name: str, errors: Mapping[str, type]) -> str:
    """An error, and what catches it too."""
    known = errors.get(name) or vars(builtins).get(name)
    above = [parent.__name__ for parent in known.__mro__[1:-3]] if known else []
    return f"{name}({','.join(above)})" if above else name


def facts(value: Any) -> Any:
    """Of a class how it is called and its public members, of an enum its values, of a function how it is called."""
    origin = str(getattr(value, "__module__", "") or "")
    # Callable[...] and list[int] are classes to Python 3.10
    if get_origin(value) is not None:
        return {"kind": "value"}
    if isinstance(value, types.ModuleType):
        return {"kind": "module"}
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return {
            "kind": "enum",
            "values": {name: _text(member.value) for name, member in value.__members__.items()},
            **_some(members=_members(value)),
        }
    if isinstance(value, type):
        if not origin.startswith("shardwise"):
            return {"kind": "class", "of": origin.partition(".")[0]}
        told = _some(call=_how_called(value), members=_members(value), special=_special(value))
        return {"kind": "class", **told}
    if callable(value) and origin.startswith("shardwise"):
        return {"kind": "function", **_some(call=signature(value))}
    return {"kind": "value", **_some(value=_text(value) if _is_data(value, within=True) else None)}


def _is_data(value: Any, *, within: bool = False) -> bool:
    """Whether a value is told by its text; records of ours too, but not collections of them."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, (*value.keys(), *value.values())))
    ours = _is_ours(type(value)) and is_dataclass(value)
    return isinstance(value, (*_PLAIN, enum.Enum)) or (within and ours) or type(value).__name__ == "dtype"


def _special(value: type) -> str:
    """Methods of `_SPECIAL` that it or a parent of ours defines; "assignment" where fields can be assigned."""
    found: dict[str, Any] = {}
    for parent in reversed(value.__mro__):
        if _is_ours(parent):
            found.update({name: member for name, member in vars(parent).items() if name in _SPECIAL})
    words = {name for name, member in found.items() if member is not None}
    if is_dataclass(value) and not vars(value)["__dataclass_params__"].frozen:
        words.add("assignment")
    return " ".join(sorted(words))


def _some(**given: Any) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value}


def _how_called(value: type) -> str | None:
    """The signature by which instances are made; None where a parent that is not ours defines it."""
    fields: Any = getattr(value, "_fields", None)
    if issubclass(value, tuple) and fields is not None:
        defaults: Any = vars(value)["_field_defaults"]
        return f"({', '.join(f'{n}={_text(defaults[n])}' if n in defaults else n for n in fields)})"
    for parent in value.__mro__:
        maker = vars(parent).get("__init__") or vars(parent).get("__new__")
        if maker is not None:
            maker = getattr(maker, "__func__", maker)
            # of Protocol it is typing's
            given = fields_of(parent) if is_dataclass(parent) else {}
            return signature(maker, skip=1, made=given, returns=False) if _is_ours(maker) else None
    return None


def fields_of(value: Any) -> dict[str, Any]:
    """What default factories of a dataclass make, by field."""
    return {each.name: each.default_factory() for each in fields(value) if each.default_factory is not MISSING}


def _members(value: type) -> Part:
    """Public members that it or a parent of ours defines, by name."""
    found: dict[str, Any] = {}
    for parent in reversed(value.__mro__):
        if parent.__module__.startswith("shardwise"):
            found.update({name: member for name, member in vars(parent).items() if not name.startswith("_")})
            if issubclass(parent, BaseException) and "__init__" in vars(parent):
                # what a program reads of an error that it caught
                made = re.findall(r"self\.([a-z]\w*)(?:: [^=\n]+)? = ", inspect.getsource(parent.__init__))
                found.update(dict.fromkeys(made, "attribute"))
    # which stand among the values, or in the call
    told = {*getattr(value, "__members__", ()), *getattr(value, "_fields", ())}
    if is_dataclass(value):
        told |= {each.name for each in fields(value) if each.init}
    return {name: _member(member) for name, member in sorted(found.items()) if name not in told}


def _member(member: object) -> str:
    if isinstance(member, (property, cached_property)):
        settable = isinstance(member, property) and member.fset is not None
        getter = member.fget if isinstance(member, property) else member.func
        return f"{'settable ' * settable}property{_returned(getattr(getter, '__annotations__', {}).get('return'))}"
    if isinstance(member, (classmethod, staticmethod)):
        skip = int(isinstance(member, classmethod))
        return f"{type(member).__name__} {signature(member.__func__, skip=skip)}"
    if isinstance(member, type):
        return "class"
    return signature(member, skip=1) or "attribute" if callable(member) else "attribute"


def signature(value: Any, *, skip: int = 0, made: Mapping[str, Any] | None = None, returns: bool = True) -> str | None:
    """Parameters with kinds and defaults as Python writes them, without the first `skip`, and the annotated result.

    `made` are defaults that a factory makes. None where no signature is known.
    """
    try:
        given = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    words = _words([*given.parameters.values()][skip:], made or {})
    return f"({', '.join(words)}){_returned(given.return_annotation) if returns else ''}"


def _returned(said: object) -> str:
    """ " -> list[str]", as the source has it, without private names; "" where it says nothing."""
    text = re.sub(r"(?<!\w)_\w+", "Any", said) if isinstance(said, str) else ""
    return f" -> {text}" if text else ""


def _words(parameters: list[inspect.Parameter], made: Mapping[str, Any]) -> Iterator[str]:
    kinds = [parameter.kind for parameter in parameters]
    starred = False
    for n, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not starred and parameter.VAR_POSITIONAL not in kinds:
            yield "*"
            starred = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = made.get(parameter.name, parameter.default)
        yield f"{stars}{parameter.name}{'' if default is parameter.empty else f'={_text(default)}'}"
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.POSITIONAL_ONLY not in kinds[n + 1 :]:
            yield "/"


def _text(value: Any) -> str:
    """A default or constant as an expression that reads the same in every version."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value) in (tuple, list):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if type(value) is list else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}" if value else "set()"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value.__qualname__.replace("<lambda>", "function").replace("<locals>.", "")
    # torch.float32, whose repr is its name
    if type(value).__name__ in ("dtype", "memory_format", "layout"):
        return str(value)
    if type(value).__name__ == "device":
        return f"device({str(value)!r})"
    name = type(value).__name__
    if is_dataclass(value) and _is_ours(type(value)):
        # a field that is new and has a default is no other default of whom it is given to
        usual = {**{each.name: each.default for each in fields(value)}, **fields_of(value)}
        told = {each.name: _text(getattr(value, each.name)) for each in fields(value) if each.init}
        return f"{name}({', '.join(f'{key}={text}' for key, text in told.items() if text != _text(usual[key]))})"
    return f"{name.lstrip('_')}()"


def ops() -> Part:
    """Schemas of the ops that we register, shardwise's and FBGEMM's."""
    import torch

    from shardwise import fbgemm, kernels
    from shardwise.fbgemm import OPS

    # registered when they are imported
    assert kernels.__all__
    fbgemm.register_ops()
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("shardwise::")]
    part = {f"{schema.name}.{schema.overload_name}".rstrip("."): str(schema) for schema in schemas}
    part |= {f"fbgemm::{name}": f"fbgemm::{op.schema}" for name, op in OPS.items()}
    return {name: {"kind": "op", "schema": schema} for name, schema in sorted(part.items())}


def commands() -> Part:
    """Every command with its arguments and options: type, default, flags."""
    import click

    from shardwise.cli import commands as root

    part: Part = {}
    waiting: list[tuple[str, click.Command]] = [("shardwise", root())]
    while waiting:
        words, command = waiting.pop()
        # arguments are given by their place
        given = [param for param in command.params if param.param_type_name == "argument"]
        options = {" ".join(param.opts + param.secondary_opts): _option(param) for param in command.params}
        options |= {param.opts[0]: f"{_option(param)} number {n}" for n, param in enumerate(given, 1)}
        part[words] = {"kind": "command", **_some(options=dict(sorted(options.items())))}
        if isinstance(command, click.Group):
            context = click.Context(command)
            below = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
            waiting += [(f"{words} {name}", found) for name, found in below if found is not None]
    return dict(sorted(part.items()))


def _option(param: Any) -> str:
    import click

    words = [param.param_type_name]
    if getattr(param, "is_flag", False):
        words.append("flag")
    elif isinstance(param.type, click.Choice):
        words.append(f"one of {'|'.join(str(choice) for choice in param.type.choices)}")
    elif isinstance(param.type, (click.types.IntRange, click.types.FloatRange)):
        words.append("integer" if isinstance(param.type, click.types.IntRange) else "number")
        # as it looks in Python
        low, high = param.type.min, param.type.max
        if low is not None or high is not None:
            left, right = "(" if param.type.min_open else "[", ")" if param.type.max_open else "]"
            words.append(f"in {left}{'' if low is None else low}, {'' if high is None else high}{right}")
    else:
        words.append(param.type.name)
    words += [word for word in ("multiple", "required") if getattr(param, word, False)]
    if param.nargs not in (1,):
        words.append(f"of {param.nargs}")
    default = param.default
    # that of --jobs is the machine's; "no default" has another object in each version of click
    if isinstance(default, (*_PLAIN, tuple, list)) and default not in (None, False, ()) and "--jobs" not in param.opts:
        words.append(f"default {_text(default)}")
    return " ".join(words)
