"""InstaHide (paper 004): private images back from mixtures of which every sign was hidden."""
