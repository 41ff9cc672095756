"""The path of a gradient through one step: from autograd into the buffer, over the network, into the update."""
