"""The report of ``gradcast doctor`` as one self-contained HTML page: no network, no scripts, no fonts.

``build`` is pure: the fields of doctor.json in, text out. ``document.py`` puts the page together; ``headline``,
``step_time``, ``timeline``, ``prediction``, ``heat_map``, ``bandwidth``, ``plans``, ``scaling`` and ``network`` draw
one section each, or one line if the run did not measure it. ``components`` are shared parts of sections, ``axes`` of
figures, ``values`` formats numbers, and ``markup`` makes escaped HTML and SVG.
"""

from gradcast.diagnosis.report.html.document import build

__all__ = ["build"]
