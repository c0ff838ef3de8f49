"""From logits to tokens: noise, target distributions and draws, each row on its own."""
