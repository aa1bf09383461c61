"""Schedules as pure tables, one a file; each table states its bubble and how many activations it keeps alive."""
