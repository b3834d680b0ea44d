"""GGUF files: validated view, tensor reading, tokenizer, chat template."""
