"""Published training throughput, predicted; docs/evaluation/predictions.md explains it and holds its tables."""
