"""Every model of timm and every classifier of transformers: walked, converted, checked against itself, reverted."""
