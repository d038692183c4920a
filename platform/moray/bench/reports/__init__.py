"""What a measurement leaves behind: tables, plots and pages."""
