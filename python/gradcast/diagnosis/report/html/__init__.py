"""The report of ``gradcast doctor`` as one HTML page that needs nothing else: no network, no script, no fonts.

``build`` is pure: the fields of doctor.json in, text out. Each module draws one part of the page and returns None where
a run has not measured what it shows; the page then says so in one line.
"""

from gradcast.diagnosis.report.html.document import build

__all__ = ["build"]
