"""Text to token batches: `source` reads, `tokenizer` encodes, `batches` orders and shapes."""
