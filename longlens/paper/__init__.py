"""One file for each table, figure and theorem of the paper."""
