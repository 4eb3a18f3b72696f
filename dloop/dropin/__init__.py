"""Drop-in generation: transformers' own `generate`, decoding with a drafter."""
