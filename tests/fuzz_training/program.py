"""A training program as a value, and as code."""

import dataclasses
import inspect
import textwrap

from fuzz_training import loops, models, prelude

# How the module is wrapped: code that makes `called` of `ddp`, or of the bare model. With "none" gradcast gets the bare
# model in DDP's place; otherwise it gets what the loop calls.
WRAPPERS = {
    "none": None,
    "ddp": "ddp",
    "holder": "Holder(ddp)",
    "compiled ddp": "torch.compile(ddp, backend='eager')",
    "compiled": None,
    "fabric": "fabric_module(ddp)",
}
# Each optimizer: the constructor's name and arguments, and which of its forms there are.
OPTIMIZERS = {
    "sgd": ("torch.optim.SGD", "lr=0.1", ("foreach", "fused", "")),
    "momentum": ("torch.optim.SGD", "lr=0.1, momentum=0.9, weight_decay=0.01", ("foreach", "fused", "")),
    "nesterov": ("torch.optim.SGD", "lr=0.05, momentum=0.9, nesterov=True", ("foreach", "")),
    "adam": ("torch.optim.Adam", "lr=0.01, eps=1e-3", ("foreach", "fused", "")),
    "adamw": ("torch.optim.AdamW", "lr=0.01, eps=1e-3, amsgrad=True", ("foreach", "fused", "")),
    "rmsprop": ("torch.optim.RMSprop", "lr=0.01, eps=1e-3, momentum=0.5", ("foreach", "")),
    "adagrad": ("torch.optim.Adagrad", "lr=0.05, eps=1e-3", ("foreach", "")),
    "nadam": ("torch.optim.NAdam", "lr=0.01, eps=1e-3", ("foreach", "")),
    "radam": ("torch.optim.RAdam", "lr=0.01, eps=1e-3", ("foreach", "")),
    "adamax": ("torch.optim.Adamax", "lr=0.01, eps=1e-3", ("foreach", "")),
    "adadelta": ("torch.optim.Adadelta", "lr=0.5, eps=1e-3", ("foreach", "")),
    "asgd": ("torch.optim.ASGD", "lr=0.05", ("foreach", "")),
    "previous": ("KeepsPrevious", "lr=0.1", ("",)),
}

_WITH_BUFFERS = {"batch norm", "a buffer", "a late buffer"}


@dataclasses.dataclass(frozen=True)
class Use:
    """A feature, and the steps in which its pieces run (None: all)."""

    name: str
    steps: tuple[int, ...] | None = None

    @property
    def feature(self) -> loops.Feature:
        return loops.BY_NAME[self.name]


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    ranks: int = 2
    parts: tuple[str, ...] = ("linear",)
    wrapper: str = "none"
    ddp_options: str = ""
    optimizer: str = "sgd"
    form: str = ""
    groups: str = "one"  # "one"; "two" groups of one optimizer; "several" optimizers
    steps: int = 5
    uses: tuple[Use, ...] = ()
    zero: str = "start"  # when gradients are zeroed: start, loss (before backward), end, seldom (every other step)
    zero_code: str = "optimizer.zero_grad()"
    micro_batches: int = 1
    no_sync: bool = False
    stepping: str = "plain"  # plain, closure, scaler, unscaled (and clipped), seldom
    autocast: bool = False
    pinned: bool = True
    adapt: bool = False
    max_grad_norm: bool = False
    hands_over: bool = False  # to DDP, now and then, or rests

    @property
    def modules(self) -> list[models.Part]:
        return [models.BY_NAME[name] for name in self.parts]

    @property
    def tags(self) -> set[str]:
        """What parts and features may not go with."""
        names, parts = [use.name for use in self.uses], set(self.parts)
        settings = {
            "compiled": "compiled" in self.wrapper,
            "ddp_given": self.wrapper not in ("none", "compiled"),
            # What their passes in between change reaches other ranks later than with DDP.
            "bare_buffers": WRAPPERS[self.wrapper] is None and bool(parts & _WITH_BUFFERS),
            # Given other memory, DDP's views lose their buckets, and what DLPack has taken of a gradient is freed.
            "bucket_view": "gradient_as_bucket_view" in self.ddp_options,
            "many_ranks": self.ranks > 2,
            "static": "static_graph" in self.ddp_options,
            "accumulation": self.micro_batches > 1,
            "closure": self.stepping == "closure",
            "buffers": bool(parts & _WITH_BUFFERS),
            "scaler": self.stepping in ("scaler", "unscaled"),
            "autocast": self.autocast,
            "several": self.groups == "several",
            "keeps": self.optimizer == "previous",
            "adagrad": self.optimizer == "adagrad",  # makes its state when it is constructed
            "no_decay": self.optimizer in ("asgd", "previous"),
            "mixed": bool(parts & {"double", "half"}),
            "dynamic": bool(parts & {"in some steps", "on one rank"}),
            "deepcopy_fails": "weight norm" in parts,
            "weight_norm": "weight norm" in parts,
            "unused": self.needs_unused,
            "alias": any("alias" in name for name in names),
            "new_data": "new data" in names,
            "traced": "a traced copy" in names,
            "hooks_after": any(" after" in name or name.startswith("accumulation") for name in names),
        }
        tags = {tag for use in self.uses for tag in use.feature.tags} | {
            tag for tag, is_set in settings.items() if is_set
        }
        return tags | parts & {"half", "lstm", "reentrant", "checkpoint", "attention", "function", "strided"}

    @property
    def needs_unused(self) -> bool:
        return any(part.unused for part in self.modules) or any(use.feature.unused for use in self.uses)

    @property
    def is_coherent(self) -> bool:
        tags = self.tags
        excluded = {each for part in self.modules for each in part.without.split()}
        excluded |= {each for use in self.uses for each in use.feature.without}
        if excluded & tags or not {each for use in self.uses for each in use.feature.needs} <= tags:
            return False
        if "static" in tags and (self.needs_unused or "accumulation" in tags):
            return False
        if "reentrant" in tags and "unused" in self.ddp_options:
            return False
        # Fused SGD of torch 2.11 does not set bfloat16 momentum in its first step.
        if "half" in tags and self.form == "fused":
            return False
        # DDP itself broadcasts or looks for parameters in ways that these do not bear.
        touching = {"between", "made", "attached"}
        if self.max_grad_norm and (
            self.stepping != "plain"
            or any(touching & use.feature.code.keys() for use in self.uses)
            or any("ddp_given" in use.feature.needs for use in self.uses)  # their gradients may stay on their rank
        ):
            return False
        return not ("gradient_as_bucket_view" in self.ddp_options and "keeps" in tags)

    def source(self) -> str:
        """A program that a person can run: torchrun --nproc-per-node N program.py ddp|hook|overlap."""
        own = inspect.getsource(prelude)
        own = own[own.index("# ruff") :]
        usage = f'"""Random program {self.seed}: torchrun --nproc-per-node {self.ranks} program.py ddp|hook|overlap"""'
        return "\n".join([usage, "", own, "", self.body(), "", _MAIN])

    def body(self) -> str:
        """The class Net and train(side)."""
        return "\n\n\n".join([_net(self), _train(self)])


_MAIN = """
if __name__ == "__main__":
    import sys

    dist.init_process_group("gloo")
    for value in train(sys.argv[1]):
        print(value)
    dist.destroy_process_group()
"""


def _indented(code: str, depth: int) -> str:
    return textwrap.indent(code, "    " * depth)


def _lines(*pieces: str) -> str:
    """The pieces that are not empty, one below the other."""
    return "\n".join(filter(None, pieces))


def _net(program: Program) -> str:
    parts = list(enumerate(program.modules))
    init = _lines(*(part.init.replace("{n}", str(number)) for number, part in parts))
    forward = _lines(*(part.forward.replace("{n}", str(number)) for number, part in parts))
    return f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = 0
        self.first = nn.Linear(WIDTH, WIDTH)
{_indented(init, 2)}

    def forward(self, x):
        x = self.first(x)
{_indented(forward, 2)}
        if hasattr(self, 'extra'):
            x = self.extra(x)
        return x""".lstrip()


def _optimizer(program: Program, parameters: str, extra: str = "") -> str:
    name, arguments, _ = OPTIMIZERS[program.optimizer]
    form = f", {program.form}=True" if program.form else ""
    return f"{name}({parameters}, {arguments}{form}{extra})"


def _optimizers(program: Program) -> str:
    listed = "list(model.parameters())"
    if program.groups == "several":
        first, second = _optimizer(program, "parameters[::2]"), "torch.optim.SGD(parameters[1::2], lr=0.05)"
        return f"parameters = {listed}\noptimizers = [{first}, {second}]"
    if program.groups == "two":
        groups = "[{'params': parameters[::2]}, {'params': parameters[1::2], 'lr': 0.02}]"
        return f"parameters = {listed}\noptimizers = [{_optimizer(program, groups)}]"
    return f"optimizers = [{_optimizer(program, 'model.parameters()')}]"


def _guarded(use: Use, code: str) -> str:
    if use.feature.always or use.steps is None:
        return code
    return f"if step in {list(use.steps)}:\n{_indented(code, 1)}"


def _at(program: Program, moment: str) -> str:
    found = [(use, use.feature.code[moment]) for use in program.uses if moment in use.feature.code]
    if moment in loops.IN_A_STEP:
        return "\n".join(_guarded(use, code) for use, code in found)
    return "\n".join(code for _, code in found)


def _wrapping(program: Program) -> str:
    """Defines wrap(), which makes `called`, and attach(), which makes `handle`."""
    options = "find_unused_parameters=True" if program.needs_unused else program.ddp_options
    ddp = f"DDP(model{', ' + options if options else ''})"
    wrapped = WRAPPERS[program.wrapper]
    are_sent = bool({"batch norm", "a buffer"} & set(program.parts)) and "broadcast_buffers" not in options
    from_first = ""
    if wrapped is None:
        compiled = "torch.compile({}, backend='eager')" if program.wrapper == "compiled" else "{}"
        wrap = f"    return {compiled.format(ddp)} if side == 'ddp' else {compiled.format('model')}"
        # As attach() to a bare module does, from which on ranks are alike that a program had let differ.
        from_first = """
        for each in [*model.parameters(), *model.buffers()]:
            dist.broadcast(each.data, 0)"""
    else:
        wrap = f"    nonlocal syncing\n    ddp = syncing = {ddp}\n    return {wrapped}"
    settings = f"plan=gradcast.Planning(adapt={program.adapt}, warmup_steps=3)"
    settings += ", compare_every=2" if "compares" in program.tags else ""
    settings += ", split_compiled=True" if "compiled" in program.wrapper and program.seed % 2 else ""
    clip = "    if side == 'overlap':\n        settings['clip'] = gradcast.Clip(norm=0.5)"
    clips = clip if program.max_grad_norm else ""
    # Both work before the next forward pass, where gradcast begins again, and DDP sends the buffers. Those of a bare
    # module, and in overlap mode those of DDP, have left with the gradients: each rank would keep what it changes in
    # between (guarantees.md). DDP never sends a late buffer that is beside no others.
    return f"""
syncing = None
def wrap():
{wrap}

changed = False
def rewrap():
    nonlocal changed
    changed = handle is None

sends = False
def buffers_changed():
    nonlocal sends
    sends = {are_sent} and ({wrapped is None} or side == 'overlap') and handle is not None

def attach():
    if side == 'ddp':{from_first}
        return None
    settings = dict({settings})
{clips}
    chosen = optimizers if side == 'overlap' else None
    attached = gradcast.attach(called, chosen, options=gradcast.Options(**settings))
    {f"pin(attached, {program.seed})" if program.pinned else ""}
    {f"hand_over(attached, {program.seed})" if program.hands_over else ""}
    return attached

called = wrap()
{"" if wrapped else "syncing = called"}
handle = None
handle = attach()""".lstrip()


def _forward(program: Program) -> str:
    if program.autocast:
        return "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = (called(x).float() - y).pow(2).mean()"
    return "loss = (called(x) - y).pow(2).mean()"


def _stepping(program: Program) -> str:
    if program.stepping in ("scaler", "unscaled"):
        unscale = "for each in optimizers:\n    scaler.unscale_(each)\nnn.utils.clip_grad_norm_(params, 0.5)"
        step = "for each in optimizers:\n    scaler.step(each)\nscaler.update()"
        return f"{unscale}\n{step}" if program.stepping == "unscaled" else step
    if program.stepping == "seldom":
        return "if step % 3:\n    for each in optimizers:\n        each.step()"
    return "for each in optimizers:\n    each.step()"


def _passes(program: Program) -> str:
    """Forward and backward of one step."""
    backward = "scaler.scale(loss).backward()" if "scaler" in program.tags else "loss.backward()"
    last = _lines(_at(program, "forward"), _forward(program), _at(program, "loss"), _zero(program, "loss"), backward)
    if program.micro_batches == 1:
        return last
    # gradcast's no_sync() and DDP's own by turns, where DDP is what gradcast is given.
    syncing = "syncing" if "ddp_given" in program.tags and program.seed % 2 else "(handle or syncing)"
    context = f"with {syncing}.no_sync():" if program.no_sync else "if True:"
    small = f"for _ in range({program.micro_batches - 1}):\n    {context}"
    return _lines(small, _indented(_forward(program), 2), _indented(backward, 2), last)


def _zero(program: Program, moment: str) -> str:
    if program.zero == "seldom" and moment == "start":
        return f"if step % 2 == 0:\n{_indented(program.zero_code, 1)}"
    return program.zero_code if program.zero == moment else ""


def _step(program: Program) -> str:
    if program.stepping == "closure":
        return f"""
def closure():
    optimizer.zero_grad()
    loss = (called(x) - y).pow(2).mean()
    loss.backward()
    return loss
{_at(program, "forward")}
loss = optimizer.step(closure)
for each in optimizers[1:]:
    each.step()""".lstrip()
    # What clip does inside of step() in overlap mode, the other sides do themselves.
    clip = "if side != 'overlap':\n    nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
    return _lines(_passes(program), _at(program, "between"), clip if program.max_grad_norm else "", _stepping(program))


def _train(program: Program) -> str:
    overflows = "scaler" in program.tags and program.seed % 2
    in_loop = f"""
x, y = (each.to(model.first.weight.dtype) for each in batch(step, rank))
{"if step == 2: x = x * float('inf')" if overflows else ""}
model.turn = step
if changed:
    changed = False
    called = syncing = wrap()
{_zero(program, "start")}
{_at(program, "start")}
if sends:
    sends = False
    handle.send_buffers()
{_step(program)}
seen.append(loss.detach().clone())
{_at(program, "stepped")}
{_zero(program, "end")}
if handle is not None:
    plan = handle.plan
    followed.append((len(plan.blocks), plan.policy, handle.measuring, handle.plan_version))
{_at(program, "end")}"""
    scaler = "scaler = torch.amp.GradScaler('cpu', init_scale=256.0, growth_interval=2)"
    train = f"""
torch.set_default_dtype({"torch.float64" if program.ranks > 2 else "torch.float32"})
rank = dist.get_rank()
torch.manual_seed({program.seed} + rank)
model = Net()
params = [p for p in model.parameters() if p.requires_grad]
{_optimizers(program)}
optimizer = optimizers[0]
kept, seen, followed = [], [], []
{scaler if "scaler" in program.tags else ""}
{_at(program, "made")}
{_wrapping(program)}
torch.manual_seed(rank)
{_at(program, "attached")}
for step in range({program.steps}):
{_indented(in_loop, 1)}
if handle is not None:
    handle.detach()
buffers = dict(model.named_buffers())
return {{
    'parameters': taken(dict(model.named_parameters())),
    'gradients': taken({{name: p.grad for name, p in model.named_parameters()}}),
    'buffers': taken(buffers),
    'state': taken([each.state_dict()['state'] for each in optimizers]),
    'seen': taken(seen),
    'kept': taken(kept),
    'random': torch.get_rng_state(),
    'followed': followed,
}}"""
    without_gaps = "\n".join(line for line in train.splitlines() if line.strip())
    return f"def train(side):\n{_indented(without_gaps, 1)}"
