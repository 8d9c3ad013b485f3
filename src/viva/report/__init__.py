"""What a run did, as one self-contained HTML file, and its curves as SVG."""

from viva.report.chart import plot_svg
from viva.report.headline import headline_text
from viva.report.page import write_report
from viva.report.run_files import read_series
from viva.report.series import Series

__all__ = ["Series", "headline_text", "plot_svg", "read_series", "write_report"]
