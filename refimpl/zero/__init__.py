"""DDP and the three stages of ZeRO, each a complete class that reads as a small diff of the one before."""
