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

    @property
    def modules(self) -> list[models.Part]:
        by_name = {part.name: part for part in models.PARTS}
        return [by_name[name] for name in self.parts]

    @property
    def tags(self) -> set[str]:
        """What parts and features may not go with."""
        names, parts = [use.name for use in self.uses], set(self.parts)
        settings = {
            "compiled": "compiled" in self.wrapper,
            "ddp_given": self.wrapper not in ("none", "compiled"),
            "many_ranks": self.ranks > 2,
            "static": "static_graph" in self.ddp_options,
            "accumulation": self.micro_batches > 1,
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
        if excluded & tags:
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
            self.stepping != "plain" or any(touching & use.feature.code.keys() for use in self.uses)
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


def _net(program: Program) -> str:
    init, forward = [], []
    for number, part in enumerate(program.modules):
        init.append(part.init.replace("{n}", str(number)))
        forward.append(part.forward.replace("{n}", str(number)))
    return "\n".join(
        [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.turn = 0",
            "        self.first = nn.Linear(WIDTH, WIDTH)",
            _indented("\n".join(init), 2),
            "",
            "    def forward(self, x):",
            "        x = self.first(x)",
            _indented("\n".join(forward), 2),
            "        if hasattr(self, 'extra'):",
            "            x = self.extra(x)",
            "        return x",
        ]
    )


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


_FROM_FIRST = [
    "        for each in [*model.parameters(), *model.buffers()]:",
    "            dist.broadcast(each.data, 0)",
]


def _wrapping(program: Program) -> str:
    """Defines wrap(), which makes `called`, and attach(), which makes `handle`."""
    options = "find_unused_parameters=True" if program.needs_unused else program.ddp_options
    ddp = f"DDP(model{', ' + options if options else ''})"
    wrapped = WRAPPERS[program.wrapper]
    compiled = "torch.compile(model, backend='eager')"
    settings = [f"adapt={program.adapt}", "warmup_steps=3"]
    settings += ["compare_every=2"] if "compares" in program.tags else []
    chosen = "optimizers if side == 'overlap' else None"
    lines = ["def wrap():"]
    if wrapped is None:
        own = compiled if program.wrapper == "compiled" else "model"
        theirs = f"torch.compile({ddp}, backend='eager')" if program.wrapper == "compiled" else ddp
        lines += [f"    return {theirs} if side == 'ddp' else {own}"]
    else:
        lines += ["    nonlocal syncing", f"    ddp = syncing = {ddp}", f"    return {wrapped}"]
    lines += [
        "",
        # Before the next forward pass, which is where gradcast begins again, not at once: DDP sends the buffers there.
        "changed = False",
        "def rewrap():",
        "    nonlocal changed",
        "    changed = handle is None",
        "",
        "def attach():",
        "    if side == 'ddp':",
        # As attach() to a bare module does, from which on ranks are alike that a program had let differ.
        *(_FROM_FIRST if wrapped is None else []),
        "        return None",
    ]
    lines += [f"    settings = dict({', '.join(settings)})"]
    if program.max_grad_norm:
        lines += ["    if side == 'overlap':", "        settings['max_grad_norm'] = 0.5"]
    lines += [f"    attached = gradcast.attach(called, {chosen}, options=gradcast.Options(**settings))"]
    if program.pinned:
        lines += [f"    pin(attached, {program.seed})"]
    lines += ["    return attached", "", "called = wrap()"]
    lines += [] if wrapped else ["syncing = called"]
    return "\n".join(["syncing = None", *lines, "handle = None", "handle = attach()"])


def _forward(program: Program) -> str:
    if program.autocast:
        return "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = (called(x).float() - y).pow(2).mean()"
    return "loss = (called(x) - y).pow(2).mean()"


def _backward(program: Program) -> str:
    return "scaler.scale(loss).backward()" if program.stepping in ("scaler", "unscaled") else "loss.backward()"


def _clip(program: Program) -> str:
    """What max_grad_norm does inside of step() in overlap mode, the other sides do themselves."""
    return (
        "if side != 'overlap':\n    nn.utils.clip_grad_norm_(model.parameters(), 0.5)" if program.max_grad_norm else ""
    )


def _stepping(program: Program) -> str:
    if program.stepping in ("scaler", "unscaled"):
        lines = []
        if program.stepping == "unscaled":
            lines += ["for each in optimizers:", "    scaler.unscale_(each)", "nn.utils.clip_grad_norm_(params, 0.5)"]
        return "\n".join([*lines, "for each in optimizers:", "    scaler.step(each)", "scaler.update()"])
    if program.stepping == "seldom":
        return "if step % 3:\n    for each in optimizers:\n        each.step()"
    return "for each in optimizers:\n    each.step()"


def _passes(program: Program) -> str:
    """Forward and backward of one step."""
    last = "\n".join(
        filter(
            None,
            [
                _at(program, "forward"),
                _forward(program),
                _at(program, "loss"),
                _zero(program, "loss"),
                _backward(program),
            ],
        )
    )
    if program.micro_batches == 1:
        return last
    # gradcast's no_sync() and DDP's own by turns, where DDP is what gradcast is given.
    syncing = "syncing" if "ddp_given" in program.tags and program.seed % 2 else "(handle or syncing)"
    context = f"with {syncing}.no_sync():\n" if program.no_sync else "if True:\n"
    small = "\n".join([_forward(program), _backward(program)])
    first = f"for _ in range({program.micro_batches - 1}):\n" + _indented(context + _indented(small, 1), 1)
    return f"{first}\n{last}"


def _zero(program: Program, moment: str) -> str:
    if program.zero == "seldom" and moment == "start":
        return f"if step % 2 == 0:\n{_indented(program.zero_code, 1)}"
    return program.zero_code if program.zero == moment else ""


def _train(program: Program) -> str:
    if program.stepping == "closure":
        step = [
            "def closure():",
            _indented("optimizer.zero_grad()", 1),
            _indented("loss = (called(x) - y).pow(2).mean()\nloss.backward()\nreturn loss", 1),
            _at(program, "forward"),
            "loss = optimizer.step(closure)",
            "for each in optimizers[1:]:\n    each.step()",
        ]
    else:
        step = [_passes(program), _at(program, "between"), _clip(program), _stepping(program)]
    in_loop = [
        "x, y = (each.to(model.first.weight.dtype) for each in batch(step, rank))",
        "model.turn = step",
        "if changed:\n    changed = False\n    called = syncing = wrap()",
        _zero(program, "start"),
        _at(program, "start"),
        *step,
        "seen.append(loss.detach().clone())",
        _at(program, "stepped"),
        _zero(program, "end"),
        "if handle is not None:\n    plan = handle.plan\n"
        "    followed.append((len(plan.blocks), plan.policy, handle.measuring, handle.plan_version))",
        _at(program, "end"),
    ]
    if program.stepping in ("scaler", "unscaled") and program.seed % 2:
        in_loop.insert(1, "if step == 2:\n    x = x * float('inf')")
    dtype = "torch.float64" if program.ranks > 2 else "torch.float32"
    made = [
        f"torch.set_default_dtype({dtype})",
        "rank = dist.get_rank()",
        f"torch.manual_seed({program.seed} + rank)",
        "model = Net()",
        "params = [p for p in model.parameters() if p.requires_grad]",
        _optimizers(program),
        "optimizer = optimizers[0]",
        "kept, seen, followed = [], [], []",
        "scaler = torch.amp.GradScaler('cpu', init_scale=256.0, growth_interval=2)" if "scaler" in program.tags else "",
        _at(program, "made"),
        _wrapping(program),
        "torch.manual_seed(rank)",
        _at(program, "attached"),
        f"for step in range({program.steps}):",
        _indented("\n".join(filter(None, in_loop)), 1),
        "if handle is not None:\n    handle.detach()",
        "buffers = dict(model.named_buffers())",
        "return {",
        "    'parameters': taken(dict(model.named_parameters())),",
        "    'gradients': taken({name: p.grad for name, p in model.named_parameters()}),",
        "    'buffers': taken(buffers),",
        "    'state': taken([each.state_dict()['state'] for each in optimizers]),",
        "    'seen': taken(seen),",
        "    'kept': taken(kept),",
        "    'random': torch.get_rng_state(),",
        "    'followed': followed,",
        "}",
    ]
    return "def train(side):\n" + _indented("\n".join(filter(None, made)), 1)
