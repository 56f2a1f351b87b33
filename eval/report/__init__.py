"""The report: one HTML file of a conversion and its evaluation."""
