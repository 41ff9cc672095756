"""Parts of models: what the constructor makes, and what forward does to ``x``, a batch of vectors.

``{n}`` is the part's number. ``unused``: some parameter may stay without a gradient, so DDP has to look for it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    init: str
    forward: str
    unused: bool = False
    without: str = ""  # words: features of a program that it does not go with
    weight: float = 1.0


PARTS = (
    Part("linear", "self.p{n} = nn.Linear(WIDTH, WIDTH)", "x = torch.tanh(self.p{n}(x))", weight=3),
    Part("no bias", "self.p{n} = nn.Linear(WIDTH, WIDTH, bias=False)", "x = x + self.p{n}(x)"),
    Part(
        "wide",
        "self.p{n} = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))",
        "x = x + self.p{n}(x)",
        weight=2,
    ),
    Part("layer norm", "self.p{n} = nn.LayerNorm(WIDTH)", "x = self.p{n}(x)"),
    Part("batch norm", "self.p{n} = nn.BatchNorm1d(WIDTH)", "x = self.p{n}(x)", weight=2),
    Part(
        "a buffer",
        "self.register_buffer('b{n}', torch.zeros(WIDTH))",
        "if self.training:\n    with torch.no_grad():\n        self.b{n}.mul_(0.9).add_(x.mean(0))",
    ),
    Part(
        "a late buffer",
        "pass",
        "if not hasattr(self, 'b{n}'):\n    self.register_buffer('b{n}', x.mean(0).detach())\n"
        "x = x + 0.1 * self.b{n}\n"
        "if self.training:\n    with torch.no_grad():\n        self.b{n} = 0.9 * self.b{n} + 0.1 * x.mean(0)",
        without="attaches compiled changes deepcopy_fails evaluates traced transforms",
    ),
    Part(
        "tied",
        "self.p{n} = nn.Linear(WIDTH, WIDTH)\nself.q{n} = nn.Linear(WIDTH, WIDTH)\nself.q{n}.weight = self.p{n}.weight",
        "x = self.q{n}(torch.tanh(self.p{n}(x)))",
    ),
    Part("used twice", "self.p{n} = nn.Linear(WIDTH, WIDTH)", "x = self.p{n}(torch.tanh(self.p{n}(x)))"),
    Part("unused", "self.p{n} = nn.Linear(WIDTH, 3)", "pass", unused=True),
    Part("frozen", "self.p{n} = nn.Linear(WIDTH, WIDTH).requires_grad_(False)", "x = x + self.p{n}(x)"),
    Part(
        "in some steps",
        "self.p{n} = nn.Linear(WIDTH, WIDTH)",
        "if self.turn % 2:\n    x = x + self.p{n}(x)",
        unused=True,
        without="static compiled",
    ),
    Part(
        "on one rank",
        "self.p{n} = nn.Linear(WIDTH, WIDTH)",
        "if (self.turn + dist.get_rank()) % 2:\n    x = x + self.p{n}(x)",
        unused=True,
        without="static compiled",
    ),
    Part(
        "attention",
        "self.p{n} = nn.MultiheadAttention(WIDTH, 2, batch_first=True)",
        "x = x + self.p{n}(x[None], x[None], x[None], need_weights=False)[0][0]",
        weight=2,
    ),
    Part("lstm", "self.p{n} = nn.LSTM(WIDTH, WIDTH)", "x = x + self.p{n}(x[None])[0][0]", without="compiled"),
    Part("embedding", "self.p{n} = nn.Embedding(5, WIDTH)", "x = x + self.p{n}((x[:, 0].abs() * 9).long() % 5)"),
    Part("convolution", "self.p{n} = nn.Conv1d(1, 2, 3, padding=1)", "x = x + self.p{n}(x[:, None]).mean(1)"),
    Part("function", "self.p{n} = nn.Parameter(torch.rand(WIDTH))", "x = x + Scale.apply(x, self.p{n})", weight=2),
    Part(
        "read elsewhere",
        "self.p{n} = nn.Linear(WIDTH, WIDTH)",
        "x = x + linear(x, self.p{n}.weight, self.p{n}.bias)",
        weight=2,
    ),
    Part("scalar", "self.p{n} = nn.Parameter(torch.tensor(1.1))", "x = x * self.p{n}"),
    Part("strided", "self.p{n} = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.2)", "x = x + x @ self.p{n}"),
    Part(
        "double",
        "self.p{n} = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.2)",
        "x = x + (x.double() @ self.p{n}).to(x)",
        without="autocast",
    ),
    Part(
        "half",
        "self.p{n} = nn.Parameter((torch.randn(WIDTH, WIDTH) * 0.2).bfloat16())",
        "x = x + (x.bfloat16() @ self.p{n}).to(x)",
        without="many_ranks autocast scaler",
    ),
    Part(
        "checkpoint",
        "self.p{n} = nn.Linear(WIDTH, WIDTH)",
        "x = x + checkpoint(self.p{n}, x, use_reentrant=False)",
        without="compiled",
    ),
    Part(
        "reentrant",
        "self.p{n} = nn.Linear(WIDTH, WIDTH)",
        "x = x + checkpoint(self.p{n}, x, use_reentrant=True)",
        without="compiled unused accumulation autograd_grad",
    ),
    Part("dropout", "self.p{n} = nn.Dropout(0.2)", "x = self.p{n}(x)", without="compiled"),
    Part(
        "weight norm",
        "self.p{n} = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))",
        "x = x + self.p{n}(x)",
        without="compiled state_edit",
    ),
)
BY_NAME = {part.name: part for part in PARTS}
