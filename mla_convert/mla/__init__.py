"""The target architecture: rotary pairs, the weights of one MLA layer, and its plain float64 reference."""
