"""The layer shapes: which gradient is ready when, and needed when, as shares of one GPU's iteration.

Only shapes are taken from here. Each profile is scaled so that forward and backward together take what one GPU was
measured to take, with whatever optimizer that measurement contains.
"""

import csv
import io
from dataclasses import dataclass
from importlib import resources

from gradcast import Profile, Tensor

# Bytes of memory that the optimizer of the published runs moves per byte of parameters. SGD without momentum reads the
# gradient and the parameter and writes the parameter. Adam, written with one kernel per arithmetic step as the
# `transformers` package of that time had it, without weight decay: mul 2, add 3, mul 2, addcmul 3, sqrt 2, add 2,
# addcdiv 4.
SGD_PASSES = 3
ADAM_PASSES = 18


@dataclass(frozen=True)
class Layer:
    """What forward visits in order. Work is in any unit; only its share of the sum counts."""

    name: str
    forward_work: float
    backward_work: float
    tensors: tuple[tuple[str, int], ...] = ()  # name, bytes; all ready after this layer's backward


@dataclass(frozen=True)
class Model:
    name: str
    layers: tuple[Layer, ...]  # in forward order
    forward_share: float  # of forward and backward together
    optimizer_passes: int

    def profile(self, compute_ns: float, *, update_ns_per_byte: float = 0.0) -> Profile:
        """One iteration whose forward and backward take compute_ns together.

        ``update_ns_per_byte`` is time per byte of the optimizer's memory traffic; it comes on top.
        """
        forward_ns = compute_ns * self.forward_share
        backward_ns = compute_ns - forward_ns
        forward_scale = forward_ns / sum(layer.forward_work for layer in self.layers)
        backward_scale = backward_ns / sum(layer.backward_work for layer in self.layers)
        # From the end: what backward has done, and what forward has still to do.
        tensors: list[Tensor] = []
        done_work = rest_work = 0.0
        for layer in reversed(self.layers):
            done_work += layer.backward_work
            rest_work += layer.forward_work
            for name, size_bytes in reversed(layer.tensors):
                tensors.append(
                    Tensor(
                        name=name,
                        bytes=size_bytes,
                        ready_ns=min(done_work * backward_scale, backward_ns),
                        need_ns=min(max(forward_ns - rest_work * forward_scale, 0.0), forward_ns),
                        update_ns=update_ns_per_byte * self.optimizer_passes * size_bytes,
                    )
                )
        return Profile(name=self.name, forward_ns=forward_ns, backward_ns=backward_ns, tensors=tensors[::-1])


def _resnet_tensors(layer: str, size_bytes: int) -> tuple[tuple[str, int], ...]:
    """The layer table has one size per layer; the published runs sent weight and bias as two operations."""
    if size_bytes == 0:
        return ()
    if "BatchNorm" in layer:
        return (("weight", size_bytes // 2), ("bias", size_bytes // 2))
    if "bias=True" in layer:
        bias_bytes = 4 * int(layer.split("out_features=")[1].split(",")[0])
        return (("weight", size_bytes - bias_bytes), ("bias", bias_bytes))
    return (("weight", size_bytes),)


def resnet50() -> Model:
    """ResNet-50 from the bundled layer table: measured layer by layer at batch size 128, both passes."""
    text = (resources.files("gradcast") / "data" / "layers_resnet50.csv").read_text(encoding="utf-8")
    layers = []
    for row in csv.DictReader(io.StringIO(text)):
        tensors = _resnet_tensors(row["layer"], int(row["parameter_bytes"]))
        layers.append(
            Layer(
                name=row["order"],
                forward_work=float(row["forward_ms"]),
                backward_work=float(row["backward_ms"]),
                tensors=tuple((f"{row['order']}.{kind}", size_bytes) for kind, size_bytes in tensors),
            )
        )
    forward, backward = (sum(getattr(layer, name) for layer in layers) for name in ("forward_work", "backward_work"))
    return Model("ResNet-50", tuple(layers), forward / (forward + backward), SGD_PASSES)


@dataclass(frozen=True)
class BertShape:
    name: str
    layer_count: int
    hidden_size: int
    batch_size: int  # of one GPU
    inner_size: int  # of the two large matrices of a layer
    token_count: int = 64  # of one sample; the published scripts pass --sentence-len 64
    vocabulary_size: int = 30528  # 30522, padded by the scripts to a multiple of 8
    position_count: int = 512


BERT_BASE = BertShape("BERT-Base", layer_count=12, hidden_size=768, inner_size=3072, batch_size=64)
BERT_LARGE = BertShape("BERT-Large", layer_count=24, hidden_size=1024, inner_size=4096, batch_size=8)

# Arithmetic that a V100 does in the time in which it moves one byte of memory: 15.7 Tflop/s over 0.9 TB/s.
_FLOPS_PER_BYTE = 17.0


def bert(shape: BertShape) -> Model:
    """BertForPreTraining from its public architecture: time in proportion to matrix products, backward twice forward.

    Work that is bound by memory counts for the embeddings only: the traffic of an element-wise step is below 1 % of a
    layer's matrix products. The word embedding is also the last matrix of the head, so its gradient, a fifth of all
    bytes in BERT-Base, is ready when all of backward has run.
    """
    hidden, inner = shape.hidden_size, shape.inner_size
    tokens = shape.token_count * shape.batch_size
    layers: list[Layer] = []

    def add(name: str, flops: float, **elements: int) -> None:
        """``elements``: of each tensor."""
        tensors = tuple((f"{name}.{tensor}", 4 * count) for tensor, count in elements.items())
        layers.append(Layer(name, flops, 2 * flops, tensors))

    def linear(name: str, inputs: int, outputs: int, rows: int = tokens) -> None:
        add(name, 2.0 * rows * inputs * outputs, weight=inputs * outputs, bias=outputs)

    def norm(name: str) -> None:
        add(name, 0.0, weight=hidden, bias=hidden)

    # Three look-ups, their sum and a normalization: about 8 passes over the activations.
    embeddings = {"word": shape.vocabulary_size, "position": shape.position_count, "token_type": 2}
    embeddings |= {"norm.weight": 1, "norm.bias": 1}
    rows = {name: count * hidden for name, count in embeddings.items()}
    add("embeddings", 8 * 4.0 * tokens * hidden * _FLOPS_PER_BYTE, **rows)
    for i in range(shape.layer_count):
        for name in ("query", "key", "value"):
            linear(f"{i}.{name}", hidden, hidden)
        # Scores and weighted values: two products of token_count x token_count x hidden per sample.
        add(f"{i}.attention", 4.0 * tokens * shape.token_count * hidden)
        linear(f"{i}.attention_output", hidden, hidden)
        norm(f"{i}.attention_norm")
        linear(f"{i}.inner", hidden, inner)
        linear(f"{i}.output", inner, hidden)
        norm(f"{i}.output_norm")
    linear("pooler", hidden, hidden, rows=shape.batch_size)
    linear("head.transform", hidden, hidden)
    norm("head.norm")
    # Its matrix is the word embedding, which is listed there.
    add("head.decoder", 2.0 * tokens * hidden * shape.vocabulary_size, bias=shape.vocabulary_size)
    linear("head.next_sentence", hidden, 2, rows=shape.batch_size)
    return Model(shape.name, tuple(layers), 1 / 3, ADAM_PASSES)


def published_models() -> dict[str, Model]:
    return {model.name: model for model in (resnet50(), bert(BERT_BASE), bert(BERT_LARGE))}
