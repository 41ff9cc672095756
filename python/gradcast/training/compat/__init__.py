"""Everything that depends on how PyTorch, the compiler or the operating system work."""
