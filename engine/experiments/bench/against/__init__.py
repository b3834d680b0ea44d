"""llama.cpp's own programs and this engine in alternation, on the same file."""
