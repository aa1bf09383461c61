"""The keys of DeepSpeed's JSON: each one's answer, its section's schema, its value resolved."""
