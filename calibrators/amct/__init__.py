"""AMCT's own algorithms, to the bit: ARQ and DMQ for weights, IFMR and HFMG for activations."""
