"""What the site's pages are made from: notebooks, solutions, question cards, docstrings and source files."""
