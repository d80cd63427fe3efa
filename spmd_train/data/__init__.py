"""Text to training rows.

`prepare` makes a corpus of token ids; `source` opens one, `sequences` cuts its documents into rows,
`stream` mixes and orders the rows, `heldout` keeps some documents back, `batches` shapes a step.
"""
