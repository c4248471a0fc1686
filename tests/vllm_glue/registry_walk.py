"""Walks the sources of vLLM's model classes for what gets between stored tensors and layers.

Nothing is imported or built: many classes need libraries or GPUs that a test machine lacks.
What the walk finds are places to judge, by rules that rather find too many than too few; it
follows names, and architectures that a class mentions as text.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Entity = tuple[str, str]
"""A class, function or constant: its module and its name."""

PACKAGES = ("model_executor/models", "models", "model_executor/layers/mamba")
OTHERS = frozenset({"amd", "cpu", "ops", "xpu"})
"""Folders of kernels, and of other platforms' copies of a class."""
MODELS = "vllm.model_executor.models"
LINEAR = frozenset(
    {"ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear"}
    | {"MergedColumnParallelLinear", "QKVParallelLinear"}
)
METHODS = frozenset(
    {"view", "reshape", "chunk", "split", "narrow", "transpose", "permute", "t", "unflatten"}
    | {"flatten", "unbind", "swapaxes", "repeat", "repeat_interleave", "expand", "index_select"}
    | {"tensor_split", "roll", "flip", "mul_", "add_", "sub_", "div_", "copy_"}
)
FUNCTIONS = frozenset(
    {"cat", "stack", "concat", "chunk", "split", "hstack", "vstack", "permute", "transpose"}
    | {"flip", "reshape", "roll", "matmul", "pad"}
)
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult)
STREAM = re.compile(r"tuple\[str, .?torch\.Tensor")
LOADS = re.compile(r"load|weight|permut|remap|convert|repack|pad|split|fuse|shard|transp|merge")
LOADED = frozenset({"loaded_weight", "loaded_tensor", "weight", "tensor", "w", "expert_data"})
NOT_A_TENSOR = re.compile(
    r"name|loader|shape|params?($|_)|prefix|id$|path|key|modules|mapping|size|offset|idx|start|end"
    r"|rank"
)


@dataclass
class Module:
    """One source file."""

    name: str
    is_package: bool
    tree: ast.Module
    entities: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, Entity] = field(default_factory=dict)


class Sources:
    """Every model class of an installed vLLM, and what it refers to."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, Module] = {}
        for package in PACKAGES:
            for file in (root / package).rglob("*.py"):
                if OTHERS.isdisjoint(file.relative_to(root).parts):
                    module = _parse(file, root)
                    self.modules[module.name] = module
        self._references: dict[Entity, frozenset[Entity]] = {}

    @cached_property
    def architectures(self) -> dict[str, Entity]:
        """vLLM's list of models: the class of each architecture."""
        found = {}
        for node in self.modules[f"{MODELS}.registry"].tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                        module, name = ast.literal_eval(value)
                        full = module if module.startswith("vllm.") else f"{MODELS}.{module}"
                        found[key.value] = self.resolve(full, name) or (full, name)
        return found

    def resolve(self, module: str, name: str) -> Entity | None:
        """Where a name that a module uses is defined; None outside of the packages walked."""
        for _ in range(8):
            found = self.modules.get(module)
            if found is None:
                return None
            if name in found.entities:
                return module, name
            if name not in found.imports:
                return None
            module, name = found.imports[name]
        return None

    def node(self, entity: Entity) -> ast.AST:
        return self.modules[entity[0]].entities[entity[1]]

    def lineage(self, entity: Entity) -> list[Entity]:
        """A class and those that it derives from, as far as they are vLLM's models."""
        found = [entity]
        for base in getattr(self.node(entity), "bases", ()):
            parent = self.resolve(entity[0], base.id) if isinstance(base, ast.Name) else None
            found += [cls for cls in self.lineage(parent) if cls not in found] if parent else []
        return found

    def references(self, entity: Entity) -> frozenset[Entity]:
        if entity not in self._references:
            found = set()
            for node in ast.walk(self.node(entity)):
                if isinstance(node, ast.Name):
                    found.add(self.resolve(entity[0], node.id))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(self.architectures.get(node.value))
            self._references[entity] = frozenset(found - {None, entity})
        return self._references[entity]

    def reach(self, entity: Entity) -> set[Entity]:
        """All that a class may build or call, directly or not."""
        seen, waiting = {entity}, [entity]
        while waiting:
            new = self.references(waiting.pop()) - seen
            seen |= new
            waiting += new
        return seen

    def methods(self, entity: Entity, name: str) -> Iterator[tuple[Entity, ast.FunctionDef]]:
        """A method and those of the same name that it overrides."""
        for cls in self.lineage(entity):
            for node in getattr(self.node(cls), "body", ()):
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    yield cls, node


def sites(sources: Sources) -> dict[str, set[str]]:
    """Places to judge, each with the architectures that get there.

    ``module.Class.function`` for a function that changes tensors on their way to a layer, the
    same with `` reads layer`` for one that looks at the weight of a linear layer, and with
    `` names`` for the ``load_weights`` of a model that does not rename what its quantization
    config asks it to rename.
    """
    users: dict[Entity, set[str]] = defaultdict(set)
    for architecture, cls in sources.architectures.items():
        for entity in sources.reach(cls):
            users[entity].add(architecture)
    layers = _linear_attributes(sources)
    found: dict[str, set[str]] = defaultdict(set)
    for entity, architectures in users.items():
        for place in _places(sources, entity, layers):
            found[place] |= architectures
    for architecture, cls in sources.architectures.items():
        place = _unnamed(sources, cls)
        if place:
            found[place].add(architecture)
    return dict(found)


# ------------------------------------------------ tensors on their way


def _places(sources: Sources, entity: Entity, layers: set[str]) -> Iterator[str]:
    node = sources.node(entity)
    functions = node.body if isinstance(node, ast.ClassDef) else [node]
    for function in functions:
        if isinstance(function, ast.FunctionDef):
            place = _label(entity, function)
            if _changes_tensors(function):
                yield place
            for layer in _layers_read(sources, entity, function, layers):
                yield f"{place} reads {layer}"


def _changes_tensors(function: ast.FunctionDef) -> bool:
    tensors: set[str] = set()
    for inner in ast.walk(function):
        if isinstance(inner, ast.FunctionDef):
            tensors |= _tensors(inner)
    return bool(tensors) and any(_is_change(node, tensors) for node in ast.walk(function))


def _tensors(function: ast.FunctionDef) -> set[str]:
    """Names of variables that hold loaded tensors: those of the stream, and made from those."""
    streams, tensors = set(), set()
    for argument in (*function.args.args, *function.args.kwonlyargs):
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        if STREAM.search(kind) or argument.arg == "weights":
            streams.add(argument.arg)
        elif argument.arg in LOADED and LOADS.search(function.name):
            tensors.add(argument.arg)
    before = -1
    while (streams or tensors) and before < len(streams) + len(tensors):
        before = len(streams) + len(tensors)
        for node in ast.walk(function):
            if isinstance(node, (ast.For, ast.comprehension)):
                _follow_loop(node, streams, tensors)
            elif isinstance(node, ast.Assign):
                _follow_assignment(node, streams, tensors)
    return tensors


def _follow_loop(node: ast.For | ast.comprehension, streams: set[str], tensors: set[str]) -> None:
    used = _names(node.iter)
    if used & streams and isinstance(node.target, ast.Tuple):
        for part in node.target.elts[1:]:
            tensors |= _names(part)
    elif used & tensors and not used & streams:
        tensors |= {name for name in _names(node.target) if not NOT_A_TENSOR.search(name)}


def _follow_assignment(node: ast.Assign, streams: set[str], tensors: set[str]) -> None:
    used = _names(node.value)
    target = node.targets[0]
    if used & streams and isinstance(target, ast.Name) and target.id.endswith("weights"):
        streams.add(target.id)
    if used & tensors:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, (ast.Name, ast.Tuple)):
            tensors |= {
                name
                for name in _names(target)
                if name not in streams and not NOT_A_TENSOR.search(name)
            }


def _is_change(node: ast.AST, tensors: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        arguments = set().union(*map(_names, node.args)) if node.args else set()
        if isinstance(node.func.value, ast.Name) and node.func.value.id in {"torch", "F"}:
            return node.func.attr in FUNCTIONS and bool(arguments & tensors)
        used = _names(node.func.value)
        is_copied = node.func.attr == "copy_" and bool(arguments & tensors)
        return is_copied or (node.func.attr in METHODS and bool(used & tensors))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        by_name = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        return isinstance(node.ctx, ast.Load) and node.value.id in tensors and not by_name
    if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
        sides = (node.left, node.right)
        return any(isinstance(side, ast.Name) and side.id in tensors for side in sides)
    return False


# ------------------------------------------------ weights that are read


def _linear_attributes(sources: Sources) -> set[str]:
    """Names of attributes to which some class assigns a linear layer that may be quantized."""
    found = set()
    for module in sources.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assign) and _is_linear(sources, module.name, node.value):
                found |= {
                    target.attr for target in node.targets if isinstance(target, ast.Attribute)
                }
    return found


def _is_linear(sources: Sources, module: str, value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return False
    config = [word.value for word in value.keywords if word.arg == "quant_config"]
    return (
        bool(config)
        and not isinstance(config[0], ast.Constant)
        and _derives_from_linear(sources, module, value.func.id)
    )


def _derives_from_linear(sources: Sources, module: str, name: str) -> bool:
    if name in LINEAR:
        return True
    entity = sources.resolve(module, name)
    bases = getattr(sources.node(entity), "bases", ()) if entity else ()
    return any(
        isinstance(base, ast.Name) and _derives_from_linear(sources, entity[0], base.id)
        for base in bases
    )


def _layers_read(
    sources: Sources, entity: Entity, function: ast.FunctionDef, layers: set[str]
) -> set[str]:
    found = set()
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "weight"
            and isinstance(node.value, ast.Attribute)
            and node.value.attr in layers
            and _may_be_linear(sources, entity, node.value)
        ):
            found.add(node.value.attr)
    return found


def _may_be_linear(sources: Sources, entity: Entity, layer: ast.Attribute) -> bool:
    """Whether ``self.a.b`` is a linear layer, or cannot be told."""
    path = ast.unparse(layer).split(".")
    if path[0] != "self":
        return True
    owners = [entity]
    for name in path[1:-1]:
        owners = [cls for owner in owners for cls in _classes_of(sources, owner, name)]
    values = [(owner, value) for owner in owners for value in _assigned(sources, owner, path[-1])]
    return not values or any(_is_linear(sources, owner[0], value) for owner, value in values)


def _assigned(sources: Sources, entity: Entity, attribute: str) -> Iterator[ast.expr]:
    for cls in sources.lineage(entity):
        for node in ast.walk(sources.node(cls)):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and target.attr == attribute:
                        yield node.value


def _classes_of(sources: Sources, entity: Entity, attribute: str) -> Iterator[Entity]:
    for value in _assigned(sources, entity, attribute):
        for name in _names(value):
            found = sources.resolve(entity[0], name)
            if found and isinstance(sources.node(found), ast.ClassDef):
                yield found


# ------------------------------------------------ names


def _unnamed(sources: Sources, cls: Entity) -> str | None:
    """The ``load_weights`` that does without vLLM's loader, which renames side tensors."""
    first = None
    for owner, function in sources.methods(cls, "load_weights"):
        first = first or f"{_label(owner, function)} names"
        if _uses_loader(sources, owner, function):
            return None
        if not any(ast.unparse(node) == "super().load_weights" for node in ast.walk(function)):
            break
    return first


def _uses_loader(sources: Sources, entity: Entity, function: ast.AST) -> bool:
    """Whether a function, or one of its module's that it calls, uses the loader."""
    names = _names(function)
    if "AutoWeightsLoader" in names:
        return True
    called = (sources.resolve(entity[0], name) for name in names)
    helpers = (sources.node(found) for found in called if found and found[0] == entity[0])
    return any(
        isinstance(node, ast.FunctionDef) and "AutoWeightsLoader" in _names(node)
        for node in helpers
    )


# ------------------------------------------------ sources


def _parse(file: Path, root: Path) -> Module:
    parts = ("vllm", *file.relative_to(root).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    module = Module(name, is_package, ast.parse(file.read_text(encoding="utf-8")))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            source = _imported_from(module, node)
            for alias in node.names if OTHERS.isdisjoint(source.split(".")) else ():
                module.imports[alias.asname or alias.name] = (source, alias.name)
    for node in _top_level(module.tree.body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            module.entities.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.entities.setdefault(node.targets[0].id, node)
    return module


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those below ``if`` and ``try`` too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
                yield from _top_level(getattr(node, name, ()))


def _imported_from(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - 1 if module.is_package else node.level
    return ".".join(filter(None, [*parts[: len(parts) - up], node.module]))


def _label(entity: Entity, function: ast.FunctionDef) -> str:
    module = entity[0].removeprefix(f"{MODELS}.").removeprefix("vllm.")
    parts = (module, entity[1], function.name)
    return ".".join(parts if entity[1] != function.name else parts[:2])


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
