"""Which plan the next iteration follows: warm-up, calibration, agreement between ranks, change."""
