"""The machine underneath: device, memory, recorded launches, clock."""
