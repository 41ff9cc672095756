"""``make demo``: trains with stock DDP and with gradcast in turns, over a slow link, and shows what happened."""
