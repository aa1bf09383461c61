"""Activations: kept, computed again, sent home, or cut over neighbours."""
