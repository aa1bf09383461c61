"""Fewer bytes for what ranks average: operators that shorten a flat tensor, error feedback, who sends what to whom."""
