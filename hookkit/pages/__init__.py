"""`report(run, "run.html")`: one self-contained page of a run, the findings first.

pages     The content of the page, in order; written whole or not at all.
captions  What its pictures show, in words and numbers.
webpage   The frame of a self-contained page: head, navigation, sections, pictures inside it.
"""

from hookkit.pages.pages import report

__all__ = ["report"]
