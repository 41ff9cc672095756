"""The module _core: it says what C++ says, its objects do not change, and its stub describes exactly what is there."""

import ast
import pickle
from pathlib import Path

import pytest

import gradcast
from conftest import link_of
from gradcast import _core

PACKAGE = Path(gradcast.__file__).parent


def test_a_profile_made_by_hand_equals_the_same_one_read(profile, profile_fields):
    made = gradcast.Profile(
        name="small",
        world_size=4,
        forward_ns=3e6,
        backward_ns=6e6,
        tensors=[
            gradcast.Tensor(**{**tensor, "ready_ns": float(tensor["ready_ns"])}) for tensor in profile_fields["tensors"]
        ],
        link=link_of(100e3, 0.8),
    )
    assert made == profile
    assert gradcast.Profile.from_json(made.to_json()) == made


def test_a_profile_made_by_hand_is_checked_and_brought_into_urgency_order():
    first = gradcast.Tensor(name="a", bytes=4, ready_ns=1, need_ns=0)
    second = gradcast.Tensor(name="b", bytes=4, ready_ns=2, need_ns=0)
    profile = gradcast.Profile(name="tie", forward_ns=5, backward_ns=5, tensors=[first, second])
    # Equal needs: the later ready one is the more urgent.
    assert [tensor.name for tensor in profile.tensors] == ["b", "a"]
    assert profile.link is None
    with pytest.raises(gradcast.Error, match="tensors"):
        gradcast.Profile(name="empty", forward_ns=5, backward_ns=5, tensors=[])


def test_replace_changes_what_is_named_and_nothing_else(profile):
    late = profile.tensors[0].replace(need_ns=3e6, extra={"shape": [2, 2], "of": "gewählt"})
    changed = profile.replace(tensors=[late, *profile.tensors[1:]], extra={"note": {"a": 1}})
    assert changed.tensors == (*profile.tensors[1:], late), "in urgency order"
    assert (changed.extra, changed.tensors[-1].extra["of"], changed.link) == (
        {"note": {"a": 1}},
        "gewählt",
        profile.link,
    )
    assert gradcast.Profile.from_json(changed.to_json()) == changed != profile
    assert changed.replace(tensors=profile.tensors, extra={}) == profile
    assert profile.replace(link=None).link is None
    plan = gradcast.make_plan(profile, profile.link)
    blocks = [block.replace(start_ns=7, reason="by hand") for block in plan.blocks]
    other = plan.replace(blocks=blocks, bound_ns=5, extra={"made_with": "a hand"})
    assert gradcast.Plan.from_json(other.to_json()).extra == {"made_with": "a hand"}
    assert other.replace(blocks=plan.blocks, bound_ns=plan.bound_ns, extra={}) == plan != other


def test_replace_refuses_what_the_constructor_refuses(profile):
    with pytest.raises(gradcast.Error, match="later than the end of backward"):
        profile.replace(backward_ns=1)
    for change in ({"nonsense": 1}, {"name": 5}):
        with pytest.raises(TypeError):
            profile.replace(**change)
    for extra in ({"link": {}}, {"version": 2}):
        with pytest.raises(gradcast.Error, match="rename yours"):
            profile.replace(extra=extra)


@pytest.mark.parametrize(
    ("read", "code"),
    [
        (lambda: gradcast.Profile.from_json("{"), "invalid_profile"),
        (lambda: gradcast.LinkModel.from_json("{}"), "invalid_link"),
        (lambda: gradcast.Plan.from_json("[]"), "invalid_plan"),
    ],
)
def test_errors_are_one_class_with_a_code(read, code):
    with pytest.raises(gradcast.Error) as caught:
        read()
    assert caught.value.code == code
    assert type(caught.value) is caught.type is gradcast.UsageError


@pytest.mark.parametrize("code", ["invalid_profile", "invalid_plan", "invalid_link", "invalid_option", "invalid_use"])
def test_wrong_use_is_also_a_value_error(code):
    error = pickle.loads(pickle.dumps(gradcast.Error("a sentence", code)))
    assert type(error) is gradcast.UsageError
    assert isinstance(error, gradcast.Error)
    assert isinstance(error, ValueError)
    assert (str(error), error.code) == ("a sentence", code)


@pytest.mark.parametrize("code", ["communication", "environment", "internal"])
def test_other_errors_are_no_value_errors(code):
    """A loop's ``except ValueError`` is for its own values, and must not swallow a network that has failed."""
    error = pickle.loads(pickle.dumps(gradcast.Error("a sentence", code)))
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, ValueError)
    assert (str(error), error.code) == ("a sentence", code)


@pytest.mark.parametrize(
    "options", [{"policy": "nope"}, {"mode": "sideways"}, {"in_flight": 0}, {"parameters": {"nope": 1.0}}]
)
def test_wrong_options_are_refused(profile, options):
    with pytest.raises(gradcast.Error) as caught:
        gradcast.make_plan(profile, profile.link, **options)
    assert caught.value.code == "invalid_option"


def test_objects_do_not_change(profile):
    for owner, attribute in ((profile, "name"), (profile.tensors[0], "bytes"), (profile.link, "all_reduce")):
        with pytest.raises(AttributeError):
            setattr(owner, attribute, 1)
    assert isinstance(profile.tensors, tuple)


@pytest.mark.parametrize("info", _core.policies(), ids=lambda info: info.name)
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_every_policy_plans_and_its_plan_plays_as_predicted(info, mode, profile):
    if info.overlap_only and mode == "hook":
        with pytest.raises(gradcast.Error):
            gradcast.make_plan(profile, profile.link, policy=info.name, mode=mode)
        return
    link = _core.ring_link(_core.Hop(latency_ns=20e3, bandwidth_bytes_per_s=1.25e9), 8)
    plan = gradcast.make_plan(profile, link, policy=info.name, mode=mode)
    plan.check(profile)
    assert (plan.policy, plan.mode) == (info.name, mode)
    timeline = gradcast.play(profile, link, plan)
    assert timeline.iteration_ns == pytest.approx(plan.predicted_ns, rel=1e-9)
    assert plan.predicted_ns >= plan.bound_ns * (1 - 1e-9)
    assert [times.finish_ns for times in timeline.blocks] == pytest.approx([block.finish_ns for block in plan.blocks])
    assert timeline.exposed_ns == pytest.approx(timeline.iteration_ns - 9e6)
    again = gradcast.Plan.from_json(plan.to_json())
    assert again.hash(profile) == plan.hash(profile)
    assert [block.ranges for block in again.blocks] == [block.ranges for block in plan.blocks]


def test_a_plan_of_another_profile_is_refused(profile):
    other = gradcast.load_profile("vgg16")
    plan = gradcast.make_plan(profile, profile.link)
    with pytest.raises(gradcast.Error) as caught:
        gradcast.play(other, profile.link, plan)
    assert caught.value.code == "invalid_plan"
    with pytest.raises(gradcast.Error):
        plan.check(other)


def test_bounds_are_never_above_the_best_plan_and_name_what_they_are(profile):
    bound = gradcast.bound(profile, profile.link)
    plan = gradcast.make_plan(profile, profile.link)
    assert bound.plain_ns <= bound.best_ns <= plan.predicted_ns * (1 + 1e-9)
    assert bound.exact  # later ready is more urgent in this profile, and the cost is one line
    assert plan.bound_ns == pytest.approx(bound.best_ns)


def test_link_costs(profile):
    cost = profile.link.all_reduce
    assert cost.cost_ns(1000) == pytest.approx(100_800)
    assert cost.capacity_bytes(100_800) == pytest.approx(1000, abs=1)
    assert cost.pieces[0].up_to_bytes is None
    assert profile.link.scaled(2, 3).all_reduce.cost_ns(1000) == pytest.approx(202_400)
    with pytest.raises(gradcast.Error, match="no cost"):
        profile.link.reduce_scatter.cost_ns(1)


def test_other_threads_run_while_a_plan_is_made():
    """make_plan releases the GIL: two plans made at once by two threads are the plans made one by one."""
    from concurrent.futures import ThreadPoolExecutor

    profile = gradcast.load_profile("resnet50")
    links = [link_of(100e3, beta) for beta in (1.0, 2.0, 3.0, 4.0)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda link: gradcast.make_plan(profile, link, policy="bytescheduler"), links))
    alone = [gradcast.make_plan(profile, link, policy="bytescheduler") for link in links]
    assert together == alone


def stub_members():
    """Names in _core.pyi: functions and values by name, members of classes as Class.member."""
    names = set()
    for node in ast.parse((PACKAGE / "_core.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            attributes = {member.target.id for member in node.body if isinstance(member, ast.AnnAssign)}
            names |= {f"{node.name}.{member}" for member in methods | attributes}
    return {name for name in names if not name.endswith(".__init__")}


def module_members():
    names = set()
    for name, value in vars(_core).items():
        if name.startswith("_") and name != "__version__":
            continue
        names.add(name)
        if isinstance(value, type):
            names |= {f"{name}.{member}" for member in vars(value) if not member.startswith("_")}
    return names


def test_the_stub_describes_the_module():
    assert stub_members() == module_members()


def test_the_stub_knows_the_arguments():
    """Keyword arguments of the stub's functions are accepted by the module: their names stand in its signatures."""
    for node in ast.parse((PACKAGE / "_core.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            signature = getattr(_core, node.name).__doc__.splitlines()[0]
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                assert f"{argument.arg}:" in signature, f"{node.name}({argument.arg}) is not in: {signature}"


def test_objects_show_what_they_hold(profile):
    assert repr(gradcast.LinkPiece(alpha_ns=5, beta_ns_per_byte=0.5)) == (
        "LinkPiece(alpha_ns=5.0, beta_ns_per_byte=0.5, up_to_bytes=None)"
    )
    assert "pieces=(LinkPiece(" in repr(profile.link)
    assert "op='all_reduce', buffer=0, ranges=((0, 4),)" in repr(gradcast.Block(ranges=[(0, 4)]))
    assert ", tensors=<107 of them>, part_ns=0.0," in repr(gradcast.load_profile("resnet50"))
    assert repr(gradcast.make_plan(profile, profile.link)).startswith("Plan(policy='forecast', mode='overlap', ")


@pytest.mark.parametrize("function", [gradcast.make_plan, gradcast.play, gradcast.bound, gradcast.policies])
def test_functions_say_what_they_do(function):
    assert len(function.__doc__.splitlines()) > 2  # more than the signature that pybind11 writes
