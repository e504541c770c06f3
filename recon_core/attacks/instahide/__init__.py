"""InstaHide (InstaHide paper): private images back from mixtures of which every sign was hidden."""
