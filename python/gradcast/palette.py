"""The colours of every picture: one meaning has one colour, in plots as in the doctor's report.

They are light enough for dark text and distinguishable, beside their labels, with any kind of colour vision.
"""

BACKWARD = COMPUTE = "#93b6e0"
FORWARD = "#7cc6a6"
UPDATE = "#bba7e0"
WAIT = "#d9688d"
NETWORK = "#ea8160"
# Parts of a step (diagnosis/analyze/step_breakdown.py), and blocks on a link.
PARTS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "update": UPDATE,
    "launch": "#e3a8cf",
    "loop": "#d8cfae",
    "data_storage": "#d9ad5c",
    "data_cpu": "#f0d683",
    "interconnect": "#f3b07a",
    "network": NETWORK,
    "waiting": WAIT,
    "rest": "#b6bec6",
}
NETWORK_SHADES = ("#4f1a0a", "#b9512f", NETWORK, "#f7c4b0")  # blocks from those that are used first to those used last
# Of all else that differs by name: Okabe and Ito's, which people with colour blindness can distinguish.
CURVES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
INK, FAINT, GRID = "#222222", "#777777", "#e5e5e5"
CHANGED = "#f1dede"  # background of steps under changed conditions
