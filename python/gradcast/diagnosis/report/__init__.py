"""Shows a diagnosis: as text, HTML or metrics, and two runs in comparison. Pure."""
