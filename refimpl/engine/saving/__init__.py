"""What of a run goes into a checkpoint, and where else weights go to and come from."""
