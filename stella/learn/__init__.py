"""A model that goes on learning from what arrives: `stella learn`."""
