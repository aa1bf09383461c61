"""ZeRO-3's units: gathered before a module needs them, ahead of time where the trace allows, freed afterwards."""
