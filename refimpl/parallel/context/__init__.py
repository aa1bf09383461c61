"""One long sequence on several ranks: each has some of its tokens, and all of the weights."""
