"""DeepSpeed's JSON: read, every key answered, and resolved into small typed configurations."""
