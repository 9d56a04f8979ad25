"""See inside any PyTorch model, while it runs and while it trains."""
