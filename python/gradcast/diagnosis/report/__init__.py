"""Shows a diagnosis: text, HTML, metrics, and a comparison of two runs. Pure."""
