"""Test the patching engine on modules made for these tests."""

from __future__ import annotations

import functools
import json
import re
import sys
import types

import npu_ops_adapters
import pytest
from npu_ops_adapters import patching
from npu_ops_adapters.patching import Patch, State, Status, Statuses, engine, records

from npu_ops.core import env, log

TARGET = "host.maths:double"


def double(x, scale=2):
    return x * scale


def made(original):
    def npu_ops_double(x, scale=2):
        return ("ours", original(x, scale))

    return npu_ops_double


def patch(target=TARGET, make=made, signatures=(("x", "scale"),), op="double", **kwargs) -> Patch:
    return Patch(
        target, op, make, why="it is slow", signatures=signatures, versions="host 1 to 3",
        remove_when="it is fast", **kwargs,
    )  # fmt: skip


def state(rows, target=TARGET):
    (found,) = [row.sentence for row in rows if row.target == target]
    return found


@pytest.fixture(autouse=True)
def nothing_is_applied():
    """Revert patches that another test file left behind in this process."""
    patching.revert()


@pytest.fixture
def host(monkeypatch):
    """A framework: `host.maths` has the functions, and `host.model` imports them by value."""
    maths, model = types.ModuleType("host.maths"), types.ModuleType("host.model")
    maths.double = types.FunctionType(double.__code__, {}, "double", (2,))
    maths.double.__module__ = "host.maths"
    maths.slot = None
    model.twice = maths.double

    class Layer:
        def forward(self, x):
            return x

        @staticmethod
        def norm(x):
            return x

    maths.Layer = Layer
    for module in (maths, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(log, "_said", set())
    yield types.SimpleNamespace(maths=maths, model=model, double=maths.double)
    patching.revert()
    assert engine.ledger == []


def test_nothing_is_planned_for_a_module_that_is_not_imported():
    rows = patching.apply([patch("host.elsewhere:double")])
    assert [row.sentence for row in rows] == ["module not imported yet"]
    assert "host.elsewhere" not in sys.modules


def test_a_patch_asks_more_than_parameters(host):
    said = []
    asks = patch(why_not=lambda found: said.append(found) or "it is another")
    assert state(patching.apply([asks])) == "refused: it is another" and said[0] is host.double
    broken = patch(why_not=lambda found: found.no_such_name)
    assert ("refused: npu-ops cannot create the replacement: AttributeError") in state(
        patching.apply([broken])
    )
    absent = patch("host.maths:absent", optional=True, why_not=lambda found: str(found))
    assert state(patching.apply([absent]), absent.target) == "refused: None"
    assert host.maths.double is host.double


def test_a_module_that_is_being_imported_waits(host):
    host.maths.__spec__ = types.SimpleNamespace(_initializing=True)
    assert state(patching.apply([patch()])) == "module not imported yet"
    assert state(patching.apply([patch()], ready="host.maths")) == "applied"


def test_plan_apply_verify_revert(host):
    assert state(patching.plan([patch()])) == "apply"
    assert host.maths.double is host.double
    assert state(patching.apply([patch()])) == "applied"
    assert state(patching.plan([patch()])) == "applied"
    assert host.maths.double(4) == ("ours", 8)
    assert host.maths.double.__name__ == "npu_ops_double"
    assert host.model.twice is host.maths.double  # it was imported by value, under another name
    assert state(patching.verify()) == "applied"
    assert state(patching.revert()) == "reverted"
    assert host.maths.double is host.model.twice is host.double
    assert patching.verify() == [] and patching.revert() == []


def test_applied_twice_is_applied_once(host):
    patching.apply([patch()])
    ours = host.maths.double
    assert state(patching.apply([patch()])) == "applied"
    assert host.maths.double is ours and len(patching.verify()) == 1


def test_an_applied_patch_that_is_no_longer_listed_is_still_planned(host):
    patching.apply([patch()])
    assert state(patching.plan([])) == "applied"


@pytest.mark.parametrize("disable", ["double", "all"])
def test_a_disabled_op_is_left_alone(host, disable):
    with env.override(disable=frozenset({disable})):
        assert state(patching.apply([patch()])) == "disabled by NPU_OPS_DISABLE"
    assert host.maths.double is host.double


def test_an_unknown_signature_is_refused_with_a_sentence_and_the_others_applied(host, caplog):
    host.maths.other = lambda y, *rest: y
    other = patch("host.maths:other", signatures=(("x",), ("x", "scale")))
    for _ in range(2):
        rows = patching.apply([other, patch()])
        assert state(rows, "host.maths:other") == (
            "refused: expected (x) or (x, scale) (host 1 to 3), got (y, rest) of test_patching."
            "test_an_unknown_signature_is_refused_with_a_sentence_and_the_others_applied.<locals>."
            "<lambda>"
        )
        assert state(rows) == "applied"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("host.maths:other: refused")


def test_a_renamed_function_is_refused(host):
    del host.maths.double
    sentence = "refused: host.maths has no double; it was there in host 1 to 3"
    assert state(patching.apply([patch()])) == sentence
    assert not hasattr(host.maths, "double")
    gone = patch("host.maths:Gone.method")
    assert state(patching.plan([gone]), gone.target).startswith("refused: host.maths has no Gone")


def test_what_is_not_a_function_is_refused(host):
    host.maths.double = 3
    assert state(patching.plan([patch()])).endswith("got (?) of builtins.int")


def test_an_empty_slot_is_filled_where_that_is_expected(host):
    fill = patch("host.maths:slot", lambda original: double, signatures=(None, ("x",)))
    assert state(patching.plan([patch("host.maths:slot")]), "host.maths:slot") == (
        "refused: expected (x, scale) (host 1 to 3), got None of builtins.NoneType"
    )
    host.model.slot = None  # a slot of its own, not the one in `host.maths`
    assert state(patching.apply([fill]), "host.maths:slot") == "applied"
    assert host.maths.slot is double and host.model.slot is None
    patching.revert()
    assert host.maths.slot is None


def test_an_attribute_that_is_not_there_can_be_filled_and_goes_again(host):
    fill = patch("host.maths:hole", lambda original: double, signatures=(None,))
    assert state(patching.plan([fill]), "host.maths:hole") == (
        "refused: host.maths has no hole; it was there in host 1 to 3"
    )
    made_of = []
    optional = patch(
        "host.maths:hole", lambda original: made_of.append(original) or double, optional=True
    )
    assert state(patching.apply([optional]), "host.maths:hole") == "applied"
    assert host.maths.hole is double and made_of == [None]
    host.model.imported = host.maths.hole
    patching.revert()
    assert not hasattr(host.maths, "hole") and not hasattr(host.model, "imported")


def test_importers_of_an_empty_slot_are_named(host):
    """One None cannot be told from another, so modules with the slot are listed."""
    host.model.slot = host.model.other = None
    fill = patch(
        "host.maths:slot", lambda original: double, signatures=(None,),
        also=("host.model", "host.elsewhere"),
    )  # fmt: skip
    assert state(patching.apply([fill]), "host.maths:slot") == "applied"
    assert host.maths.slot is host.model.slot is double and host.model.other is None
    host.model.slot = None
    assert state(patching.verify(), "host.maths:slot") == "captured too early by host.model"
    patching.revert()
    assert host.maths.slot is None and host.model.slot is None


def test_a_borrowed_object_is_replaced_by_name_alone(host):
    """`jit_fuser` is torch.compile itself, whose other names must not change."""
    import torch

    host.maths.fuser = host.model.fuser = host.model.compile = torch.compile
    fuser = patch("host.maths:fuser", lambda original: double, signatures=())
    patching.apply([fuser])
    assert host.maths.fuser is host.model.fuser is double
    assert host.model.compile is torch.compile is not double
    patching.revert()
    assert host.maths.fuser is host.model.fuser is torch.compile


def test_importers_are_left_alone_without_rebind(host):
    patching.apply([patch(rebind=False)])
    assert host.model.twice is host.double is not host.maths.double
    assert state(patching.verify()) == "applied"


def test_methods_and_static_methods_come_back_as_they_were(host):
    before = dict(vars(host.maths.Layer))
    targets = ("host.maths:Layer.forward", "host.maths:Layer.norm")
    methods = [
        patch(
            targets[0], lambda original: lambda self, x: ("ours", x), signatures=(("self", "x"),)
        ),
        patch(targets[1], lambda original: staticmethod(lambda x: ("ours", x)), signatures=()),
    ]
    patching.apply(methods)
    layer = host.maths.Layer()
    assert layer.forward(1) == layer.norm(1) == ("ours", 1)
    patching.revert()
    assert all(vars(host.maths.Layer)[name] is value for name, value in before.items())


def test_a_patch_is_applied_completely_or_not_at_all(host, monkeypatch):
    class Stubborn(types.ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError("frozen")

    frozen = Stubborn("host.frozen")
    vars(frozen)["double"] = host.double
    monkeypatch.setitem(sys.modules, "host.frozen", frozen)
    rows = patching.apply([patch()])
    assert state(rows) == "refused: npu-ops cannot create the replacement: AttributeError: frozen"
    assert host.maths.double is host.model.twice is frozen.double is host.double
    assert patching.verify() == []


def test_a_factory_that_fails_refuses_its_patch_alone(host):
    def fails(original):
        raise RuntimeError("no such rule")

    other = patch("host.maths:Layer.forward", made, signatures=())
    rows = patching.apply([patch(make=fails), other])
    assert state(rows) == (
        "refused: npu-ops cannot create the replacement: RuntimeError: no such rule"
    )
    assert state(rows, other.target) == "applied"
    assert host.maths.double is host.double


def test_two_ops_may_share_a_target(host):
    inner, outer = patch(op="inner"), patch(op="outer", make=wrapping)
    patching.apply([inner, outer])
    assert host.maths.double(1) == ("outer", ("ours", 2))
    assert [row.sentence for row in patching.verify()] == ["applied", "applied"]
    patching.revert()
    assert host.maths.double is host.model.twice is host.double


def wrapping(original):
    def npu_ops_outer(x, scale=2):
        return ("outer", original(x, scale))

    return npu_ops_outer


def test_verify_says_who_overwrote_and_who_was_too_early(host, monkeypatch):
    patching.apply([patch()])
    late = types.ModuleType("host.late")
    late.kept = host.double
    monkeypatch.setitem(sys.modules, "host.late", late)
    assert state(patching.verify()) == "captured too early by host.late"
    host.maths.double = double
    assert state(patching.verify()) == "overwritten by test_patching.double"
    assert state(patching.revert()) == "overwritten by test_patching.double"
    assert host.maths.double is double  # set by someone else, so not ours to undo
    assert host.model.twice is host.double


def test_who_imported_ours_gets_the_original_back(host, monkeypatch):
    patching.apply([patch()])
    late = types.ModuleType("host.late")
    late.kept = host.maths.double
    monkeypatch.setitem(sys.modules, "host.late", late)
    patching.revert()
    assert late.kept is host.double


def test_a_replacement_that_had_another_name_before_keeps_it(host):
    """The replacement is a function that another module holds too; `revert` leaves that alone."""
    host.model.plain = double
    patching.apply([patch(make=lambda original: double)])
    assert host.maths.double is double
    patching.revert()
    assert host.maths.double is host.double and host.model.plain is double


def test_a_module_that_ran_again_is_patched_again(host):
    patching.apply([patch()])
    first = host.maths.double
    host.maths.double = again = types.FunctionType(double.__code__, {}, "double", (2,))
    again.__module__ = "host.maths"
    patching.forget("host.maths")
    assert state(patching.apply([patch()])) == "applied"
    assert host.maths.double is not first and host.model.twice is first
    assert [row.sentence for row in patching.revert()] == ["reverted", "reverted"]
    assert host.maths.double is again and host.model.twice is host.double


def test_a_note_is_shown(host):
    assert [row.note for row in patching.apply([patch(note=lambda: "3 functions")])] == [
        "3 functions"
    ]


# States and messages for the user


def test_a_state_is_one_of_a_kind_with_a_detail(host):
    renamed = patch("host.maths:gone")
    (refused, applied) = patching.apply([renamed, patch()])
    assert (refused.state, applied.state) == (State.REFUSED, State.APPLIED)
    assert refused.detail == "host.maths has no gone; it was there in host 1 to 3"
    host.maths.double = double
    (overwritten,) = patching.verify()
    assert overwritten.state is State.OVERWRITTEN
    assert overwritten.detail == "test_patching.double"
    assert f"{overwritten.state}" == "overwritten by" and json.dumps(State.APPLIED) == '"applied"'


def test_every_state_is_in_the_diagram():
    shown = set(re.findall(r"[A-Z]{2,}", patching.__doc__))
    assert {state.name for state in State} <= shown


def test_a_plan_prints_as_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    rows = Statuses(
        [
            Status(TARGET, "double", State.APPLIED, note="3 functions"),
            Status("host.maths:other", "other", State.OVERWRITTEN, "rival.[odd]"),
        ]
    )
    assert [line.split(maxsplit=2) for line in str(rows).splitlines()] == [
        ["target", "op", "state"],
        ["host.maths:double", "double", "applied; 3 functions"],
        ["host.maths:other", "other", "overwritten by rival.[odd]"],
    ]


# Patches that the framework itself applies


def left_to_the_host(host):
    """Return a patch left to the host, and the replacement that the host's registry
    put in place."""
    mine, replacement = patch(by="the host", rebind=False), made(host.double)
    assert state(patching.apply([mine])) == "left to the host"
    assert host.maths.double is host.double
    host.maths.double = replacement
    for _ in range(2):
        patching.adopt(mine, host.double, replacement)
    return mine, replacement


def test_what_another_applied_is_verified_and_undone(host):
    mine, _ = left_to_the_host(host)
    assert state(patching.plan([mine])) == state(patching.verify()) == "applied"
    assert [row.sentence for row in patching.revert()] == ["reverted"]
    assert host.maths.double is host.double


def test_what_another_applied_is_in_force_inside_further_wrappers(host):
    _, replacement = left_to_the_host(host)
    host.maths.double = functools.wraps(replacement)(lambda *args: replacement(*args))
    assert state(patching.verify()) == "applied"
    host.maths.double = host.double
    assert state(patching.verify()).startswith("overwritten by")


# Patches that a framework's own patch manager places


def handed_over(host, *patches):
    patching.apply(patches)
    patching.hand_over(patches)
    assert host.maths.double is host.model.twice is host.double


def test_what_is_handed_over_is_put_back_and_left(host):
    handed_over(host, patch())
    left = "left to the framework's patch manager"
    assert state(patching.apply([patch()])) == state(patching.plan([patch()])) == left
    assert host.maths.double is host.double
    patching.take_back()
    assert state(patching.apply([patch()])) == "applied"


def test_what_the_manager_places_is_verified_and_reverted_as_ours(host):
    handed_over(host, patch())
    theirs = types.FunctionType(double.__code__, {}, "theirs", (2,))
    host.maths.double = patching.place(patch(), theirs)  # as the manager does
    assert host.maths.double(4) == ("ours", 8)
    assert state(patching.verify()) == state(patching.plan([patch()])) == "applied"
    assert patching.place(patch(), host.maths.double) is host.maths.double  # already ours
    host.maths.double = patching.place(patch(), theirs)  # placed again
    assert len(patching.verify()) == 1
    assert state(patching.revert()) == "reverted"
    assert host.maths.double is theirs


def test_taken_back_nothing_of_ours_stays_where_the_manager_had_put_it(host):
    handed_over(host, patch())
    host.model.twice = host.maths.double = patching.place(patch(), host.double)
    patching.take_back()
    assert host.maths.double is host.model.twice is host.double
    assert patching.place(patch(), host.double) is host.double  # no longer handed over


def test_what_cannot_be_adopted_stays_as_it_is(host, caplog):
    handed_over(host, patch(), patch(op="other"))

    def unknown(y):
        return y

    assert patching.place(patch(), unknown) is unknown
    assert "refused: expected (x, scale)" in caplog.text
    fails = patch(make=lambda original: 1 / 0)
    assert patching.place(fails, host.double) is host.double
    assert "npu-ops cannot create the replacement: ZeroDivisionError" in caplog.text
    with env.override(disable=frozenset({"double"})):
        assert patching.place(patch(), host.double) is host.double


def test_a_wrapper_over_ours_that_says_so_is_no_overwriting(host):
    patching.apply([patch()])
    ours = host.maths.double

    @functools.wraps(ours)
    def over(*args):
        return ours(*args)

    host.maths.double = over
    assert state(patching.verify()) == "applied"
    host.maths.double = ours


def test_another_function_of_ours_is_no_overwriting_and_is_reverted(host):
    patching.apply([patch()])
    host.maths.double = another = made(double)
    another.__module__ = "npu_ops_adapters.host"
    assert state(patching.verify()) == "applied"
    assert state(patching.revert()) == "reverted"
    assert host.maths.double is host.model.twice is host.double


def test_joining_and_leaving(host):
    said = []
    settings = {"joined": lambda: said.append("joined"), "left": lambda: said.append("left")}
    patching.apply([patch(**settings)])
    patching.revert()
    assert said == ["joined", "left"]
    rows = patching.apply([patch(joined=lambda: 1 / 0)])
    assert state(rows) == (
        "refused: npu-ops cannot create the replacement: ZeroDivisionError: division by zero"
    )
    assert host.maths.double is host.double


def test_what_another_framework_has_put_there_stays_in_its_own_module(host, monkeypatch):
    other = types.ModuleType("other.maths")
    other.faster = types.FunctionType(double.__code__, {}, "faster", (2,))
    other.faster.__module__ = "other.maths"
    monkeypatch.setitem(sys.modules, "other.maths", other)
    host.maths.double = host.model.twice = theirs = other.faster
    patching.apply([patch()])
    assert host.model.twice is host.maths.double is not theirs
    assert other.faster is theirs and state(patching.verify()) == "applied"


def test_what_another_framework_has_put_there_is_known_elsewhere_by_name_alone(host, monkeypatch):
    """In other modules, another framework's function is replaced only under the target's name.

    MindSpeed replaces both torch.compile and torch.jit.script by one function, which Megatron then
    uses as its decorator, too.
    """
    third, user = types.ModuleType("third.compiler"), types.ModuleType("user.layers")
    theirs = types.FunctionType(double.__code__, {}, "nothing", (2,))
    theirs.__module__ = "other.maths"
    host.maths.double = host.model.twice = third.compile = user.double = theirs
    for module in (third, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patching.apply([patch()])
    assert host.model.twice is host.maths.double is user.double is not theirs
    assert third.compile is theirs and state(patching.verify()) == "applied"
    patching.revert()
    assert host.maths.double is host.model.twice is user.double is theirs


def test_every_patch_has_a_name_that_the_switch_knows():
    for patch in npu_ops_adapters.patches():
        records.known(patch.op, patch.target)
    with pytest.raises(ValueError, match="^here: got 'nosuch', needs one of all, add_rms_norm, "):
        records.known("nosuch", "here")
