"""Which blocks of keys a block of queries reads: layouts, by DeepSpeed's names and by the papers'."""
