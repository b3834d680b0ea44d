"""The bundled demo models and the programs that make and measure them."""
