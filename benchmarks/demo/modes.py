"""The ways of training that are compared: same model, data and optimizer, gradients sent in different ways."""

# The names by which tables call them. "alone" sends nothing: it shows what compute takes, and its ranks drift apart.
MODES = {
    "ddp": "PyTorch DDP",
    "hook": "gradcast, hook mode",
    "overlap": "gradcast, overlap mode",
    "alone": "no communication",
}
