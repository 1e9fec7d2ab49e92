"""Functions and classes of installed public packages, cut out by name and promoted to float64.

Only the text is used: importing flash-linear-attention needs a GPU compiler, and the decorators of transformers hand
the work to GPU kernels where those are installed.
"""
import ast
import importlib.metadata
import importlib.util
import math
import pathlib
import sys
import types

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F


def version(package):
    return f"{package} {importlib.metadata.version(package).split('+')[0]}"


class ToDouble(ast.NodeTransformer):
    """torch.float32 and torch.float -> torch.float64, x.float() -> x.double(); no decorators but Python's own."""

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in ("float", "float32"):
            node.attr = "float64"
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args:
            node.func.attr = "double"
        return node

    def undecorated(self, node):
        self.generic_visit(node)
        kept = ("property", "staticmethod", "classmethod", "dataclass")
        node.decorator_list = [d for d in node.decorator_list if isinstance(d, ast.Name) and d.id in kept]
        return node

    visit_FunctionDef = visit_ClassDef = undecorated


def _compiled(tree, path):
    return compile(ast.fix_missing_locations(ToDouble().visit(tree)), path, "exec", dont_inherit=True)


def _root(package):
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


def cut_out(path, name, package="fla", **more):
    """The function or class `name` of the package's file `path`; `more` are names that it refers to."""
    node = next(n for n in ast.parse((_root(package) / path).read_text()).body if getattr(n, "name", None) == name)
    annotations = ast.parse("from __future__ import annotations").body
    scope = {"torch": torch, "nn": nn, "F": F, "rearrange": rearrange, "math": math, **more}
    exec(_compiled(ast.Module(annotations + [node], []), path), scope)
    return scope[name]


def model(name):
    """The module modeling_<name> of transformers."""
    package = f"transformers.models.{name}"
    made = types.ModuleType(f"{package}.promoted_{name}")
    made.__package__ = package
    sys.modules[made.__name__] = made
    path = _root("transformers") / "models" / name / f"modeling_{name}.py"
    exec(_compiled(ast.parse(path.read_text()), str(path)), made.__dict__)
    return made
