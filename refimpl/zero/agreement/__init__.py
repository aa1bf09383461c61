"""What all ranks must agree on, and the ranks beside and beyond the data-parallel ones."""
