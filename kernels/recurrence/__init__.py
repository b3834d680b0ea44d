"""The recurrent cores of mixers: delta rule, state-space duality, short convolutions and their
gates."""
