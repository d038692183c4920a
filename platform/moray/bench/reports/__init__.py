"""Reports of measurements: tables, plots and HTML pages."""
