"""The report: one page that needs no network, and a small server that follows runs. No torch here."""
