"""Train one model, declared once, on any mesh of data x model x stage devices."""

__version__ = "0.1.0"
