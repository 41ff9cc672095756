"""Communication between ranks beside gradients: process groups, agreements, step, stall and failure reports."""
