"""The plan of the next iteration: warm-up, proposal, agreement of the ranks, calibration, change."""
