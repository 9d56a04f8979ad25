"""`report(run, "run.html")`: one self-contained page of a run, the findings first.

pages    What stands on the page, and in which order; written whole or not at all.
webpage  The frame of a page that stands alone: style sheet, sections, tables, pictures in it.
"""

from hookkit.pages.pages import report

__all__ = ["report"]
