"""The update of what rests at the host or on a disk: part by part, whole, or one step late."""
