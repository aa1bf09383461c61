"""Experts dealt out to ranks: tokens travel to them and their answers back."""
