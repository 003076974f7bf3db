"""What a person reads: tables, plots, pages and contact sheets."""
