"""One trace of all ranks on rank 0's clock. Pure, except for ``files``."""
