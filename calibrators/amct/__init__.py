"""AMCT's algorithms, bit-exact: ARQ and DMQ for weights, IFMR and HFMG for activations."""
