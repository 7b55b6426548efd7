"""What to draft: estimates of acceptance, prices of rounds, candidates, and the choice among them."""
