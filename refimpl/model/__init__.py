"""Models and their data. Nothing here knows that other ranks exist."""
