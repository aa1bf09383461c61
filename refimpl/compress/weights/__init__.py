"""A model that is trained to need fewer bits and fewer numbers: rounded weights and inputs, masks, smaller layers."""
