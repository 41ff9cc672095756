"""Which plan the next iteration follows: warm-up, proposal, agreement between the ranks, calibration, change."""
