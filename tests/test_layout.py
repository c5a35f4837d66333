"""Repository rules: where files are, and in which direction imports go."""

import ast
import dataclasses
import graphlib
import inspect
import pathlib
import re
import subprocess
import types

import pytest
import torch

import npu_ops
from npu_ops.core import cases
from npu_ops.core.models import MODELS
from npu_ops.core.registry import Table

ROOT = pathlib.Path(__file__).parents[1]
OPS = sorted(p.parent.name for p in ROOT.glob("npu_ops/ops/*/__init__.py"))
NEVER = {"tests", "benchmarks"}
ABOVE = {  # packages that each tree may not import
    "npu_ops": {
        "npu_ops_adapters", "npu_ops_emulator", "npu_ops_autoload", "npu_ops_import_hook",
        "npu_ops_tools",
    },
    "python/npu_ops_adapters": {"npu_ops_emulator", "npu_ops_tools"},
    "python/npu_ops_emulator": {"npu_ops_adapters", "npu_ops_tools"},
    "python/npu_ops_tools": set(),
}  # fmt: skip
FRAMEWORKS = {"megatron", "mindspeed", "sglang", "transformers", "fla", "verl", "vllm"}
LAZY = {"torch_npu", "triton"}


def files(pattern):
    return sorted(ROOT.glob(pattern))


def relative(path):
    return str(path.relative_to(ROOT))


def imports(path):
    """Yield the modules that a Python file imports: (line, name, whether at its top level)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, node in tree.body) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: a relative import"
            yield node.lineno, node.module, node in tree.body


def test_there_are_ops():
    assert {"bias_dropout_add", "rope", "mrope"} <= set(OPS)


# Files and folders


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["__init__", "op", "reference", "triton_ascend", "cases"])
def test_an_op_has_its_files(op, name):
    folder = ROOT / "npu_ops" / "ops" / op
    assert (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_a_test_and_a_benchmark(op):
    for pattern in (f"tests/ops/**/test_{op}.py", f"benchmarks/bench_{op}.py"):
        assert files(pattern), pattern


PARTS_OF_AN_OPERATOR = {"attention", "chunk_gated_delta_rule", "qk_norm_rope"}  # long op.py


def test_an_op_is_declared_in_plain_sight():
    lengths = {
        op: len((ROOT / "npu_ops/ops" / op / "op.py").read_text().splitlines()) for op in OPS
    }
    assert {op for op, n in lengths.items() if n > 60} <= PARTS_OF_AN_OPERATOR
    assert sum(lengths.values()) <= 1100


def test_an_op_has_a_kernel_for_cpus_and_no_kernel_has_no_op():
    native = {p.relative_to(ROOT / "csrc").parts[0] for p in files("csrc/**/*_cpu.cpp")}
    in_python = {op for op in OPS if (ROOT / f"npu_ops/ops/{op}/cpu.py").exists()}
    assert native <= set(OPS) <= native | in_python


@pytest.mark.parametrize("op", OPS)
def test_an_op_exports_its_public_functions(op):
    exported = __import__(f"npu_ops.ops.{op}", fromlist=["__all__"]).__all__
    assert exported
    for name in exported:
        assert getattr(npu_ops, name).__doc__.count("\n") > 5, (
            f"{name}: shapes, dtypes, errors, source"
        )


PROTOCOL = {  # see npu_ops/core/cases.py
    "CASES": list, "TOLERANCES": dict, "DIFFERENTIABLE": tuple, "REPRESENTATIVE": tuple,
    "CALLS": list, "of_model": object,
}  # fmt: skip


def departures(module, functions):
    """Yield a sentence for each way a `cases` module departs from `npu_ops/core/cases.py`."""
    missing = [n for n, kind in PROTOCOL.items() if not isinstance(getattr(module, n, None), kind)]
    if missing or not callable(module.of_model):
        yield f"no {', '.join(missing or ['of_model'])}"
        return
    names = [case.name for case in module.CASES]
    if len(set(names)) < len(names):
        yield "CASES: two of one name"
    for name in set(module.REPRESENTATIVE) - set(names):
        yield f"REPRESENTATIVE: {name} is no case"
    if not {torch.float32, torch.bfloat16, torch.float16, torch.float64} <= set(module.TOLERANCES):
        yield "TOLERANCES: a dtype is missing"
    if {call.function for call in module.CALLS} != functions:
        yield "CALLS: not of every public function, or of others"
    for call in module.CALLS:
        for name in {*call.writes, *(call.differentiable or ())} - set(call.tensors()):
            yield f"CALLS: {call} has no tensor {name}"
    models = [case for model in MODELS.values() for case in module.of_model(model, 3)]
    if not models:
        yield "of_model: no model has it"
    for case in [*module.CASES, *models]:
        yield from departures_of_case(case, module, small=case in models)


def departures_of_case(case, module, small):
    takes = {"dtype": inspect.Parameter.empty, "device": "cpu", "seed": 0}
    found = inspect.signature(case.inputs).parameters
    if {name: parameter.default for name, parameter in found.items()} != takes:
        yield f"{case.name}: inputs takes {', '.join(found)}"
    if not dataclasses.is_dataclass(case) or not case.__dataclass_params__.frozen:
        yield f"{case.name}: no frozen dataclass"
        return
    fields = {field.name for field in dataclasses.fields(case)}
    if not {"name", "tokens", "large"} <= fields:
        yield f"{case.name}: no name, tokens or large"
    if (small and not case.large) or case.name in module.REPRESENTATIVE:
        tensors = case.inputs(torch.float32)
        for name in set(getattr(case, "differentiable", module.DIFFERENTIABLE)) & set(tensors):
            if tensors[name] is not None and not tensors[name].is_floating_point():
                yield f"{case.name}: {name} can have no gradient"


@pytest.mark.parametrize("op", OPS)
def test_cases_keep_the_protocol(op):
    functions = set(__import__(f"npu_ops.ops.{op}", fromlist=["__all__"]).__all__)
    takes_tensors = {name for name in functions if inspect.isfunction(getattr(npu_ops, name))}
    asked = {"plan_attention", "unfinished_rows"}  # public functions without tensors
    assert list(departures(cases.of(op), takes_tensors - asked)) == []


@pytest.mark.parametrize(
    "change, said",
    [
        ({"CALLS": None}, "no CALLS"),
        ({"of_model": None}, "no of_model"),
        ({"of_model": lambda model, tokens: []}, "of_model: no model has it"),
        ({"REPRESENTATIVE": ("none",)}, "REPRESENTATIVE: none is no case"),
        ({"TOLERANCES": {}}, "TOLERANCES: a dtype is missing"),
        ({"CALLS": [cases.Call("rope", lambda draw: {})]}, "CALLS: not of every"),
        ({"CALLS": [cases.Call("l2norm", lambda draw: {}, writes=("x",))]}, "CALLS: l2norm has no"),
        ({"CASES": 2 * cases.of("l2norm").CASES}, "CASES: two of one name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_departures_from_the_protocol_are_found(change, said):
    module = types.SimpleNamespace(**vars(cases.of("l2norm")) | change)
    assert said in "; ".join(departures(module, {"l2norm"}))


def test_implementations_have_the_houses_names():
    names = {"ascendc", "aclnn", "fla_npu", "triton_ascend", "cpu", "reference"}
    for table in Table.tables.values():
        assert {i.name for i in table.implementations} <= names
        assert table.implementations[-1].name == "reference"


# Native code


@pytest.mark.parametrize("path", files("csrc/*/*_cpu.cpp"), ids=relative)
def test_native_code_implements_and_defines_no_schema(path):
    text = path.read_text()
    assert len(re.findall(r"\bSTABLE_TORCH_LIBRARY_IMPL\(npu_ops, \w+, m\)", text)) == 1
    assert not re.search(
        r"\b(STABLE_)?TORCH_LIBRARY(_FRAGMENT)?\(|\bm\.def\(|PyInit|PYBIND11", text
    )


@pytest.mark.parametrize("path", [*files("csrc/**/*.cpp"), *files("csrc/**/*.h")], ids=relative)
def test_native_includes_flow_one_way(path):
    """Each quoted #include names a file in csrc; files in csrc/common include only each other."""
    for header in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
        assert ".." not in header
        assert (ROOT / "csrc" / header).exists() or (path.parent / header).exists(), header
        assert path.parent.name != "common" or header.startswith("common/")


@pytest.mark.parametrize(
    "path", [p for op in [*OPS, "common"] for p in files(f"csrc/{op}/*")], ids=relative
)
def test_one_header_knows_torch(path):
    """Only common/torch.h includes torch, so that one library serves all versions from 2.10."""
    included = re.findall(r"^\s*#\s*include\s*<((?:torch|ATen|c10)/[^>]+)>", path.read_text(), re.M)
    assert not included or relative(path) == "csrc/common/torch.h"
    arithmetic = path.name in ("vec.h", "philox.h")
    assert not arithmetic or "common/torch.h" not in path.read_text()


def test_that_header_uses_the_stable_abi_alone_from_torch_2_10_on():
    stable, older = (ROOT / "csrc/common/torch.h").read_text().split("#else")
    assert set(re.findall(r"<((?:torch|ATen|c10)/(?:csrc/)?\w+)", stable)) == {
        "torch/csrc/stable", "torch/headeronly",
    }  # fmt: skip
    assert "TORCH_TARGET_VERSION" in stable and "stable" not in older.replace("#define STABLE", "")


# Python


@pytest.mark.parametrize("tree", ABOVE)
def test_imports_flow_one_way(tree):
    for path in files(f"{tree}/**/*.py"):
        for line, module, _ in imports(path):
            package = module.partition(".")[0]
            assert package not in ABOVE[tree] | NEVER, f"{relative(path)}:{line}: {module}"


ACYCLIC = ["npu_ops", "python"]  # folders whose modules must not import each other in a circle


def import_graph(sources):
    """Map each module to those that it imports, also within functions. sources: name -> source."""
    graph = {}
    for name, source in sources.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & sources.keys()
            elif isinstance(node, ast.ImportFrom):
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                found = parts & sources.keys()
                graph[name] |= found | ({node.module} & sources.keys() if parts - found else set())
    return graph


def import_cycle(sources):
    """Return the modules of an import cycle, with the first repeated at the end; [] for none."""
    try:
        graphlib.TopologicalSorter(import_graph(sources)).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def modules_of(folder):
    """Return the sources of all modules in a package, or in a folder of packages, by name."""
    root = ROOT / folder
    base = ROOT if (root / "__init__.py").exists() else root
    sources = {}
    for path in files(f"{folder}/**/*.py"):
        if "templates" not in path.parts:
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            sources[name.removesuffix(".__init__")] = path.read_text()
    return sources


@pytest.mark.parametrize("folder", ACYCLIC)
def test_imports_never_go_round_in_a_circle(folder):
    sources = modules_of(folder)
    assert len(sources) > 50 and any(import_graph(sources).values())
    assert import_cycle(sources) == []


def test_a_circle_of_imports_is_found():
    sources = {
        "a": "import b.c",
        "b": "",
        "b.c": "def f():\n    from d import g",
        "d": "import torch\nfrom b import h\nfrom b import c",
    }
    assert import_graph(sources) == {"a": {"b.c"}, "b": set(), "b.c": {"d"}, "d": {"b", "b.c"}}
    assert sorted(set(import_cycle(sources))) == ["b.c", "d"]
    assert import_cycle(sources | {"d": "from b import h"}) == []


@pytest.mark.parametrize("part", ["core", "ops"])
def test_the_library_knows_no_framework(part):
    for path in files(f"npu_ops/{part}/**/*.py"):
        for line, module, _ in imports(path):
            assert module.partition(".")[0] not in FRAMEWORKS, f"{relative(path)}:{line}: {module}"


def test_vendor_packages_are_imported_where_they_are_used():
    """Only kernel files, loaded when an implementation is first chosen, import at their top."""
    for path in [
        *files("npu_ops/*.py"),
        *files("npu_ops/core/*.py"),
        *files("npu_ops/ops/**/*.py"),
    ]:
        if "triton_ascend" in relative(path):
            continue
        for line, module, top in imports(path):
            assert not (top and module.partition(".")[0] in LAZY), (
                f"{relative(path)}:{line}: {module}"
            )


def test_core_does_not_know_the_ops():
    for path in files("npu_ops/core/*.py"):
        for line, module, _ in imports(path):
            assert not module.startswith("npu_ops.ops"), f"{relative(path)}:{line}: {module}"


DELTA_RULES = (
    "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule", "gated_delta_rule_update",
)  # fmt: skip
# Modules of an op that other ops import, and which ops. The first line of the module's docstring
# names all these ops, or the group that they form.
GROUPS = {"all gated delta rules": {*DELTA_RULES, "chunk_kda"}}
SHARED = {
    "gated_delta_rule_update.triton_ascend": {"chunk_gated_delta_rule"},
    "bias_dropout_add.triton_ascend": {"attention"},
    "causal_conv1d.arguments": {"causal_conv1d_qkv", "causal_conv1d_update"},
    "causal_conv1d.layout": {"causal_conv1d_qkv"},
    "causal_conv1d.reference": {"causal_conv1d_qkv", "causal_conv1d_update"},
    "causal_conv1d.triton_ascend": {"causal_conv1d_qkv", "causal_conv1d_update"},
    **{
        f"chunk_gated_delta_rule.{part}": {"chunk_kda"}
        for part in (
            "arguments",
            "conversion",
            "limits",
            "reference",
            "sequences_cpu",
            "token_by_token",
            "triton_ascend.backward",
            "triton_ascend.chunks",
            "triton_ascend.forward",
            "triton_ascend.intra",
            "triton_ascend.plan",
        )
    },
    "fused_recurrent_gated_delta_rule.arguments": {*DELTA_RULES[1:], "chunk_kda"},
    "fused_recurrent_gated_delta_rule.reference": {*DELTA_RULES[1:], "chunk_kda"},
    "fused_recurrent_gated_delta_rule.states": {"chunk_gated_delta_rule", "chunk_kda"},
    "fused_recurrent_gated_delta_rule.triton_ascend": {"chunk_kda"},
    "fused_recurrent_gated_delta_rule.triton_ascend.states": {"gated_delta_rule_update"},
    "gdn_gate.reference": {"gated_delta_rule_update"},
    "gdn_gate.triton_ascend": {"gated_delta_rule_update"},
    "l2norm.reference": {"causal_conv1d_qkv", "chunk_gated_delta_rule", "gated_delta_rule_update"},
    "gdn_gate.softplus": {"gated_delta_rule_update"},
    "l2norm.triton_ascend": {"causal_conv1d", "chunk_gated_delta_rule", "chunk_kda"},
    "linear.formats": {"grouped_linear"},
    "linear.reference": {"grouped_linear"},
    "linear.triton_ascend": {"grouped_linear"},
    "mrope.reference": {"qk_norm_rope"},
    "mrope.sections": {"qk_norm_rope"},
    "mrope.triton_ascend": {"qk_norm_rope"},
    "rms_norm_gated.reference": {"qk_norm_rope", "rms_norm"},
    "rope.arguments": {"mrope", "qk_norm_rope"},
    "rope.reference": {"mrope", "qk_norm_rope"},
    "rope.rotation": {"mrope", "qk_norm_rope"},
    "rope.triton_ascend": {"mrope", "qk_norm_rope"},
}
# Ops that call another op through its public function, as a user would.
CALLED = {
    "gdn_gate": {*DELTA_RULES, "chunk_kda"},
    "l2norm": set(DELTA_RULES),
    **dict.fromkeys(("rms_norm", "rope"), {"qk_norm_rope"}),
    "linear": {"grouped_linear"},
}


def parts_of_other_ops(path):
    """Yield (op, module) for each module of another op, except `cases`, that a file imports."""
    own = path.relative_to(ROOT / "npu_ops/ops").parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            module = name if is_module(name) else name.rpartition(".")[0]
            if module.startswith("npu_ops.ops.") and module.split(".")[2] != own:
                part = module.removeprefix("npu_ops.ops.")
                if not part.endswith(".cases"):
                    yield own, part


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def test_ops_share_modules_that_say_so():
    """No op imports another's op.py, nor anything from its `__init__` but a public function."""
    found = {}
    for path in files("npu_ops/ops/*/**/*.py"):
        for own, part in parts_of_other_ops(path):
            found.setdefault(part, set()).add(own)
    assert found == SHARED | CALLED and not [part for part in SHARED if part.endswith(".op")]


@pytest.mark.parametrize("part", SHARED)
def test_the_first_line_of_a_shared_module_says_who_shares_it(part):
    path = ROOT / "npu_ops/ops" / part.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    line = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    said = set(re.findall(r"\w+", line))
    for group, members in GROUPS.items():
        said |= members if group in line else set()
    missing = {part.partition(".")[0], *SHARED[part]} - said
    assert line.startswith("Shared by ") and not missing, f"{part}: {line} names no {missing}"


def reads_environment(path):
    """Yield the lines of a file that touch os.environ or os.getenv."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in (
            "environ",
            "getenv",
            "environb",
            "putenv",
        ):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield node.lineno


def test_the_environment_is_read_in_one_place():
    readers = {
        relative(path)
        for path in [*files("npu_ops/core/*.py"), *files("npu_ops/ops/**/*.py")]
        if list(reads_environment(path))
    }
    assert readers == {"npu_ops/core/env.py"}


def test_custom_op_is_not_used():
    """A call through `custom_op` takes four times as long as one through `Library.define`."""
    for path in files("npu_ops/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            used = isinstance(node, ast.Attribute) and node.attr == "custom_op"
            assert not used, f"{relative(path)}:{node.lineno}"


TRACED = ("ops/*/__init__.py", "ops/*/arguments.py", "ops/*/checks.py", "core/check.py")


@pytest.mark.parametrize("tree", TRACED)
def test_argument_checks_use_what_torch_compile_of_torch_2_7_traces(tree):
    """torch 2.7's compiler refuses `A | B` in isinstance and _asdict, and runs any
    zip as strict."""
    for path in files(f"npu_ops/{tree}"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node) if isinstance(node, ast.Call) else ""
            refused = re.match(r"isinstance\(.+\||zip\(.*=False\)$|.*\._asdict\(\)$", called)
            assert not refused, f"{relative(path)}:{node.lineno}: {called}"


# Functions that allocate a tensor without an input tensor. Without dtype and device, torch takes
# defaults that model loaders change.
MAKERS = {
    "arange", "as_tensor", "asarray", "complex", "empty", "empty_permuted", "empty_strided", "eye",
    "frombuffer", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip


def allocations_by_default(source):
    """Yield the lines that call a torch function of MAKERS without dtype or without device."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, given = node.func.value, {keyword.arg for keyword in node.keywords}
        of_torch = isinstance(owner, ast.Name) and owner.id == "torch"
        if of_torch and node.func.attr in MAKERS and not {"dtype", "device"} <= given:
            yield node.lineno


@pytest.mark.parametrize("tree", ["npu_ops", "python/npu_ops_adapters"])
def test_allocations_name_dtype_and_device(tree):
    found = [
        f"{relative(path)}:{line}"
        for path in files(f"{tree}/**/*.py")
        for line in allocations_by_default(path.read_text())
    ]
    assert found == []


def test_the_check_of_allocations_finds_them():
    wrong = """
torch.empty(3)
torch.zeros(3, dtype=torch.int32)
x = [torch.arange(n, device=x.device) for n in y]
torch.full((3,), 1.0, device="cpu", dtype=torch.int64).sum()
x.new_empty(3), torch.empty_like(x)
"""
    assert list(allocations_by_default(wrong)) == [2, 3, 4]


LONGEST = 600  # lines


@pytest.mark.parametrize("tree", ["tests", "benchmarks"])
def test_no_file_of_tests_is_long(tree):
    """A longer file has two subjects and is to be split."""
    lengths = {path: len(path.read_text().splitlines()) for path in files(f"{tree}/**/*.py")}
    assert {relative(path): n for path, n in lengths.items() if n > LONGEST} == {}


def test_what_a_module_shares_is_made_once():
    """A module's fixture runs once per worker process, so its tests belong in one xdist group."""
    shared = [p for p in files("tests/**/test_*.py") if 'scope="module"' in p.read_text()]
    assert [relative(p) for p in shared if "xdist_group(" not in p.read_text()] == []
    assert len(shared) > 5


# Random numbers


DRAWS = re.compile(r"torch\.(randn|rand|randint|randperm)(_like)?\(|\.normal_\(|\brandom\.\w+\(")
PARTS = re.compile(r"^gdn_of_|_calls\.py$")  # parts of tests or of a program that seeds
SEEDED = re.compile(r"manual_seed\(|random\.(seed|Random)\(|default_rng\(\w")


def draws_without_a_seed(text):
    return bool(DRAWS.search(text)) and not SEEDED.search(text)


def test_programs_of_the_tests_seed_what_they_draw():
    """conftest.py seeds the tests; programs that tests start must seed themselves."""
    programs = [
        path
        for path in files("tests/**/*.py")
        if not run_by_pytest(path) and not PARTS.search(path.name)
    ]
    found = [relative(path) for path in programs if draws_without_a_seed(path.read_text())]
    assert found == [] and len(programs) > 20


def run_by_pytest(path):
    return re.search(r"^(async )?def (test_|pytest_)", path.read_text(), re.MULTILINE)


def test_a_draw_without_a_seed_is_found():
    assert draws_without_a_seed("x = torch.randn(3)") and draws_without_a_seed("random.choice(x)")
    assert not draws_without_a_seed("torch.manual_seed(1)\nx = torch.randn(3)")


def test_messages_spell_dtypes_in_one_way():
    """Messages use `check.short`: a dtype formatted by itself reads "torch.float32"."""
    spelled = re.compile(r"(got|needs|is|are|no|or|not|'s) \{[\w.]*dtype(\(\w+\))?\}")
    found = [
        f"{relative(path)}:{number}"
        for path in files("npu_ops/**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if spelled.search(line) and "spec.dtype" not in line  # that one is a string
    ]
    assert found == []


# Wording of documents and messages


def text_files():
    """Yield name and content of each text file that is committed or not ignored by git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content:
            yield name, content.decode()


def test_no_file_names_a_folder_of_one_machine():
    own = re.compile(r"(?<![\w.}/])/(home|root|work|tmp|Users|mnt|data|scratch)/[\w.]|\b[C-Z]:\\\w")
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if own.search(line)
    ]
    assert found == []
