"""The machine: device, memory, recorded launches, clock."""
