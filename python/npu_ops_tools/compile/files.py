"""Loads a user's kernel FILE.py::KERNEL, also under @triton.autotune and @triton.heuristics."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import inspect
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Iterator

import npu_ops_import_hook
import torch
from npu_ops_emulator import vendor

from npu_ops_tools.compile.launches import DTYPES, Launch

# Modules that kernel files import only for host code: packages that need an NPU or a server, and
# modules of a later Triton.
STOOD_IN = (
    "sglang", "torch_npu", "triton.language.extra.cann", "triton.tools.tensor_descriptor", "vllm",
)  # fmt: skip
# Options of `triton.Config` for the vendor's compiler; other options are for GPUs.
COMPILER_OPTIONS = (
    "multibuffer", "enable_hivm_auto_cv_balance", "sync_solver", "unit_flag",
    "limit_auto_multi_buffer_only_for_local_buffer", "limit_auto_multi_buffer_of_local_buffer",
    "set_workspace_multibuffer", "tile_mix_vector_loop", "tile_mix_cube_loop",
)  # fmt: skip


_ARGUMENT = re.compile(r"%arg(\d+)\b")


@dataclasses.dataclass(frozen=True)
class _Pointer:
    """Replaces a tensor as a heuristic's argument. Has only a dtype, because no shape is given."""

    dtype: torch.dtype | None


def from_file(target: str, signature: str, constants: str) -> list[Launch]:
    """Return the launches of the kernel "FILE.py::name": one, or one per autotuner configuration.

    Constants that heuristics or configurations set may be omitted; given ones override them.

    signature: "x=*bf16,n=i32"; with values for heuristics, "x=*bf16:8192,n=i32:64". The value of a
    pointer is the number of elements.
    constants: "BLOCK=1024,CAUSAL=True,y=None".

    Raises:
        ValueError: there is no such file or kernel, or arguments are unknown or missing.
    """
    path, _, name = target.partition("::")
    kernel, layers = _unwrapped(target, getattr(_load(path), name, None))
    types_, values = _signature(signature)
    fixed = {key: _literal(value) for key, value in _pairs("constexpr", constants)}
    default = {p.name: p.default for p in kernel.params if p.has_default}
    seen = {
        name: _Pointer(_dtype(kind)) if kind.startswith("*") else values[name]
        for name, kind in types_.items()
        if kind.startswith("*") or name in values
    }
    found = []
    for chosen, options in _configurations(layers, seen, fixed):
        constants = {n: v for n, v in default.items() if n not in types_} | chosen
        _check_arguments(kernel, types_, constants)
        named = ", ".join(f"{n}={v}" for n, v in chosen.items() if n not in fixed)
        launch = Launch(
            named, kernel, tuple(types_.items()), tuple(constants.items()), tuple(options.items()),
            tuple(values.get(name) for name in types_),
        )  # fmt: skip
        if launch not in found:
            found.append(launch)
    return found


def _unwrapped(target: str, kernel) -> tuple:
    """Return the @triton.jit function, and its decorators from the outside in."""
    from triton.runtime import JITFunction

    layers = []
    while not isinstance(kernel, JITFunction):
        if not hasattr(kernel, "fn"):
            raise ValueError(
                f"kernel: got {target!r}, needs FILE.py::NAME of a @triton.jit function"
            )
        layers.append(kernel)
        kernel = kernel.fn
    return kernel, layers


def _configurations(layers: list, seen: dict, fixed: dict) -> Iterator[tuple[dict, dict]]:
    """Yield the constants to compile with, and compiler options, after applying the decorators."""
    if not layers:
        yield fixed, {}
        return
    layer, *inner = layers
    if hasattr(layer, "configs"):  # it is an autotuner
        agree = [c for c in layer.configs if (fixed | c.kwargs).items() >= fixed.items()]
        for config in agree or layer.configs:
            options = {name: getattr(config, name, None) for name in COMPILER_OPTIONS if agree}
            for found, more in _configurations(inner, seen, config.kwargs | fixed):
                yield found, {n: v for n, v in options.items() if v is not None} | more
        return
    for name, heuristic in getattr(layer, "values", {}).items():
        if name not in fixed:
            fixed = fixed | {name: _computed(name, heuristic, seen | fixed)}
    yield from _configurations(inner, seen, fixed)


def _computed(name: str, heuristic, arguments: dict):
    try:
        return heuristic(arguments)
    except Exception as error:  # the file's code may raise anything
        raise ValueError(
            f"constexpr: got no {name}, and its heuristic raised "
            f"{type(error).__name__} ({error}); "
            f"needs {name}=VALUE, or values of its arguments in the signature, as in n=i32:64"
        ) from None


def _check_arguments(kernel, types_: dict, constants: dict) -> None:
    wanted = {parameter.name for parameter in kernel.params}
    if wanted != types_.keys() | constants.keys():
        listed = ", ".join(
            p.name + (": constexpr" if p.is_constexpr else "") for p in kernel.params
        )
        got = ", ".join([*types_, *constants]) or "none"
        raise ValueError(f"arguments: got {got}, needs {listed}")


def _signature(text: str) -> tuple[dict[str, str], dict]:
    """Parse the types of the arguments, and the values of those that have one."""
    kinds, values = {}, {}
    for name, given in _pairs("signature", text):
        kind, colon, value = given.partition(":")
        _check_type(name, kind)
        kinds[name] = kind
        if colon:
            values[name] = _value(name, kind, value)
    return kinds, values


def _check_type(argument: str, kind: str) -> None:
    from triton.language import str_to_ty

    try:
        str_to_ty(kind)
    except (KeyError, IndexError) as error:
        needs = "a type of Triton's, e.g. *bf16, i32 or fp32"
        raise ValueError(f"signature: got {argument}={kind}, needs {needs}") from error


def _value(name: str, kind: str, text: str):
    if kind.startswith("*") and _dtype(kind) is None:
        raise ValueError(f"signature: got {kind!r}, needs a pointer to one of {', '.join(DTYPES)}")
    try:
        if kind.startswith("*"):
            return torch.empty(int(text), dtype=_dtype(kind))
        return float(text) if kind.startswith(("fp", "bf")) else int(text)
    except (RuntimeError, ValueError):
        needs = "a number of elements" if kind.startswith("*") else "a number"
        raise ValueError(f"signature: got {name}={kind}:{text}, needs {needs}") from None


def _dtype(kind: str) -> torch.dtype | None:
    """Return the torch dtype that a pointer points to; None if torch has none."""
    name = {short: name for name, short in DTYPES.items()}.get(kind[1:])
    return name and getattr(torch, name)


def _pairs(option: str, text: str) -> Iterator[tuple[str, str]]:
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = item.partition("=")
        if not separator:
            raise ValueError(f"{option}: got {item!r}, needs name=value")
        yield name.strip(), value.strip()


def _literal(text: str):
    named = {"True": True, "False": False, "None": None}
    if text in named:
        return named[text]
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return text


def axes_read(launch: Launch, soc: str) -> int:
    """Return how many grid axes a kernel reads: 2 if it has a program_id(1).

    Raises:
        CompileError: the front end rejects the kernel.
    """
    text = vendor.lower(
        launch.kernel, dict(launch.signature), dict(launch.constants), soc, **dict(launch.options)
    )
    # The last six arguments are the numbers of programs along x, y and z, and this program's
    # indices.
    head = next(line for line in text.splitlines() if "func.func @" in line and "%arg" in line)
    *_, last = (int(n) for n in _ARGUMENT.findall(head.partition("attributes")[0]))
    body = text.partition(head)[2]
    read = {int(n) for n in _ARGUMENT.findall(body)}
    return max(
        (axis + 1 for axis in range(3) if {last - 5 + axis, last - 2 + axis} & read), default=1
    )


# Loading a file


def _load(path: str) -> types.ModuleType:
    file = pathlib.Path(path).absolute()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"file: got {path!r}, needs a Python file")
    vendor.frontend()
    root, packages = _packages(file)
    sys.path.insert(0, str(root))  # as `python FILE.py` does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton warns that there is no NPU
        with _stand_ins(), _a_driver():
            try:
                if packages:
                    return _imported(file, root, packages)
                return _executed(file, file.stem)
            except Exception as error:
                raise ValueError(f"file: {path} raised {type(error).__name__}: {error}") from error


def _imported(file: pathlib.Path, root: pathlib.Path, packages: list[str]) -> types.ModuleType:
    """Import a module that is inside packages, if possible without running the packages' code.

    That code may import a whole framework and need a device. It runs only if the file needs it.
    """
    name = ".".join((*packages, file.stem))
    before = set(sys.modules)
    try:
        with _bare(root, packages):
            return _executed(file, name)
    except ImportError:
        for added in set(sys.modules) - before:
            if added.partition(".")[0] == packages[0]:
                del sys.modules[added]
        return importlib.import_module(name)


def _executed(file: pathlib.Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def _packages(file: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    """Return the folder that the file's imports start from, and the packages containing it."""
    root, packages = file.parent, []
    while (root / "__init__.py").exists():
        packages.insert(0, root.name)
        root = root.parent
    return root, packages


@contextlib.contextmanager
def _bare(root: pathlib.Path, packages: list[str]) -> Iterator[None]:
    """Provide empty packages in place of those that contain the file, for its imports."""
    added = []
    for depth in range(1, len(packages) + 1):
        name = ".".join(packages[:depth])
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*packages[:depth]))]
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = package
            added.append(name)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


@contextlib.contextmanager
def _a_driver() -> Iterator[None]:
    """Provide a driver: triton.autotune needs one when a file is imported, even without an NPU."""
    from triton.runtime import driver

    before = driver.active
    try:
        before.get_current_target()
    except Exception:  # a driver may raise anything without its device
        driver.set_active(_Driver())
    try:
        yield
    finally:
        driver.set_active(before)


class _Driver:
    """A driver for use while files are imported. It runs nothing."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", vendor.SOCS[0], 0)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        return None

    @property
    def utils(self):
        cube, vector = vendor.cores(vendor.SOCS[0])
        properties = {"num_aicore": cube, "num_vectorcore": vector}
        return types.SimpleNamespace(get_device_properties=lambda device: properties)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Provide empty modules for imports that need an NPU or a server, such as torch_npu.

    npu-ops' import hook is off meanwhile, so that no adapter patches these modules.
    """
    finder, before = _Finder(), list(sys.meta_path)
    npu_ops_import_hook.unwatch()
    sys.meta_path.append(finder)  # last, so that installed packages are found first
    without_npu = not hasattr(torch, "npu")
    if without_npu:
        torch.npu = _Thing()
    try:
        yield
    finally:
        sys.meta_path[:] = before
        if without_npu:
            del torch.npu
        for name in finder.made:
            sys.modules.pop(name, None)


class _Finder:
    """Finds the modules of `STOOD_IN` that are not installed."""

    def __init__(self):
        self.made: list[str] = []

    def find_spec(self, name: str, path=None, target=None):
        if not any(f"{name}.".startswith(f"{package}.") for package in STOOD_IN):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec) -> types.ModuleType:
        self.made.append(spec.name)
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        pass


class _Module(types.ModuleType):
    """A stand-in module with every attribute: `triton` and `tl` are Triton's, others a `_Thing`."""

    def __getattr__(self, name: str):
        import triton

        if name == "__version__":
            return "0"
        if name.startswith("__"):
            raise AttributeError(name)
        return {"triton": triton, "tl": triton.language}.get(name) or _Thing()


class _Thing:
    """Stands for anything of a missing package: a decorator, a base class, a type, a function.

    A file may use it while it is imported. A kernel that uses it does not compile.
    """

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()

    def __call__(self, *args, **named):
        decorates = len(args) == 1 and not named
        function = decorates and (inspect.isroutine(args[0]) or hasattr(args[0], "fn"))
        return args[0] if function or (decorates and inspect.isclass(args[0])) else _Thing()

    def __mro_entries__(self, bases) -> tuple:
        return ()

    def __or__(self, other):
        return self

    __ror__ = __getitem__ = __or__
