"""``report.html``: what a compile made of a model, as one page that opens from disk. Entry: ``render_report``."""

from deepinfer.codegen.report.page import render_report

__all__ = ["render_report"]
