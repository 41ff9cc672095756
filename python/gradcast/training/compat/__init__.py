"""Code that depends on the internals of PyTorch, the compiler or the operating system."""
