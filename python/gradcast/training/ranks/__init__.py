"""What the ranks tell each other: the process group, step reports, stall and failure reports."""
